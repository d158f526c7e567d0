# Three targets for users (demo, test, test-all), the rest for the people who build iServe.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# What pip is given to install PyTorch. For Linux its usual index has the build for CUDA, 2.7 GB to download; the CPU
# build, 0.2 GB, is in an index of its own, which pytorch.org names: make setup TORCH='torch==2.13.0 --index-url URL'.
# Left empty, a CPU build that pip's find-links has is taken on a machine without an NVIDIA GPU.
TORCH  ?=
STAMP  := $(VENV)/.installed

# The tests start hundreds of Python processes, each of which would compile the whole project again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-long golden accuracy verify-tensorrt-llm evaluation lint types docs setup clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@echo "installing iserve[dev] into $(VENV): 2.7 GB with PyTorch for CPUs; 2.7 GB more to download for CUDA"
	@if [ -n "$(TORCH)" ]; then $(BIN)/pip install -qq $(TORCH); \
	elif ! command -v nvidia-smi >/dev/null 2>&1; then $(BIN)/pip install -qq torch==2.13.0; fi
	@$(BIN)/pip install -qq --editable ".[dev]"
	@touch $(STAMP)

demo: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh docs/demo.sh

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: setup
	$(BIN)/mypy -n 2

# Files in their order, which ends with short ones: by their number of tests the longest would come last, alone.
TESTS := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=15

# Tiers are in docs/testing.md.
test: lint types
	$(TESTS) -m "(smoke or not process) and not slow and not long and not gpu"

test-all: lint types
	$(TESTS) -m "not long and not gpu"

# The words that users read, written anew into tests/golden, without those that no test compares; `git diff` shows
# what changed.
golden: setup
	REWRITE_GOLDEN=1 $(BIN)/pytest -q -m "golden and not long and not gpu"

test-long: setup
	$(BIN)/pytest -m "long" --durations=25
	HYPOTHESIS_EXAMPLES=new $(BIN)/pytest -n 2 -m "hypothesis and not process and not gpu"

# Predictions against whole models, about ten minutes; on a machine that does nothing else (docs/accuracy.md).
# Kept in iServe's home, where `iserve report` finds it.
accuracy: setup
	$(BIN)/python -m tests.bench.full_model_accuracy --json accuracy.json

# For those who have TensorRT-LLM, with which iServe was never run: MODEL=/path/to/checkpoint, and
# ISERVE_TENSORRT_LLM_PYTHON set. Conformance, accuracy and one deployment; the file it names is to be sent back.
verify-tensorrt-llm: setup
	@test -n "$(MODEL)" || { echo "name a checkpoint: make verify-tensorrt-llm MODEL=/path/to/checkpoint"; exit 2; }
	$(BIN)/python -m tests.bench.verify_engine tensorrt-llm "$(MODEL)"

# The paper's figures in full: JSON with date and machine, SVG, and the notebooks' outputs, in notebooks/.
evaluation: setup
	$(BIN)/python -m notebooks.figures.record
	$(BIN)/python -m notebooks.figures.worlds

docs: setup
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
