# One door for everything. Needs Python 3.11 or newer with venv, and make; the rest is installed into .venv.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
FILES ?=

.DEFAULT_GOAL := help
.PHONY: help demo test check bench clean

help:  ## what can be made
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

demo: $(VENV)/.demo-ready  ## a team of agents reads real text with a model on this machine; FILES="a.txt b.md" for your own
	$(BIN)/ensemble-ray demo $(FILES)

test: $(VENV)/.dev-ready  ## all tests
	$(BIN)/python -m pytest

check: $(VENV)/.dev-ready  ## form: format, lint, import contracts, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/.dev-ready  ## speed, as ratios to the same calls by hand
	$(BIN)/python -m benchmarks

clean:  ## remove the virtual environment and everything that tools left
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# Stamps: what is installed already is not installed again.
$(VENV)/.demo-ready: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[local]'
	$(BIN)/ensemble-ray models install
	@touch $@

$(VENV)/.dev-ready: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/ensemble-ray models install
	@touch $@
