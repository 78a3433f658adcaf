# make run   the main job on embedded data: how far does examples/digits.py scale before accuracy pays? It takes as long
#            as its phases need on this machine, by its first steps: 1.5 minutes on two idle cores, more on busy ones
# make test  style, types and tests
# make soak  what make test and the smoke runs leave out: long runs under faults, all cells of wide matrices, twice as
#            many examples of each property, the other benchmarks at their smallest
# make sources  measures again what docs/sources.md shows, at a small size (at most 15 minutes), beside the committed
#            figures; FULL=1: at their own size, which takes hours, and goes on where it was interrupted
# make nightly  make bench-smoke, make test and make soak
# make oldest  the fast tests of training on the oldest torch that pyproject.toml allows, in .venv-oldest (5 GB, or 2 with
#              TORCH_INDEX); with another Python, too: make oldest PYTHON=python3.13
# make docs  the site of all pages, with the reference that docstrings and commands give, into build/site
# make gpu   what needs a GPU: its tests and benchmark, by $(PYTHON) and the torch it has, with no network
# make fuzz  the fuzzers of tests/fuzz with many more examples, and all properties with other ones than make test has
# A machine without a GPU saves 2 GB of downloads with TORCH_INDEX=(the index of PyTorch's CPU wheels, see its website)

PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
SOURCES := src tests examples benchmarks docs integrations
CONSTRAINTS := constraints.txt
PIP := $(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# One core a process: several of them share the machine.
export OMP_NUM_THREADS ?= 1
# More than a machine of two cores has: most of a slow test, or benchmark, is waiting.
TEST_PROCESSES ?= 3
SMOKES_AT_ONCE ?= 2

.PHONY: run test suite docs oldest gpu sources soak nightly fuzz lint types bench-smoke clean

run: $(VENV)/.installed
	$(BIN)/elastune frontier examples/digits.py --workers 1,2,4,8,16 --target 0.95 --budget auto

# mypy takes one core for a minute, and the site half of one: the tests begin meanwhile.
test: lint
	$(MAKE) --no-print-directory -j2 types suite docs

# Exit code 1: tests failed. A few of them get a second run, alone, and are told by name.
suite: $(VENV)/.installed-dev
	$(BIN)/pytest -q -n $(TEST_PROCESSES) --durations 20 --durations-min 10 -m "not soak" || { test $$? = 1 && $(BIN)/python tests/again.py; }

soak: $(VENV)/.installed-dev
	@$(if $(LCBENCH),,echo "no hpo/lcbench in ELASTUNE_DATA: without the benchmarks of sampler and stopping")
	@$(if $(SPOT),,echo "no spot_traces in ELASTUNE_DATA: without the benchmark of spot machines")
	@$(if $(TRACES),,echo "no hpo/lcbench or pollux_traces in ELASTUNE_DATA: without the benchmark of the broker")
	$(BIN)/pytest -q -n $(TEST_PROCESSES) -m soak
	FUZZ=1 $(BIN)/pytest -q -n $(TEST_PROCESSES) -m "hypothesis and not soak"
	$(RUN_SMOKES) $(LONG_SMOKES)
	$(MAKE) --no-print-directory sources

# All there is: what a night has time for.
nightly: bench-smoke test soak

# Everything but torch, and the package of its compiler, is as in constraints.txt.
OLDEST_TORCH ?= 2.9.1
OLDEST_ROOMS := core parallel elastic train adapt parity
oldest:
	mkdir -p .venv-oldest
	{ grep -vE "^(torch|triton|nvidia-.*|cuda-.*)==" constraints.txt; echo "torch==$(OLDEST_TORCH)"; } > .venv-oldest/constraints.txt
	$(MAKE) --no-print-directory VENV=.venv-oldest CONSTRAINTS=.venv-oldest/constraints.txt .venv-oldest/.installed-oldest
	.venv-oldest/bin/python -c "import sys, torch; print('Python', sys.version.split()[0], 'torch', torch.__version__)"
	.venv-oldest/bin/pytest -q -n $(TEST_PROCESSES) -m "not soak" $(OLDEST_ROOMS:%=tests/%)

# So many times the examples that make test tries, other ones each time.
FUZZ ?= 100
fuzz: $(VENV)/.installed-dev
	FUZZ=$(FUZZ) $(BIN)/pytest -q -n $(TEST_PROCESSES) --timeout 0 -m hypothesis

# Makes no environment: PYTHON has a torch (>= 2.9) that sees the GPU, and what pyproject.toml names.
GPU_OUT ?= benchmarks/results/gpu.json
gpu:
	PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m benchmarks.gpu.gpu --tests --out $(GPU_OUT)

sources: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.sources.again $(if $(FULL),--full)

# Fails at every warning, so at a link that leads nowhere. Needs no network.
docs: $(VENV)/.installed-dev
	$(BIN)/sphinx-build -q -W --keep-going -b html -c docs -d build/doctrees . build/site
	@echo "docs: build/site/docs/index.html"

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(VENV)/.installed-dev
	$(BIN)/mypy

# Four benchmarks once each, at their smallest: equal bits, faults, the cost of a step, a lost worker.
SMOKES := chaos hashes elastic overhead
# All others, for `make soak`, but for those of `make sources`: tests have their pure parts, or do what they do. Those of
# the search need data in $$ELASTUNE_DATA. The longest begin.
LONG_SMOKES := hosts blocks reshape reshape_killed levels bubble mesh_chaos strategies killed_studies elastic_peers checkpoint_stall slots elastic_live journal agents goodput ensembles transfer transferability planning_time feeding gpu
LCBENCH := $(wildcard $(ELASTUNE_DATA)/hpo/lcbench)
TRACES := $(and $(LCBENCH),$(wildcard $(ELASTUNE_DATA)/pollux_traces))
SPOT := $(wildcard $(ELASTUNE_DATA)/spot_traces)
LAYOUTS := $(wildcard $(ELASTUNE_DATA)/layout_times)
LONG_SMOKES += $(if $(LCBENCH),sampler multi_fidelity optuna_script search_model) $(if $(TRACES),elastic_search) $(if $(SPOT),spot) $(if $(LAYOUTS),layout_prediction)
OPTIONS_chaos := $(if $(wildcard $(ELASTUNE_DATA)/mnist),,--data-set digits)
OPTIONS_hashes := --check benchmarks/results/hashes.json
RUN_SMOKES := $(BIN)/python tests/smokes.py $(SMOKES_AT_ONCE)

bench-smoke: $(VENV)/.installed-dev
	$(RUN_SMOKES) $(foreach name,$(SMOKES),"$(name) $(OPTIONS_$(name))")

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "elastune needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# Stamps: nothing is installed again until what is to be installed changes.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[all]'
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev,engines,tls,ray]'
	touch $(VENV)/.installed $@

$(VENV)/.installed-oldest: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	touch $@
