PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow test-cuda format docs docs-serve clean

# A posterior at work, and a short version of the paper's comparison, on data that scikit-learn ships.
demo: $(VENV)/.lab
	$(BIN)/vprop demo --out out
	$(BIN)/vprop reproduce logreg --short --out out

# Lint, types, import direction, then doctests and tests.
test: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/pytest -n 2 --dist worksteal -q

# The checks that take minutes rather than seconds.
test-slow: $(VENV)/.test
	$(BIN)/pytest -n 2 -q -m slow tests

# For a machine with a GPU, in whatever environment holds its torch.
test-cuda:
	$(PYTHON) -m pytest -q -m cuda tests -p no:cacheprovider

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation as a site, in site/. What it needs is installed first; building it needs no network.
docs: $(VENV)/.docs
	$(MKDOCS) build --strict

# The same at http://127.0.0.1:8000, built again whenever a page is saved.
docs-serve: $(VENV)/.docs
	$(MKDOCS) serve

MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Installing compiles the CPU kernels.
BUILT_FROM := pyproject.toml constraints.txt hatch_build.py hatch_metadata.py src/vprop/kernels/cpu.c

$(VENV)/.lab: $(VENV)/bin/python $(BUILT_FROM)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[lab]"
	touch $@

$(VENV)/.docs: $(VENV)/bin/python $(BUILT_FROM)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	touch $@

$(VENV)/.test: $(VENV)/bin/python $(BUILT_FROM)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[test]"
	touch $@

clean:
	rm -rf $(VENV) out site .mypy_cache .ruff_cache .pytest_cache
