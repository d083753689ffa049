# Targets create the virtual environment if it is missing, so `make test` and `make train` work in a clean checkout.
#
#   make test                      lint, types and tests
#   make test-all                  the same with the full parity matrix and others' chat templates (downloaded by pip)
#   make test-gpu                  the tests that need CUDA
#   make test-compat               private names and one plan per kind of model, on the oldest supported transformers
#   make smoke                     one minute: architecture, plan, planner, layout, one streamed plan per kind of model
#   make train                     the small demo run
#   make osft-demo                 two minutes: what OSFT and full fine-tuning forget (docs/osft_demo.md)
#   make prune-demo                two minutes: a small model pruned to a quarter and trained (docs/prune.md)
#   make docs                      the documentation as a site, in site/
#   make docs-test                 what a newcomer does: pip install in a new environment, then all commands of the docs
#   make bench                     measures training speed on this machine (docs/bench.md)
#   make test-gpu PYTHON=python3   uses an interpreter that has all packages and installs nothing (a GPU machine without
#                                  network). OUTSIZE_PYTHON in the environment does the same for all targets.
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
#                                  takes torch's CPU wheel from there if pip finds none. Not the default: pip waits for
#                                  minutes if it cannot reach the index.
#   BASE_PYTHON                    the interpreter (3.11 or newer) that creates the environment

BASE_PYTHON ?= python3
TORCH_INDEX ?=
PYTHON ?= $(OUTSIZE_PYTHON)

ifeq ($(strip $(PYTHON)),)
override PYTHON := .venv/bin/python
READY := .venv/.ready
endif

# Bits depend on the number of threads, so each test process uses one thread. Two processes use two cores. Bytecode is
# kept whatever the caller's environment says: some tests start Python, which would compile all imports each time.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE= PYTHONPATH=src
PARALLEL := -n 2 --dist worksteal
# tests/parity is listed explicitly so that the reporting process knows how many parity cells there must be
# (tests/parity/conftest.py). No test runs twice.
TESTS := tests/parity tests

# The marker `smoke` selects one cell of each kind in test_covering.py.
SMOKE := -k "not test_covering or smoke" tests/test_architecture.py tests/unit/schedule tests/unit/planner \
	tests/unit/layout tests/parity/test_covering.py

.PHONY: setup train osft-demo prune-demo test test-all test-compat smoke check test-gpu bench browser docs docs-test

setup: $(READY)

# torch is installed first, so that later packages keep it. A machine with an NVIDIA GPU gets the newest CUDA build;
# others use constraints.txt. timm is installed without dependencies: it requires torchvision, whose CUDA build would
# replace or break a CPU torch. The tests need only its models (tests/timm_models.py). The stamp is written last, so a
# failed install is repeated.
.venv/.ready: pyproject.toml constraints.txt
	@$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "BASE_PYTHON: $(BASE_PYTHON) is older than Python 3.11." \
			"Run: make BASE_PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(BASE_PYTHON) -m venv .venv
	@set -eu; \
	if nvidia-smi -L >/dev/null 2>&1; then constraint=; else constraint="-c constraints.txt"; fi; \
	index="$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))"; \
	set -x; \
	.venv/bin/python -m pip install --quiet $$index $$constraint "torch>=2.11"; \
	.venv/bin/python -m pip install --quiet $$index $$constraint -e ".[dev]"; \
	.venv/bin/python -m pip install --quiet --no-deps timm
	@touch $@

# The report page is tested in a real browser. Root on Debian or Ubuntu gets it installed; others get a message, and the
# tests of the page fail without it.
browser:
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do \
		command -v $$name >/dev/null && exit; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then set -x; apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; \
	else echo "tests/unit/report needs Chromium. Install it: sudo apt-get install chromium" >&2; fi

train: $(READY)
	PYTHONPATH=src $(PYTHON) -m examples.demo

osft-demo: $(READY)
	PYTHONPATH=src $(PYTHON) -m examples.osft

prune-demo: $(READY)
	PYTHONPATH=src $(PYTHON) -m examples.prune

docs: $(READY)
	$(PYTHON) -m pip install --quiet -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet
	@echo site/index.html

docs-test:
	tools/fresh_install.sh

check: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

test: check browser
	$(TEST_ENV) $(PYTHON) -m pytest $(PARALLEL) $(TESTS)

# The oldest supported transformers, with the torch that is installed, in a folder of its own.
test-compat: $(READY)
	$(PYTHON) -m pip install -q --upgrade --target .venv-compat "transformers==5.17.0"
	$(TEST_ENV) PYTHONPATH=.venv-compat:src $(PYTHON) -m pytest -q tests/test_compat.py tests/parity/test_covering.py -k "not test_covering or smoke"

smoke: $(READY)
	$(TEST_ENV) $(PYTHON) -m pytest $(PARALLEL) -q $(SMOKE)

# The empty marker expression overrides the default one, which excludes `full`.
test-all: check browser
	$(PYTHON) tests/other_templates.py
	$(TEST_ENV) $(PYTHON) -m pytest $(PARALLEL) -m "" $(TESTS)

# One process: the tests share one GPU and measure its memory.
test-gpu: $(READY)
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu

# With a GPU: a table of real shapes. Without: a tiny one on sim. BENCH="..." passes other arguments.
ON_GPU := --model llama-1b,llama-3b,llama-7b --gpu-memory 24GiB
BENCH ?= $(if $(shell nvidia-smi -L 2>/dev/null),$(ON_GPU))
bench: $(READY)
	PYTHONPATH=src $(PYTHON) -m benchmarks.bench $(BENCH)

.PHONY: test-arm64 wheels

# Compares what the C kernels compute on x86-64 and arm64. Needs gcc for both, and qemu-user-static.
KERNEL_FLAGS = $(shell $(PYTHON) -c "import runpy; print(*runpy.run_path('src/outsize/native/build.py')['FLAGS'])")
test-arm64: $(READY)
	mkdir -p build
	x86_64-linux-gnu-gcc $(KERNEL_FLAGS) -static tools/kernel_bits.c -o build/bits-x86_64 -lm
	aarch64-linux-gnu-gcc $(KERNEL_FLAGS) -static tools/kernel_bits.c -o build/bits-aarch64 -lm
	qemu-aarch64-static build/bits-aarch64 > build/bits.txt
	qemu-x86_64-static -cpu max build/bits-x86_64 | cmp - build/bits.txt
	qemu-x86_64-static -cpu qemu64 build/bits-x86_64 | cmp - build/bits.txt
	if [ "$$(uname -m)" = x86_64 ]; then build/bits-x86_64 | cmp - build/bits.txt; fi

# Wheels for x86-64 and arm64 in dist/ (docs/wheels.md). An earlier build/ may hold modules that are gone.
wheels: $(READY)
	for arch in x86_64 aarch64; do \
		rm -rf build && CC=$$arch-linux-gnu-gcc _PYTHON_HOST_PLATFORM=linux-$$arch \
			$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir build/wheels . && \
		$(PYTHON) -m auditwheel repair --wheel-dir dist build/wheels/*.whl || exit 1; done
