# Everything runs in .venv, which scripts/setup_env.py makes and keeps up to date.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help env stores demo server test test-faults lint format bench clean

help:
	@echo "make demo    vLLM with hints off and on under the same load: a table, out/demo.json, out/demo.html"
	@echo "make server  the demo's server on 127.0.0.1:8000, for the examples"
	@echo "make test    ruff, mypy and every test, the ones with a real server included"
	@echo "make test-faults  plant faults in copies of the checkout: which test catches each?"
	@echo "make stores  fetch Mooncake, LMCache and vllm-ascend for their tests, as make test does"
	@echo "make bench   what the plugin costs beside stock vLLM: out/overhead.json"
	@echo "make lint    ruff and mypy only        make format  let ruff rewrite the files"
	@echo "make clean   remove .venv, out/ and every cache"

env:
	@$(PYTHON) scripts/setup_env.py

demo: env
	@$(BIN)/vllm-agent-hint demo

server: env
	@exec $(BIN)/vllm-agent-hint demo-server

bench: env
	@$(BIN)/vllm-agent-hint bench overhead --json out/overhead.json

lint: env
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

test: lint
	-@$(PYTHON) scripts/setup_stores.py
	@$(BIN)/pytest

stores: env
	@$(PYTHON) scripts/setup_stores.py

test-faults: env
	@$(BIN)/python -m tests.faults

format: env
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

clean:
	rm -rf .venv out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
