# make demo · make test · make check: each sets up what it needs by itself, in .venv.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help env demo docs test check lint types style readme benchmarks

PYTHON ?= python3
TESTS ?= not slow
BIN := $(CURDIR)/.venv/bin
# What a build needs, and what tests need in addition.
BUILDS := .venv/.builds
STAMP := .venv/.installed
WITH_SERVER := compiler,serve
EXTRAS := compiler,dev,docs,eval,llama,serve,slurm,kubernetes
SOURCES := pyproject.toml constraints.txt runtime/native/CMakeLists.txt $(wildcard runtime/native/src/*)
export PATH := $(BIN):$(PATH)
# Else each of the many short processes would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

help:
	@echo "make demo    compile the demonstration model for a phone and run it"
	@echo "make test    run the tests but the slow ones (about six minutes on two cores)"
	@echo "make check   style, types, import contracts, and all tests"
	@echo "make readme  run the commands of README, those of models of the hub against a stand-in"
	@echo "make docs    the documentation as a site, in site/"
	@echo "make benchmarks    measure the figures whose code has changed, on a quiet machine"
	@echo "make env     only create .venv; the others do it by themselves"

env: $(STAMP)

# uv installs in a third of pip's time, and takes pip's mirror and its folder of wheels, if pip has them.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one with make PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --disable-pip-version-check uv --constraint constraints.txt
	@pip_says() { $(BIN)/python -m pip config list | sed -n "s/^[^=]*\.$$1='\(.*\)'$$/\1/p" | tail -1; }; \
	links="$$(pip_says find-links)"; mirror="$$(pip_says index-url)"; \
	export UV_FIND_LINKS="$${UV_FIND_LINKS:-$$links}" UV_SYSTEM_CERTS="$${UV_SYSTEM_CERTS:-true}"; \
	if test -n "$$mirror"; then export UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$$mirror}"; fi; \
	$(BIN)/uv pip install --python $(BIN)/python --editable '.[$(1)]' --constraint constraints.txt || { \
		echo "uv could not install; pip tries it now, which takes a few minutes"; \
		$(BIN)/python -m pip install --disable-pip-version-check --editable '.[$(1)]' --constraint constraints.txt; }
	@touch $@
endef

# The native core is built while installing, so its sources count.
$(BUILDS): $(SOURCES)
	@echo "Installing what a build needs into .venv, once: torch, transformers, snakemake and others from the package index, then the C++ core."
	@echo "It takes 1.6 GB with torch for CPUs (UV_TORCH_BACKEND=cpu asks for it where an index serves CUDA), and 1 to 3 minutes on a fast line."
	$(call install,$(WITH_SERVER))

$(STAMP): $(SOURCES)
	@echo "Installing what builds, tests and checks need into .venv, once."
	$(call install,$(EXTRAS))
	@touch $(BUILDS)

demo: $(BUILDS)
	@if python -m tools.fetch demo; then \
		echo "Compiling SmolLM2-135M-Instruct for a phone: about 20 steps, 1 to 2 minutes on two cores."; \
		coldpress build demo --device pixel6; \
	else \
		echo "So the small model of this repository takes its place: about 20 steps, 1 to 2 minutes on two cores."; \
		coldpress build relu-demo --device pixel6; \
	fi

docs: $(STAMP)
	@python -m tools.command_documents
	@python -m tools.python_documents
	@zensical build --strict

test: $(STAMP)
	@pytest -n 2 -m "$(TESTS)"

readme: $(STAMP)
	@pytest -n 0 -m readme

# More workers than two cores: slow tests wait for disks, kills and schedulers.
check: lint
	@pytest -n 3

benchmarks: $(STAMP)
	@snakemake -s benchmarks/Snakefile --cores all --keep-going

# The type checker takes as long as all else together, so it comes first where make runs two at a time.
lint: types style

types: $(STAMP)
	pyright

style: $(STAMP)
	ruff check .
	ruff format --check .
	lint-imports
	snakefmt --check Snakefile rules benchmarks/Snakefile
	codespell
