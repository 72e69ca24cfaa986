# Everything runs in .venv, which uv installs from the hashed lock file.
PYTHON ?= python3
BIN := .venv/bin
LOCK_DATE := 2026-11-14

# Without compiled files each of some hundred processes that tests start compiles semix anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup quickstart test test-process test-slow check docs bench bench-gpu bench-fidelity lock clean

setup: .venv/installed

.venv/installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "semix needs Python 3.11 or newer; try make PYTHON=python3.12"; exit 2; }
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet 'uv>=0.9'
	$(BIN)/uv pip sync --quiet --compile-bytecode --python $(BIN)/python --require-hashes requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

quickstart: setup
	$(BIN)/semix quickstart

# tests/rungs.py sets the number of processes; in `make test-process` each starts a Prefect server.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --durations=10

test: setup
	$(PYTEST)

test-process: setup
	$(PYTEST) -m 'process and not slow and not gpu'

test-slow: setup
	$(BIN)/python -m pytest -m slow --durations=10

# Ratios against peers, both sides in one run; needs a quiet machine.
bench: setup
	$(BIN)/python -m benchmarks

bench-gpu: setup
	$(BIN)/python -m benchmarks.gpu

# What faster recipes cost in quality; for real weights call the module with --config CONFIG.
bench-fidelity: setup
	$(BIN)/python -m benchmarks.fidelity

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	mkdir -p .venv/tree/semix
	ln -sfn $(addprefix $(CURDIR)/,data pipeline calib flows configs semix/__init__.py) .venv/tree/semix/
	$(BIN)/mypy

# The pages and the reference as a site in build/docs; needs no network, and any warning fails.
docs: setup
	$(BIN)/sphinx-build --fail-on-warning --keep-going --nitpicky --quiet -c docs . build/docs

lock:
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 \
		--generate-hashes --no-emit-index-url --no-header --no-annotate \
		--exclude-newer $(LOCK_DATE) --quiet --output-file requirements.lock

clean:
	rm -rf .venv quickstart build
