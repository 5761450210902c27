# make train, make test: on a fresh machine they make a virtual environment, install into it and run.
#
# PYTHON       the interpreter for the virtual environment, 3.10 or later
# VENV         where the virtual environment is
# PIP_FLAGS    more options for pip install, such as another package index
# TORCH        what to install where torch is absent; the light CPU build wherever pip's indexes offer it
# ARGS         more arguments: make train ARGS="strategy=plain", make test ARGS="-k schedule"

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PIP_FLAGS ?=
ARGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: train test slow lint format types clean
.DEFAULT_GOAL := train

# An interpreter that has torch lends it to the virtual environment: a build made for this machine's GPU is kept.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "$(PYTHON) is older than Python 3.10: name a newer one, as in make train PYTHON=python3.12"; exit 1; }
	@echo "Making $(VENV)"
	@if $(PYTHON) -c 'import torch' 2>/dev/null; \
		then $(PYTHON) -m venv --system-site-packages $(VENV); \
		else $(PYTHON) -m venv $(VENV); fi

$(INSTALLED): pyproject.toml | $(BIN)/python
	@$(BIN)/python -c 'import torch; print("Keeping torch", torch.__version__)' 2>/dev/null \
		|| $(BIN)/python -m pip install $(PIP_FLAGS) '$(TORCH)'
	$(BIN)/python -m pip install $(PIP_FLAGS) --editable '.[dev]'
	@echo "Compiling the planner's loops"
	@$(BIN)/python -m lightning_zb.planning.compiling
	@touch $@

train: $(INSTALLED)
	$(BIN)/python recipes/train.py $(ARGS)

# One thread a process: the tests start several processes, and a pool of threads in each would fight for the cores.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS)

slow: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(INSTALLED)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) outputs multirun .pytest_cache .ruff_cache .mypy_cache .hypothesis
