# `make train` and `make test` need Python 3.11 or newer and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2
DATA := .everstep/data/digits/labels.npy

.PHONY: train train-digits test test-all test-setup check bench gpu-check clean

train: $(READY)
	@$(BIN)/python -m everstep.programs.corpus .everstep/object/corpus
	@$(BIN)/python -m flows.train jobs/stdlib.yaml

train-digits: $(DATA)  # a few seconds of training, for a first look
	@$(BIN)/python -m flows.train jobs/digits.yaml

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-all: $(READY)
	EVERSTEP_ALL=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -p no:cacheprovider

test-setup:  # system packages that some tests need; without them those tests say so and are skipped
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fuse3 gcc libc6-dev postgresql strace

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python tests/bench/run.py

gpu-check: $(READY)  # what only a machine with a GPU can show; without one it says so and has not passed
	@$(BIN)/python tests/gpu/check.py

clean:
	rm -rf $(VENV) .everstep build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Everstep needs Python 3.11 or newer; set PYTHON=python3.x")'
	@echo "setting up $(VENV): some 2 GB of packages, a few minutes, once"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet --quiet -c constraints.txt -e '.[test]'
	@touch $(READY)

$(DATA): $(READY)
	@$(BIN)/python -m everstep.programs.digits $(dir $(DATA))
