# Every target creates .venv on first use; it does not need to be activated.
#   make demo ARGS="--seed 2"     make test ARGS="-k planning"     make PYTHON=python3.12 test

PYTHON ?= python3
ARGS ?=
# For `make chaos`: bare (seconds per episode) or campaign (minutes), and the seeds of the episodes.
KIND ?= bare
SEEDS ?= 1-20

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install demo test chaos check docs clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP)  ## Create .venv with all dependencies for running, testing and development

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "Python 3.10 or newer is required: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "[1/3] creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/3] installing torch, the largest part"
	@$(PIP_INSTALL) torch
	@echo "[3/3] installing freetrain-parsl and its tools"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)  ## Watch seven trainings on the idle nodes of a small busy cluster
	@$(BIN)/freetrain demo $(ARGS)

test: $(STAMP)  ## Run all tests; those that need a missing batch system or GPU are skipped
	@# Once, instead of in each of hundreds of processes if they cannot write bytecode.
	@$(BIN)/python -m compileall -q freetrain_parsl
	@$(BIN)/python -m tests $(ARGS)

chaos: $(STAMP)  ## Run trainings under random faults: make chaos SEEDS=1-300 ARGS="--jobs 2"
	@$(BIN)/python -m freetrain_parsl.testing.chaos $(KIND) $(SEEDS) $(ARGS)

check: $(STAMP)  ## Run linter, format check and type check
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

docs: $(STAMP)  ## Build the documentation into docs/_build/html
	@$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

clean:  ## Remove .venv, caches and build outputs; demo runs are kept
	rm -rf $(VENV) build dist docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
