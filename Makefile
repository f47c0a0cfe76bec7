# Everything a developer or a CI machine runs. The environment is made on first use.

SHELL := bash
VENV := .venv
PYTHON := $(VENV)/bin/python
# Written last, so that an interrupted installation never counts as done.
STAMP := $(VENV)/.installed

# Two threads per rank on a small machine only fight; dynamo would compile for minutes.
TEST_ENV := OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1
PYTEST := $(TEST_ENV) $(PYTHON) -m pytest

.DEFAULT_GOAL := help
.PHONY: help .venv demo test test-unit test-dist test-slow test-gpu lint format lock wheel clean

help:  ## print this list
	@grep -hE '^[a-z.-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

.venv: $(STAMP)  ## make or update the environment from requirements.lock

$(STAMP): requirements.lock pyproject.toml setup.py scripts/bootstrap.sh
	@bash scripts/bootstrap.sh $@

demo: $(STAMP)  ## train eight ranks, kill three, compare every loss
	@bash scripts/demo.sh

test: $(STAMP)  ## unit and dist tests
	@$(PYTEST) -m "(unit or dist) and not slow and not gpu" $(ARGS)

test-unit: $(STAMP)  ## tests without processes of their own, three minutes
	@$(PYTEST) -m "unit and not slow and not gpu" tests/unit $(ARGS)

test-dist: $(STAMP)  ## tests with real processes over gloo
	@$(PYTEST) -m "dist and not slow and not gpu" $(ARGS)

# pytest's exit code 5 means that no test was selected: nothing failed.
test-slow: $(STAMP)  ## what the normal suite leaves out
	@$(PYTEST) -m "slow and not gpu" $(ARGS) || [ $$? -eq 5 ]

test-gpu: $(STAMP)  ## tests for a machine with one GPU, skipped with a reason elsewhere
	@$(PYTEST) -m gpu $(ARGS) || [ $$? -eq 5 ]

# All three speak, whichever fails first.
lint: $(STAMP)  ## ruff and mypy
	@failed=0; \
	$(PYTHON) -m ruff check . || failed=1; \
	$(PYTHON) -m ruff format --check . || failed=1; \
	$(PYTHON) -m mypy || failed=1; \
	exit $$failed

format: $(STAMP)  ## rewrite the sources as ruff wants them
	@$(PYTHON) -m ruff check --fix .
	@$(PYTHON) -m ruff format .

lock:  ## resolve pyproject.toml anew into requirements.lock (needs uv)
	@uv --version >/dev/null 2>&1 || { echo "error: make lock needs uv on PATH" >&2; exit 2; }
	@uv pip compile --quiet --generate-hashes --python-version 3.12 pyproject.toml --extra dev \
		--no-emit-index-url --no-header -o requirements.lock

# setuptools copies through build/, where files deleted since would still be found.
wheel: $(STAMP)  ## build dist/*.whl
	@rm -rf build
	@$(PYTHON) -m build --wheel --no-isolation --outdir dist .
	@rm -rf build

clean:  ## remove everything generated except the environment
	@rm -rf build dist out .demo .hypothesis .pytest_cache .mypy_cache .ruff_cache *.egg-info
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
