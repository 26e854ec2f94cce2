# Every target that needs the environment sets it up first; when it is up to date that costs a fraction of a second.

PYTHON ?= python3
DEVICE ?= auto
ARGS ?=
STEPS ?= 1000000
TURNS ?= 720
REQUESTS ?= 20000
SOAK_MINUTES ?= 30
SYSTEMS ?=
SEED ?= 0
OUT ?= .gpu/results
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup serve demo test test-all conformance soak lint format gpu-check gpu-bundle bench-quick repro docs clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  ARGS='...'           goes to pytest, the demo or the benchmarks, e.g. make test ARGS='-k hints -x'"
	@echo "  PYTHON=python3.12    interpreter to start with; DEVICE=cpu|cuda overrides what nvidia-smi says"

setup: ## Build .venv, or bring it up to date
	@$(PYTHON) scripts/setup_env.py --device $(DEVICE)

serve: setup ## Serve a small model with vllm-ext and keep serving
	@$(BIN)/vllm-ext demo --duel --keep-serving $(ARGS)

demo: setup ## Serve a small model, show what vllm-ext does, stop
	@$(BIN)/vllm-ext demo --duel $(ARGS)

# In the order of the files, so that what takes longest is not left for the end.
test: setup ## Run the tests; with ARGS, those that pytest chooses by them, one after the other
ifeq ($(strip $(ARGS)),)
	@$(BIN)/pytest -n auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder
else
	@$(BIN)/pytest $(ARGS)
endif

test-all: ## Run all tests in full: what `make test` covers with a part, whole
	@VLLM_EXT_TEST_FULL=1 $(MAKE) --no-print-directory test

conformance: setup ## Run vLLM's own tests with our scheduler, once per system; SYSTEMS="fcfs alise" for some
	@$(BIN)/python scripts/conformance.py --systems "$(SYSTEMS)" $(ARGS)

soak: setup ## A million steps with a KV tier where all goes wrong that can, conversations with gaps, the predictor, a loaded server
	PYTHONHASHSEED=0 SOAK_STEPS=$(STEPS) SOAK_SEED=$(SEED) $(BIN)/pytest tests/kv/test_tier_stateful.py -k long_walk $(ARGS)
	SOAK_TURNS=$(TURNS) SOAK_SEED=$(SEED) $(BIN)/pytest tests/e2e/test_e2e_gap_walks.py $(ARGS)
	SOAK_REQUESTS=$(REQUESTS) SOAK_SEED=$(SEED) $(BIN)/pytest -s tests/predictor/test_predictor_memory.py $(ARGS)
	VLLM_EXT_TEST_FULL=1 SOAK_MINUTES=$(SOAK_MINUTES) SOAK_SEED=$(SEED) $(BIN)/pytest -s tests/e2e/test_e2e_soak.py $(ARGS)

lint: setup ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## Fix style where that is safe
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

gpu-check: ## On a machine with a GPU: is everything right there, and how fast? Eight minutes; docs/gpu.md
	@$(firstword $(wildcard $(BIN)/python) $(PYTHON)) scripts/gpu_check.py --out "$(OUT)" $(ARGS)

gpu-bundle: ## Where pip works: pack vLLM for a machine with a GPU and PyTorch, but no package index
	@$(PYTHON) scripts/gpu_bundle.py .gpu $(ARGS)

bench-quick: setup ## Run on small data every benchmark whose docstring shows --quick
	@$(BIN)/python scripts/bench_quick.py $(ARGS)

repro: setup ## Measure papers' figures again whose sources have changed, and write their page; some CPU hours, goes on where it stopped
	$(BIN)/vllm-ext repro all --stale --out-dir benchmarks/results/repro $(ARGS)
	$(BIN)/python scripts/readme_results.py
	$(BIN)/python scripts/readme_results.py

docs: setup ## Build the documentation as a site, build/site, with the pages of options, metrics, hooks and figures that git does not keep
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/docs.txt
	$(BIN)/vllm-ext options --markdown > docs/options.md
	$(BIN)/python scripts/metrics_page.py > docs/all-metrics.md
	$(BIN)/python scripts/simulator_tables.py > docs/simulator-tables.md
	$(BIN)/vllm-ext patches --markdown > docs/patches.md
	$(BIN)/vllm-ext repro --document
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

clean: ## Remove the environment, caches and build output
	rm -rf .venv .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
