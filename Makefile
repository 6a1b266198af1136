# make demo · make test · make check: each sets up what it needs by itself, in .venv.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help env demo test check lint benchmarks

PYTHON ?= python3
BIN := $(CURDIR)/.venv/bin
STAMP := .venv/.installed
export PATH := $(BIN):$(PATH)
# Else each of the many short processes would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

help:
	@echo "make demo    compile the demonstration model for a phone and run it"
	@echo "make test    run the tests but the slow ones (about four minutes on two cores)"
	@echo "make check   style, types, import contracts, and all tests"
	@echo "make benchmarks    measure the figures whose code has changed, on a quiet machine"
	@echo "make env     only create .venv; the others do it by themselves"

env: $(STAMP)

# The native core is built while installing, so its sources count.
$(STAMP): pyproject.toml constraints.txt runtime/native/CMakeLists.txt $(wildcard runtime/native/src/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one with make PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv, once: torch, transformers, snakemake and others from the package index, then the C++ core."
	@echo "It takes 2.4 GB with torch for CPUs, more with the CUDA build that some indexes serve, and 2 to 5 minutes on a fast line."
	@$(BIN)/python -m pip install --disable-pip-version-check --editable '.[compiler,dev,eval,slurm,kubernetes]' --constraint constraints.txt
	@touch $@

demo: $(STAMP)
	@echo "Compiling the demonstration model for a phone: about 20 steps, 1 to 4 minutes on two cores."
	@snakemake --config model=demo device=pixel6 2>&1 | python -m coldpress.compiler.workflow.progress

test: $(STAMP)
	@pytest -n 2 -m "not slow"

# More workers than two cores: slow tests wait for disks, kills and schedulers.
check: lint
	@pytest -n 3

benchmarks: $(STAMP)
	@python -m pip install --quiet --disable-pip-version-check --editable '.[llama]' --constraint constraints.txt
	@snakemake -s benchmarks/Snakefile --cores all --keep-going

lint: $(STAMP)
	ruff check .
	ruff format --check .
	pyright
	lint-imports
	snakefmt --check Snakefile rules benchmarks/Snakefile
	codespell
