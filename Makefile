# Everything runs in .venv, which is created once, and updated when the project's requirements change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
PEERS := $(VENV)/peers
INTEGRATIONS := $(VENV)/integrations
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: help run test test-rest test-all test-explorer lint errors dist docs explorer tutorials pictures versions models figures bench scale clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{ printf "  make %-18s %s\n", $$1, $$2 }'

run: $(READY)  ## verify rings of 1, 2 and 4 local processes, and write a report (about 70 seconds)
	@$(BIN)/ringspan verify

test: lint  ## lint, types and the fast tests (7 minutes on two cores)
	@$(PYTEST) -m "not slow" --ignore tests/integrations

test-rest: $(INTEGRATIONS)  ## what test leaves out: slow tests, random tests with all examples, integrations, the explorer (about 40 minutes)
	@$(PYTEST) -m "slow or hypothesis" --hypothesis-profile full --ignore tests/integrations --ignore tests/explorer
	@$(BIN)/python -m pytest -q tests/integrations
	@$(MAKE) --no-print-directory test-explorer

test-all: test test-rest  ## test, then test-rest (about 50 minutes on two cores)

test-explorer: $(READY)  ## the explorer in a real browser (needs chromium and npm; about 2 minutes)
	@.ci/browser || exit 0; $(BIN)/python -m pytest -q tests/explorer

docs: $(INTEGRATIONS)  ## build the documentation site and the explorer into docs/_build (npm fetches Pyodide once)
	@$(BIN)/sphinx-build -q -W docs docs/_build
	@echo "docs/_build/index.html"

explorer: $(READY)  ## build the explorer alone into docs/_build/explorer (npm fetches Pyodide once)
	@$(BIN)/ringspan explore --out docs/_build/explorer

tutorials: $(INTEGRATIONS)  ## run the tutorials, and write what they print and draw, and their notebooks (about two minutes)
	@$(BIN)/python docs/run_tutorials.py

pictures: docs  ## take the screenshots of the explorer and of the site again (needs chromium)
	@PYTHONPATH=. $(BIN)/python docs/take_pictures.py
	@PYTHONPATH=. $(BIN)/python docs/take_pages.py

versions: test-all  ## test everything, and list the versions in docs/versions.md
	@$(BIN)/python docs/write_versions.py

lint: $(READY)  ## lint and types only
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

errors: $(READY)  ## list all error messages, by file
	@$(BIN)/python -m tests.list_errors

dist: $(READY)  ## build sdist and wheel into dist/, and test the wheel in a fresh environment (about a minute, plus downloads)
	@PYTHON=$(BIN)/python .ci/dist

models: $(INTEGRATIONS)  ## compare every Transformers model type with eager attention, and write docs/transformers_models.md (15 minutes)
	@$(BIN)/python -m benchmarks transformers_models --long

figures: $(READY)  ## draw the pictures of the docs again
	@$(BIN)/python docs/draw_figures.py

bench: $(PEERS) $(INTEGRATIONS)  ## run all benchmark suites and write all result pages (about 100 minutes, LONG=1: more than five; Linux, a C++ compiler, an idle machine)
	@$(BIN)/python -m benchmarks all $(if $(LONG),--long)

scale: $(READY)  ## measure growth with length and ring size, and write docs/scale.md (minutes, LONG=1: an hour with a billion tokens; an idle machine)
	@$(BIN)/python -m benchmarks scale $(if $(LONG),--long)

clean:  ## remove .venv, dist and caches
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "ringspan needs Python 3.10 or newer, but $(PYTHON) is " + sys.version.split()[0] + "; try make PYTHON=python3.12")'
	@echo "Setting up $(VENV) (once; downloads torch) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(INTEGRATIONS): $(READY)
	@echo "Installing what ringspan integrates with (once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[trl,docs]' setuptools wheel
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation 'deepspeed>=0.16'
	@touch $@

$(PEERS): $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[peers]'
	@touch $@
