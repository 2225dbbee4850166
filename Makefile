# Every target sets up what it needs. POSIX make; python3 >= 3.11 and nothing else is assumed.

PYTHON = python3
BIN = .venv/bin
SOURCES = gateway router engine_plugins kvpool simulator loadtest cli.py engine_cli.py local_stack.py stack_panel.py __init__.py
LINTED = $(SOURCES) tests scripts examples benchmarks docker
MODEL = smollm2
PORT = 8000
BENCH_ROUNDS ?= 5
SOAK_SCALE ?= 1
FUZZ_EXAMPLES ?= 500
BENCH_RESULTS = benchmarks/results

.PHONY: help setup setup-engine setup-bench setup-sdks setup-deploy images images-test run demo run-real test e2e soak check bench clean

help:
	@echo "make run          gateway and 3 simulated engines on localhost (sets up .venv when missing)"
	@echo "make demo         a short load on such a stack, for each of three policies; a table; a minute"
	@echo "make run-real     gateway and 2 real vLLM engines with a 135 M-parameter model"
	@echo "make test         unit, simulation and integration tests"
	@echo "make e2e          tests against real vLLM engines"
	@echo "make soak         the long forms of load and fault tests (SOAK_SCALE=1: 40 minutes)"
	@echo "make check        formatter, linter, types, import contracts"
	@echo "make images       container images (docker, or buildah where no daemon is)"
	@echo "make images-test  the services of docker-compose.yml, from their images (root, buildah)"
	@echo "make bench        what routing costs, next to other routers (BENCH_ROUNDS=5; half an hour)"
	@echo "                  (make run PORT=8001 for another port)"
	@echo "make setup        only .venv          make setup-engine   only .venv-engine"
	@echo "make setup-sdks   only .venv-sdks, for examples/: .venv-sdks/bin/python examples/openai_chat.py"
	@echo "                  (they ask http://127.0.0.1:8000, or MOONGATE_URL)"

setup: .venv/.ready
setup-engine: .venv-engine/.ready
setup-bench: .venv-bench/.ready
setup-sdks: .venv-sdks/.ready
setup-deploy: .venv-deploy/.ready

.venv/.ready: requirements/gateway.txt requirements/loadtest.txt requirements/dev.txt pyproject.toml
	@$(PYTHON) scripts/setup_venv.py

.venv-bench/.ready: requirements/bench.txt
	@$(PYTHON) scripts/setup_venv.py bench

.venv-sdks/.ready: requirements/sdks.txt
	@$(PYTHON) scripts/setup_venv.py sdks

.venv-deploy/.ready: requirements/deploy.txt
	@$(PYTHON) scripts/setup_venv.py deploy

# pyproject.toml names the plugin that engines load.
.venv-engine/.ready: requirements/engine.txt pyproject.toml scripts/setup_engine.py
	@$(PYTHON) scripts/setup_engine.py

run: .venv/.ready
	@$(BIN)/moongate up --port $(PORT)

# One stack after the other, each with the same conversations; any free port.
demo: .venv/.ready
	@$(BIN)/moongate loadtest policies --policies round_robin,least_loaded,kv_cost --users 8 \
		--duration 12s --spawn-rate 8 --think 0.3 --turns 12 --system-tokens 2000 --first-tokens 8000 \
		--turn-tokens 800 --answer-tokens 20 --seed 1 --out demo-report

run-real: .venv/.ready .venv-engine/.ready
	@model=$$(.venv-engine/bin/python scripts/make_models.py $(MODEL) | tail -n 1) && \
	$(BIN)/moongate up --engine vllm --engines 2 --port $(PORT) --model "$$model"

test: .venv/.ready .venv-deploy/.ready
	@$(BIN)/python -m pytest tests/unit tests/simulation tests/integration

e2e: .venv/.ready .venv-engine/.ready .venv-sdks/.ready
	@$(BIN)/python -m pytest tests/e2e -s

# The long forms. SOAK_SCALE=0.1 shortens them; none of them is in CI, where short ones are.
soak: .venv/.ready
	@MOONGATE_FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/python -m pytest tests/unit/fuzzing --timeout 3600
	@MOONGATE_SOAK_SCALE=$(SOAK_SCALE) $(BIN)/python -m pytest tests/soak -s

# What this machine can build; ARGS=--all makes it a failure if that is not everything.
images:
	@$(PYTHON) scripts/build_images.py $(ARGS)

# As root, with buildah: starts the services of docker-compose.yml from their images.
images-test: .venv/.ready .venv-deploy/.ready images
	@$(BIN)/python -m pytest tests/images -s

check: .venv/.ready
	@$(BIN)/ruff format --check $(LINTED)
	@$(BIN)/ruff check $(LINTED)
	@$(BIN)/python scripts/check_types.py
	@$(BIN)/lint-imports --no-cache

# The rounds come last: they are the longest, and the others tell the most about one's own change.
bench: .venv/.ready .venv-bench/.ready .venv-engine/.ready
	@mkdir -p $(BENCH_RESULTS)
	@$(BIN)/python -m benchmarks.router_scale --json $(BENCH_RESULTS)/router_scale.json
	@$(BIN)/python -m benchmarks.pool_lookup --json $(BENCH_RESULTS)/pool_lookup.json
	@$(BIN)/python -m benchmarks.hot_prefixes --json $(BENCH_RESULTS)/hot_prefixes.json
	@model=$$(.venv-engine/bin/python scripts/make_models.py smollm2 | tail -n 1) && \
	$(BIN)/python -m benchmarks.prompt_pipeline --tokenizer "$$model" \
		--json $(BENCH_RESULTS)/prompt_pipeline.json && \
	$(BIN)/python -m benchmarks.side_by_side --rounds $(BENCH_ROUNDS) --tokenizer "$$model" \
		--json $(BENCH_RESULTS)/side_by_side.json

clean:
	rm -rf .venv .venv-bench .venv-engine .venv-sdks .venv-deploy build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
