# The verbs. Each makes its own virtual environment when needed, so `make test` or `make train` is all a clean checkout asks for.
#
#   make test                          lint, types and tests             make test-all   the full parity product as well
#   make smoke                         while you work, a minute: architecture, plans, planner, layout, each kind of model under one streamed plan
#   make train                         the small demo run                make test-gpu   the tests that need CUDA
#   make bench                         how fast this machine trains (docs/bench.md)
#   make test-gpu PYTHON=python3       with an interpreter that has everything already: nothing is installed (a GPU box
#                                      without network). OUTSIZE_PYTHON in the environment does the same for all verbs.
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
#                                      no GPU, and pip knows no CPU wheel of torch: take it from there. Not the default, since pip
#                                      waits for minutes on an index that it cannot reach.
#   BASE_PYTHON                        the interpreter (3.11 or newer) from which the environment is made

BASE_PYTHON ?= python3
TORCH_INDEX ?=
PYTHON ?= $(OUTSIZE_PYTHON)

ifeq ($(strip $(PYTHON)),)
override PYTHON := .venv/bin/python
READY := .venv/.ready
endif

# Bits depend on the number of threads, so tests run on one each; two test processes keep two cores busy.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONPATH=src
PARALLEL := -n 2 --dist worksteal
# tests/parity is named once more so that the process that prints knows how many parity cells there must be (tests/parity/conftest.py); no test runs twice.
TESTS := tests/parity tests

# `smoke` is a marker as well, of one cell of each kind in test_covering.py.
SMOKE := -k "not test_covering or smoke" tests/test_architecture.py tests/unit/plan tests/unit/planner tests/unit/layout tests/parity/test_covering.py

.PHONY: setup train test test-all smoke check test-gpu bench browser

setup: $(READY)

# torch comes first and alone: whatever is installed after it finds it there and leaves it. A machine with an NVIDIA GPU gets the
# newest CUDA build, any other is held to constraints.txt. timm comes without its dependencies: it wants torchvision, whose CUDA build would replace or
# break a CPU torch; the tests need its models only (tests/timm_models.py). The stamp is written last, so a broken install is tried again.
.venv/.ready: pyproject.toml constraints.txt
	@$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "outsize needs Python 3.11 or newer, but $(BASE_PYTHON) is older. Run: make BASE_PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(BASE_PYTHON) -m venv .venv
	@set -eu; \
	if nvidia-smi -L >/dev/null 2>&1; then constraint=; else constraint="-c constraints.txt"; fi; \
	index="$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))"; \
	set -x; \
	.venv/bin/python -m pip install --quiet $$index $$constraint "torch>=2.11"; \
	.venv/bin/python -m pip install --quiet $$index $$constraint -e ".[dev]"; \
	.venv/bin/python -m pip install --quiet --no-deps timm
	@touch $@

# The report page is tested in a real browser. Root on Debian or Ubuntu gets it; others are told, and the tests of the page fail without.
browser:
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do command -v $$name >/dev/null && exit; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then set -x; apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; \
	else echo "tests/unit/report needs Chromium. Install it: sudo apt-get install chromium" >&2; fi

train: $(READY)
	PYTHONPATH=src $(PYTHON) -m examples.demo

check: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

test: check browser
	$(TEST_ENV) $(PYTHON) -m pytest $(PARALLEL) $(TESTS)

smoke: $(READY)
	$(TEST_ENV) $(PYTHON) -m pytest $(PARALLEL) -q $(SMOKE)

# The empty marker expression undoes the default one, which leaves `full` out.
test-all: check browser
	$(TEST_ENV) $(PYTHON) -m pytest $(PARALLEL) -m "" $(TESTS)

# One process: the tests share one GPU and measure its memory.
test-gpu: $(READY)
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu

# A table of real shapes where there is a GPU, else a tiny one on sim. BENCH="..." gives other arguments.
ON_GPU := --model llama-1b,llama-3b,llama-7b --gpu-memory 24GiB
BENCH ?= $(if $(shell nvidia-smi -L 2>/dev/null),$(ON_GPU))
bench: $(READY)
	PYTHONPATH=src $(PYTHON) -m benchmarks.bench $(BENCH)
