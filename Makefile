# make demo | test | test-quick (no slow tests) | test-thorough (all cases) | test-gpu | test-crash | test-scale | test-page | test-avx2 (as a processor without AVX-512 rounds) | lint | bench | mutants      each sets up .venv first, from the pins in constraints.txt
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready

.PHONY: demo test test-quick test-thorough test-gpu test-crash test-scale test-page test-avx2 lint bench mutants clean

# the tests start many processes: each would compile the package anew
export PYTHONDONTWRITEBYTECODE :=

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0 numpy hatchling editables
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/coadjoint demo

test: $(READY) lint
	$(BIN)/python -m pytest -n 2

test-quick: $(READY)
	$(BIN)/python -m pytest -n 2 -m "not slow" --ignore=tests/house/test_mutants.py

test-thorough: $(READY) lint
	$(BIN)/python -m pytest -n 2 --thorough

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# as it is: where there is a GPU, torch is there already and often nothing can be installed
test-gpu:
	PYTHONPATH=src $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) tools/gpu.py

test-crash: $(READY)
	$(BIN)/python tools/crash.py

# many processes, workers that are killed, a PostgreSQL server of Debian's package
test-scale: $(READY)
	test -n "$$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null)" || (apt-get update -qq && apt-get install -y -qq postgresql)
	$(BIN)/python -m pytest tests/scale --scale

# results differ in rounding between processors, and no test may depend on that
test-avx2: $(READY)
	OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/$(VENV)/inductor-avx2 $(BIN)/python -m pytest -n 2

test-page: $(READY)
	command -v chromium >/dev/null || (apt-get update -qq && apt-get install -y -qq chromium)
	$(BIN)/python -m pytest tests/training/test_page.py

bench: $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench]' --no-build-isolation
	$(BIN)/coadjoint bench --write benchmarks/RESULTS.md

mutants: $(READY)
	$(BIN)/python tools/mutants.py

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache
