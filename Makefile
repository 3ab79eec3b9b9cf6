# Every target creates .venv on first use; it does not need to be activated. `make demo` installs only what it needs.
#   make demo ARGS="--seed 2"     make test ARGS="-k planning"     make PYTHON=python3.12 test

PYTHON ?= python3
ARGS ?=
# For `make chaos`: bare or shared (seconds per episode), campaign or shared-campaign (minutes), and the seeds.
KIND ?= bare
SEEDS ?= 1-20

VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-for-demo
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)

# Of the lowest versions, those of the oldest Python: newer ones have no wheels of all of them.
RESOLVE = $(BIN)/uv pip compile --quiet --no-python-downloads --python-version 3.10 --extra dev pyproject.toml \
	--no-annotate --custom-compile-command "make constraints" $(ARGS)

.DEFAULT_GOAL := help
.PHONY: help install install-demo demo test test-all test-pythons chaos check docs constraints clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP)  ## Create .venv with all dependencies for running, testing and development

install-demo: $(DEMO_STAMP)  ## Create .venv with the dependencies of the demo only

$(DEMO_STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "Python 3.10 or newer is required: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@echo "installing torch, the largest part"
	@$(PIP_INSTALL) torch
	@echo "installing freetrain-parsl"
	@$(PIP_INSTALL) -e '.[examples,report,dashboard]'
	@touch $@

$(STAMP): $(DEMO_STAMP)
	@echo "installing the tools for tests and development"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@

demo: $(DEMO_STAMP)  ## Watch seven training jobs on the idle nodes of a small busy cluster
	@$(BIN)/freetrain demo $(ARGS)

test test-all: $(STAMP)
	@# Once, instead of in each of hundreds of processes if they cannot write bytecode.
	@$(BIN)/python -m compileall -q freetrain_parsl
	@$(BIN)/python -m tests $(if $(filter test-all,$@),--all) $(ARGS)

test:  ## Run the quick tests and a path through each layer (8 minutes); skip what needs a missing batch system or GPU
test-all:  ## Run all tests (about 50 minutes)

test-pythons: $(STAMP)  ## Try the demo and the quick tests on each supported Python that is found: ARGS="3.10 lowest"
	@$(BIN)/python -m tests.pythons $(ARGS)

chaos: $(STAMP)  ## Run training jobs under random faults: make chaos SEEDS=1-300 ARGS="--jobs 2"
	@$(BIN)/python -m tests.support.chaos $(KIND) $(SEEDS) $(ARGS)

check: $(STAMP)  ## Run linter, format check and type check
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

docs: $(STAMP)  ## Build the documentation into docs/_build/html
	@$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

constraints: $(STAMP)  ## Resolve constraints*.txt for every supported Python, keeping their pins: ARGS=--upgrade does not
	@$(RESOLVE) --universal --output-file constraints.txt
	@$(RESOLVE) --resolution lowest-direct --output-file constraints-lowest.txt

clean:  ## Remove .venv, caches and build outputs; demo runs are kept
	rm -rf .venv build dist docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
