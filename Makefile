# `make run` trains on real data, `make test` checks; both set up everything they need in .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Each test process has one thread (conftest.py): two of them keep two cores busy.
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal

.PHONY: run test test-all coverage lint docs format types check clean help

run: $(READY)  ## train on scikit-learn's digits (about three minutes on two cores)
	$(BIN)/fedprophet train $(ARGS)

test: $(READY)  ## the quick tests (about five minutes on two cores)
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(READY)  ## every test, the slow ones included
	$(PYTEST) --budget $(ARGS)

coverage: $(READY)  ## every test, and which lines they reach
	$(PYTEST) --cov --cov-report=term $(ARGS)

lint: $(READY)  ## format, lint and the order of the layers, without changing anything
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(READY)  ## the documentation site, in build/site; warnings are errors
	$(BIN)/mkdocs build --quiet --strict

types: $(READY)  ## mypy --strict
	$(BIN)/mypy

check: lint docs types test-all  ## what CI runs

format: $(READY)  ## format and fix in place
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove the environment and caches (runs/ stays)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage build dist

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "FedProphet needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
