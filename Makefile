# `make` shows what there is. Everything is installed into .venv in this folder.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help train test test-all test-oldest lint docs wheel clean

VENV := .venv
BIN := $(VENV)/bin
APP := $(VENV)/.installed-app
DEV := $(VENV)/.installed-dev
# A process for each core, each with whole files: the tests of a file share what is made once. They
# start many processes: bytecode is kept even where the environment says not to.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses=auto --maxprocesses=8 \
	--dist=loadfile
# The library with the oldest PyTorch that pyproject.toml allows: where gradients depend on it.
OLDEST := .venv-oldest
OLDEST_TESTS := test_derivatives.py test_calls.py test_changed_layers.py test_exported_programs.py recurrent
# Options for the command behind a target: make train ARGS="data=mnist impl=cpp"
ARGS ?=

help: ## show this list
	@echo 'make train [ARGS="data=mnist impl=cpp"], make test [ARGS="-k throughput"]'
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 12

train: $(APP) ## run python train.py; ARGS are its overrides
	@$(BIN)/python train.py $(ARGS)

test: $(DEV) ## run the tests that are not slow; ARGS go to pytest
	@OMP_NUM_THREADS=1 $(PYTEST) -m "not slow" $(ARGS)  # a thread for each process

test-all: $(DEV) ## run every test that can run here
	@$(PYTEST) $(ARGS)

test-oldest: $(OLDEST)/.installed ## run the tests of gradients with the oldest PyTorch
	@$(OLDEST)/bin/python -m pytest --numprocesses=auto --dist=loadfile -m "not slow" \
		$(addprefix tests/hoconv/,$(OLDEST_TESTS)) $(ARGS)

lint: $(DEV) ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	find csrc -type f -print0 | xargs -0 $(BIN)/clang-format --dry-run -Werror

docs: $(DEV) ## build the documentation site into outputs/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(DEV) ## build a wheel with compiled kernels for CPUs and GPUs, in dist/; needs nvcc
	@trap 'rm -rf csrc/recurrent/ready' EXIT; $(BIN)/python -m hoconv.recurrent.ready && \
		$(BIN)/hoconv build --wheel .

clean: ## remove environments and caches; runs and data stay
	rm -rf $(VENV) $(OLDEST) *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(APP): pyproject.toml
	@$(call install,app)

$(DEV): pyproject.toml
	@$(call install,app$(comma)dev$(comma)sweep)

# hypothesis and pytest-xdist: what those tests import, without the app's packages.
$(OLDEST)/.installed: $(DEV)
	$(BIN)/python -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -e . numpy \
		"torch==$$(sed -nE 's/^dependencies = .*"torch>=([^"]*)".*/\1/p' pyproject.toml).*" \
		hypothesis pytest pytest-xdist rich
	touch $@

comma := ,

# The stamps are the last thing made and the first thing removed: where there is none, an
# installation was interrupted or never begun, and it starts from an empty environment.
define install
set -euo pipefail; \
clear=; [ -e $(APP) ] || [ -e $(DEV) ] || clear=--clear; \
for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11) none; do \
    $$python -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; \
done; \
if [ $$python = none ]; then \
    echo "Python 3.11 or later with its venv module is needed: install it, or name one: make PYTHON=/path/to/python3" >&2; \
    exit 1; \
fi; \
echo "Installing into $(VENV): PyTorch is a large download, a few minutes the first time"; \
rm -f $(APP) $(DEV); \
$$python -m venv $$clear $(VENV); \
$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(1)]'; \
touch $(APP); \
case "$(1)" in *dev*) touch $(DEV);; esac
endef
