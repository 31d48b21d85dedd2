# The two commands of the README are `make serve` and `make test`; both make what they need first and are quick the
# second time. Variables: MODEL, ARGS (flags of `jaxpd serve`), TESTS (what pytest runs), EXTRAS (e.g. cuda), PYTHON, VENV.

MODEL ?= smollm2-135m
ARGS ?=
TESTS ?=
EXTRAS ?=
VENV ?= .venv
AOT_VENV ?= .venv-aot
PIP_FLAGS ?= -q --disable-pip-version-check

BIN := $(VENV)/bin
comma := ,
with_extras = .$(if $(strip $(1)),[$(1)])
extras_of = $(if $(EXTRAS),$(1)$(if $(1),$(comma))$(EXTRAS),$(1))

.DEFAULT_GOAL := help
.PHONY: help serve test lint format clusters failures fuzz gemma reference notebooks aot roofline soak clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(VENV)/.installed ## serve MODEL on a prefill mesh and a decode mesh
	@$(BIN)/jaxpd serve $(MODEL) $(ARGS)

test: $(VENV)/.installed-test ## run the tests
	@JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q $(TESTS)

lint: $(VENV)/.installed-dev ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@JAX_PLATFORMS=cpu $(BIN)/mypy

format: $(VENV)/.installed-dev ## let ruff rewrite the files
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

fuzz: $(VENV)/.installed-fuzz ## send 20,000 random and mutated requests to both fronts (minutes)
	@JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q -m fuzz $(or $(TESTS),tests/serving tests/system)

gemma: $(VENV)/.installed-test ## compare Gemma 3 270M with its reference tokens (downloads 238 MB)
	@JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q -m gemma $(TESTS)

reference: $(VENV)/.installed-test ## compare SmolLM2 with its reference tokens on every pair of meshes (minutes)
	@JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q -m slow $(TESTS)

clusters: $(VENV)/.installed-test ## start whole clusters and break them: jaxpd up, workers, manifests' commands (minutes; EXTRAS=ray for Ray)
	@JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q -m clusters $(TESTS)

failures: $(VENV)/.installed-test ## every way that workers fail, at every stage of a request (ten minutes), write the table
	@JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q -m failures $(or $(TESTS),tests/cluster); status=$$?; \
	  if [ -z '$(TESTS)' ] && [ -f build/failures.json ]; then \
	    JAX_PLATFORMS=cpu $(BIN)/python -m tests.cluster.report build/failures.json $(wildcard build/soak.json) || status=1; \
	  fi; \
	  exit $$status

soak: $(VENV)/.installed-test ## 5,000 requests while clients leave and workers are killed (minutes)
	@JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q -s -m soak $(or $(TESTS),tests/cluster)

notebooks: $(VENV)/.installed-test ## run the notebooks and keep what comes out (minutes)
	@JAX_PLATFORMS=cpu $(BIN)/python colab/refresh.py

aot: $(AOT_VENV)/.installed-aot ## compile kernels and models for TPUs and GPUs that are not there, write the table (minutes)
	@mkdir -p build && rm -f build/aot.json
	@JAX_PLATFORMS=cpu $(AOT_VENV)/bin/python -m pytest -q -m aot --aot-json build/aot.json $(or $(TESTS),tests/aot); \
	  status=$$?; \
	  if [ -z '$(TESTS)' ] && [ -f build/aot.json ]; then \
	    $(AOT_VENV)/bin/python -m benchmarks.aot_table build/aot.json || status=1; \
	  fi; \
	  exit $$status

roofline: $(AOT_VENV)/.installed-aot ## count bytes and FLOPs of compiled models against the ideal, write the table (minutes)
	@JAX_PLATFORMS=cpu $(AOT_VENV)/bin/python -m benchmarks.roofline

clean: ## remove the environments and what tools left behind
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `python3 --version` is not enough: a version manager's stand-in may fail when run, and Debian's python3 comes without
# ensurepip. So the first one that passes is the first that can really make an environment.
$(VENV)/bin/python:
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11 python; do \
	  "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	  echo "making $(VENV) with $$("$$python" -V)" >&2; \
	  exec "$$python" -m venv $(VENV); \
	done; \
	echo "No Python >= 3.11 with venv was found. Install one (Debian, Ubuntu: apt install python3 python3-venv)" >&2; \
	echo "or name it: make PYTHON=/path/to/python3.12 ..." >&2; \
	exit 1

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "installing jaxpd and what it needs into $(VENV) (a few minutes the first time)" >&2
	@$(BIN)/python -m pip install $(PIP_FLAGS) -e '$(call with_extras,$(call extras_of,))'
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(VENV)/bin/python
	@echo "installing jaxpd and its test tools into $(VENV) (a few minutes the first time)" >&2
	@$(BIN)/python -m pip install $(PIP_FLAGS) -e '$(call with_extras,$(call extras_of,test))'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-fuzz: pyproject.toml | $(VENV)/bin/python
	@echo "installing jaxpd and what makes up requests into $(VENV) (a few minutes the first time)" >&2
	@$(BIN)/python -m pip install $(PIP_FLAGS) -e '$(call with_extras,$(call extras_of,fuzz))'
	@touch $@ $(VENV)/.installed-test $(VENV)/.installed

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	@echo "installing jaxpd and its development tools into $(VENV) (a few minutes the first time)" >&2
	@$(BIN)/python -m pip install $(PIP_FLAGS) -e '$(call with_extras,$(call extras_of,dev))'
	@touch $@ $(VENV)/.installed-test $(VENV)/.installed

# jaxlib, libtpu and the CUDA plugin that fit one another are to be had for Python >= 3.12 only.
$(AOT_VENV)/bin/python:
	@for python in $(PYTHON) python3 python3.13 python3.12 ~/.pyenv/versions/3.1[2-9]*/bin/python python; do \
	  "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null || continue; \
	  echo "making $(AOT_VENV) with $$("$$python" -V)" >&2; \
	  exec "$$python" -m venv $(AOT_VENV); \
	done; \
	echo "make aot needs Python >= 3.12 with venv, and none was found. Install one (Debian 13, Ubuntu 24.04:" >&2; \
	echo "apt install python3 python3-venv) or name it: make aot PYTHON=/path/to/python3.12" >&2; \
	exit 1

$(AOT_VENV)/.installed-aot: pyproject.toml | $(AOT_VENV)/bin/python
	@echo "installing jaxpd, libtpu and the CUDA plugin into $(AOT_VENV) (a few minutes the first time)" >&2
	@$(AOT_VENV)/bin/python -m pip install $(PIP_FLAGS) -e '.[aot,test]'
	@touch $@
