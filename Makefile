# Two commands matter: `make demo` and `make test`. Both make .venv first. PIP_* variables are yours and are passed on.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo demo-ranks chaos test lint types unit bench clean

demo: $(VENV)/.demo
	$(BIN)/fsdp-async train experiment=demo run.overwrite=true
	$(BIN)/fsdp-async report outputs/demo

demo-ranks: $(VENV)/.demo
	$(BIN)/torchrun --nproc-per-node 2 -m fsdp_async.cli train experiment=demo run.output_dir=outputs/demo_ranks run.overwrite=true

chaos: $(VENV)/.demo
	$(BIN)/python tests/chaos.py --kills $(or $(KILLS),30) --seed $(or $(SEED),0)

test: lint types unit

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

unit: $(VENV)/.test
	$(BIN)/python -m pytest

bench: $(VENV)/.test
	$(BIN)/python benchmarks/state_cache.py
	$(BIN)/python benchmarks/async_vs_sync.py

$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[report]'
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist
