"""The position scheme of this model is in config.json; what it means is in hf_posswap: pip install hf_posswap

With `import hf_posswap` the Auto classes load this model. Without, trust_remote_code=True does, by these imports alone.
"""

from hf_posswap.checkpoint import (  # noqa: F401
    PosswapGPT2Config,
    PosswapGPT2ForQuestionAnswering,
    PosswapGPT2ForSequenceClassification,
    PosswapGPT2ForTokenClassification,
    PosswapGPT2LMHeadModel,
    PosswapGPT2Model,
)
