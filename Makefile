# Three targets for users (demo, test, test-all), the rest for the people who build iServe.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# On a machine without an NVIDIA GPU a CPU build of this release is used where pip's find-links has one.
TORCH_CPU ?= torch==2.13.0
STAMP  := $(VENV)/.installed

# The tests start hundreds of Python processes, each of which would compile the whole project again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-long golden accuracy evaluation lint types docs setup clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@if ! command -v nvidia-smi >/dev/null 2>&1; then $(BIN)/pip install -qq "$(TORCH_CPU)"; fi
	@echo "installing iserve[dev] into $(VENV)"; $(BIN)/pip install -qq --editable ".[dev]"
	@touch $(STAMP)

demo: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh docs/demo.sh

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: setup
	$(BIN)/mypy

# Files in their order, which ends with short ones: by their number of tests the longest would come last, alone.
TESTS := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=15

# Tiers are in docs/testing.md.
test: lint types
	$(TESTS) -m "(smoke or not process) and not slow and not long and not gpu"

test-all: lint types
	$(TESTS) -m "not long and not gpu"

# The words that users read, written anew into tests/golden; `git diff` shows what changed.
golden: setup
	rm -f tests/golden/*.txt
	REWRITE_GOLDEN=1 $(BIN)/pytest -q -m "golden and not long and not gpu"

test-long: setup
	$(BIN)/pytest -m "long" --durations=25

# Predictions against whole models, about ten minutes; on a machine that does nothing else (docs/accuracy.md).
# Kept in iServe's home, where `iserve report` finds it.
accuracy: setup
	$(BIN)/python -m tests.bench.full_model_accuracy --json accuracy.json

# The paper's figures in full: JSON with date and machine, SVG, and the notebooks' outputs, in notebooks/.
evaluation: setup
	$(BIN)/python -m notebooks.figures.record

docs: setup
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
