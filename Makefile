# make run   the main job on embedded data: how far does examples/digits.py scale before accuracy pays?
# make test  style, types and tests
# make soak  the long runs under faults that make test leaves out
# A machine without a GPU saves 2 GB of downloads with TORCH_INDEX=(the index of PyTorch's CPU wheels, see its website)

PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
SOURCES := src tests examples benchmarks
PIP := $(BIN)/python -m pip install --quiet -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# One core a process: several of them share the machine.
export OMP_NUM_THREADS ?= 1
# More than a machine of two cores has: most of a slow test is waiting.
TEST_PROCESSES ?= 3

.PHONY: run test soak lint types bench-smoke clean

run: $(VENV)/.installed
	$(BIN)/elastune frontier examples/digits.py --workers 1,2,4,8,16 --target 0.97 --budget 90s

test: lint types
	$(BIN)/pytest -q -n $(TEST_PROCESSES) -m "not soak"

soak: $(VENV)/.installed-dev
	$(BIN)/pytest -q -m soak

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(VENV)/.installed-dev
	$(BIN)/mypy

# Benchmarks of the search need data in $$ELASTUNE_DATA: hpo/lcbench, pollux_traces.
bench-smoke: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/hashes.py --check benchmarks/results/hashes.json --smoke
	$(BIN)/python benchmarks/overhead.py --smoke
	$(BIN)/python benchmarks/elastic.py --smoke
	$(BIN)/python benchmarks/elastic_peers.py --smoke
	$(BIN)/python benchmarks/monitoring.py --smoke
	$(BIN)/python benchmarks/adaptive.py --smoke
	$(BIN)/python benchmarks/journal.py --smoke
	$(BIN)/python benchmarks/killed_studies.py --smoke
	$(BIN)/python benchmarks/elastic_live.py --smoke
	$(BIN)/python benchmarks/genetic_mnist.py --smoke
	if [ -d "$$ELASTUNE_DATA/mnist" ]; then $(BIN)/python benchmarks/chaos.py --smoke; \
	else echo "no mnist in ELASTUNE_DATA: chaos strikes the embedded digits"; \
	$(BIN)/python benchmarks/chaos.py --smoke --data-set digits; fi
	if [ -d "$$ELASTUNE_DATA/hpo/lcbench" ]; then $(BIN)/python benchmarks/sampler.py --smoke && \
	$(BIN)/python benchmarks/multi_fidelity.py --smoke; \
	else echo "no lcbench in ELASTUNE_DATA: the benchmarks of sampler and stopping are left out"; fi
	if [ -d "$$ELASTUNE_DATA/hpo/lcbench" ] && [ -d "$$ELASTUNE_DATA/pollux_traces" ]; then \
	$(BIN)/python benchmarks/elastic_search.py --smoke; \
	else echo "no lcbench or pollux_traces in ELASTUNE_DATA: the benchmark of the broker is left out"; fi

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "elastune needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# Stamps: nothing is installed again until what is to be installed changes.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	touch $(VENV)/.installed $@
