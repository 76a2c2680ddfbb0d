# The everyday commands, each with all of its own set-up; `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -m
LOCK := python/requirements.lock
INSTALL := $(RUN) pip install --quiet --disable-pip-version-check --constraint $(LOCK)
MODEL := models/smollm2-135m-instruct
# PyTorch for the operators: the version that they are built for, and a second one that must load them.
TORCH := .venv-torch
SECOND_TORCH := 2.15.0
BINARIES := isobit-rollout isobit-scorer isobit-comparator isobit-model
SOURCES = $(shell git ls-files '*.h' '*.cc' '*.cu' '*.cuh')
# Which tests `make test` runs: a test preset of CMakePresets.json for build/release.
TESTS ?= release
# Extra arguments of the demo, such as ARGS='--modes tree --max_tokens 32'.
ARGS ?=
# OFFLINE=1 takes a random model instead of the one from the package index.
OFFLINE ?=

# Where the CUDA toolkit puts nvcc, on machines that have it but not on their PATH.
export PATH := $(PATH):/usr/local/cuda/bin

ifeq ($(OFFLINE),)
MODEL_FILES := $(MODEL)/config.json
else
DEMO_FLAGS := --offline
endif

# What `make wheels` builds; the second needs nvcc.
WHEELS ?= isobit isobit-cuda isobit-torch
BUILT_FROM := $(if $(filter isobit-cuda isobit-torch,$(WHEELS)),$(VENV)/.nccl) $(if $(filter isobit-torch,$(WHEELS)),$(TORCH)/.installed)

.PHONY: help deps venv model build demo check test test-asan test-tsan fuzz test-soak build-gpu test-gpu test-gpu-sanitizers build-torch build-trainer test-torch test-verl test-frameworks test-hosts train-demo build-torch-gpu \
  test-torch-gpu wheels check-wheels lint lint-changed format check-format check-structure clean

help:  ## This list
	@sed -nE 's/^([a-z -]+):.*  ## (.*)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 30

deps: build/.deps  ## Installs the Debian packages (root or sudo)
venv: $(VENV)/.installed  ## Makes the virtual environment with the Python packages
model: $(MODEL)/config.json  ## Downloads and converts SmolLM2-135M-Instruct

build: build/release/build.ninja  ## Builds everything, optimised
	cmake --build --preset release

demo: build/release/build.ninja $(VENV)/.installed $(MODEL_FILES)  ## Runs the demo; OFFLINE=1: random model
	cmake --build --preset release --target $(BINARIES)
	$(RUN) isobit demo $(DEMO_FLAGS) $(ARGS)

check: build/release/build.ninja $(VENV)/.installed  ## Builds and runs the short unit tests; from a built tree minutes, without network
	cmake --build --preset release
	tests/run_tests.sh build/release --preset check

test: build $(VENV)/.installed $(VENV)/.deploy $(VENV)/.routers $(MODEL_FILES) build/.page  ## Builds everything and runs all tests that need no GPU
	tests/run_tests.sh build/release --preset $(TESTS)

test-asan test-tsan: test-%: build/%/build.ninja  ## Builds with sanitizers and runs the host tests
	cmake --build --preset $* --target isobit_tests
	tests/run_tests.sh build/$* --preset $*

fuzz: build/fuzz/build.ninja $(VENV)/.fuzz  ## Searches each border for input that breaks it, 20 s each
	cmake --build --preset fuzz --target isobit_fuzz_targets
	tests/run_tests.sh build/fuzz --preset fuzz

# Moments at which an attack strikes, inputs of each fuzzing target, seconds of mixed work: some four hours on 2 cores.
SOAK_TRIES ?= 300
SOAK_INPUTS ?= 10000000
SOAK_SECONDS ?= 600
test-soak: build build/fuzz/build.ninja $(VENV)/.fuzz  ## Attacks, fuzzing and mixed work, for long
	tests/run_tests.sh build/release --preset attack
	ISOBIT_BIN_DIR=$(CURDIR)/build/release/bin ISOBIT_ATTACK_TRIES=$(SOAK_TRIES) \
	  timeout 7200 $(VENV)/bin/python tests/attack/changed_weights_test.py
	ISOBIT_BIN_DIR=$(CURDIR)/build/release/bin ISOBIT_ATTACK_TRIES=$(SOAK_TRIES) \
	  timeout 7200 $(VENV)/bin/python tests/attack/weight_stream_test.py
	cmake --build --preset fuzz --target isobit_fuzz_targets
	tests/fuzz/run_long.sh build/fuzz $(SOAK_INPUTS)
	$(VENV)/bin/python bench/services/soak.py --shape tiny-qwen2 --update_every_s 5 --duration_s $(SOAK_SECONDS)

build-gpu: build/cuda/build.ninja  ## Builds services, tests and tools for GPUs (nvcc 13)
	cmake --build --preset cuda --target isobit_gpu_tests isobit-bench isobit-numerics $(BINARIES)

test-gpu: build-gpu $(VENV)/.disassembly  ## Runs the tests of the CUDA kernels; without a GPU they skip
	tests/run_tests.sh build/cuda --preset cuda

test-gpu-sanitizers: build-gpu  ## Runs the tests of the CUDA kernels under compute-sanitizer (a GPU)
	tests/run_sanitizers.sh build/cuda

build-torch: build/torch/build.ninja  ## Builds the PyTorch operators, build/torch/lib/libisobit_torch.so
	cmake --build --preset torch --target isobit_torch

build-trainer: build/torch/build.ninja  ## Builds the training loop in C++, build/torch/bin/isobit-trainer
	cmake --build --preset torch --target isobit-trainer

test-torch: build-torch build/torch-asan/build.ninja build/release/build.ninja $(TORCH)/.second $(TORCH)/.frameworks $(MODEL_FILES)  ## Runs the tests of the PyTorch operators, also under ASan, of the C++ front and trainer, and of TRL's trainers
	cmake --build --preset torch --target front_test trainer_pieces_test isobit-trainer
	cmake --build --preset torch-asan --target isobit_torch
	cmake --build --preset release --target $(BINARIES)
	tests/run_tests.sh build/torch --preset torch

test-verl: build-torch build/release/build.ninja $(TORCH)/.verl $(MODEL_FILES)  ## Runs verl's own classes with isobit, on a local Ray (minutes)
	cmake --build --preset release --target $(BINARIES)
	for test in verl verl_quickstart; do \
	  PYTHONPATH=$(TORCH)/verl:$(TORCH)/frameworks:python:python/tools ISOBIT_BIN_DIR=$(CURDIR)/build/release/bin \
	    ISOBIT_REQUIRE_FRAMEWORKS=1 HF_HUB_OFFLINE=1 $(TORCH)/bin/python tests/integrations/$${test}_test.py; done

# ISOBIT_FRAMEWORK_SOURCES=DIRECTORY: also slime, miles and NeMo Gym, whose checkouts are there.
test-frameworks: build/release/build.ninja $(TORCH)/.clients  ## Runs trainers' own HTTP clients against the gateway (minutes)
	cmake --build --preset release --target $(BINARIES)
	for test in frameworks framework_sources; do \
	  PYTHONPATH=$(TORCH)/clients:$(TORCH)/frameworks:python:python/tools ISOBIT_BIN_DIR=build/release/bin \
	    ISOBIT_REQUIRE_FRAMEWORKS=1 HF_HUB_OFFLINE=1 $(TORCH)/bin/python tests/gateway/$${test}_test.py; done

# Needs the package index, so that no other target runs it.
test-hosts: $(VENV)/.installed  ## Installs the client beside frameworks, each in a fresh environment, and imports both (minutes)
	$(VENV)/bin/python tests/python/hosts_test.py

train-demo: build-torch build/release/build.ninja  ## Trains a tiny model on-policy, beside vanilla (CPU)
	cmake --build --preset release --target $(BINARIES)
	PYTHONPATH=python:python/tools $(TORCH)/bin/python -m isobit_tools.train_demo $(ARGS)

build-torch-gpu: build/torch-cuda/build.ninja  ## Builds the PyTorch operators for GPUs too, build/torch-cuda/lib/libisobit_torch.so
	cmake --build --preset torch-cuda --target isobit_torch

test-torch-gpu: build-torch-gpu build-gpu  ## Compares training on GPUs with the CPU's bits; without a GPU it skips
	tests/run_tests.sh build/torch-cuda --preset torch-cuda

wheels: build/.wheel $(BUILT_FROM)  ## Builds the wheels, dist/*.whl (Debian 12, nvcc 13); WHEELS=isobit: that one alone
	deploy/wheels/steps.sh build $(WHEELS)

# Needs root, the package index and Debian's archive, so that no other target runs it.
check-wheels: $(VENV)/.installed  ## Installs the wheels of dist/ in empty environments, and runs what they hold (minutes)
	$(VENV)/bin/python tests/wheels/contents_test.py
	$(VENV)/bin/python tests/wheels/installed_test.py

lint: build build/.lint  ## Runs clang-tidy over every source file
	run-clang-tidy -quiet -p build/release '$(CURDIR)/(common|kernels|rollout|trainer_bridge|tests|tools|bench)/.*\.cc'

LINT_MINUTES ?= 10
lint-changed: build build/.lint  ## Runs clang-tidy over what the branch changed; on main over all, for at most LINT_MINUTES=10
	python3 tests/lint_changed.py build/release --minutes $(LINT_MINUTES)

format: $(VENV)/.format  ## Formats C++ and Python
	@$(VENV)/bin/clang-format -i $(SOURCES)
	$(RUN) isobit_tools.sync_clients
	$(RUN) ruff format --quiet --config python/pyproject.toml python tests deploy bench
	$(RUN) ruff check --quiet --fix --config python/pyproject.toml python tests deploy bench

check-format: $(VENV)/.format  ## Fails if `make format` would change anything
	@echo 'checking the format of $(words $(SOURCES)) C++ files and of all Python files'
	@$(VENV)/bin/clang-format --dry-run -Werror $(SOURCES)
	$(RUN) ruff format --quiet --check --config python/pyproject.toml python tests deploy bench
	$(RUN) ruff check --quiet --config python/pyproject.toml python tests deploy bench

# Needs nothing but a Python.
check-structure:  ## Checks folders, documents and their tables, as `make test` does, too
	$(PYTHON) tests/structure_test.py
	$(PYTHON) tests/function_length_test.py
	$(PYTHON) tests/docs_test.py
	$(PYTHON) tests/proto/comments_test.py
	$(PYTHON) tests/models_page.py --check
	$(PYTHON) bench/reports/benchmark_pages.py --check

clean:  ## Removes what was built, but neither environment nor models
	rm -rf build dist logs

build/.deps: deploy/install_deps.sh
	deploy/install_deps.sh
	mkdir -p $(@D) && touch $@

# Without the browser, its test skips, loudly.
build/.page: deploy/install_deps.sh | build/.deps
	deploy/install_deps.sh page || echo 'test: no browser could be installed, so page_test skips' >&2
	mkdir -p $(@D) && touch $@

build/.wheel: deploy/install_deps.sh
	deploy/install_deps.sh wheel
	mkdir -p $(@D) && touch $@

build/.lint: deploy/install_deps.sh
	deploy/install_deps.sh lint
	mkdir -p $(@D) && touch $@

$(VENV)/.installed: python/pyproject.toml python/setup.py python/tools/pyproject.toml $(LOCK) $(wildcard proto/isobit/v1/*.proto) \
  | build/.deps
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable python --editable 'python/tools[test]'
	touch $@

$(VENV)/.format: python/tools/pyproject.toml | $(VENV)/.installed
	$(INSTALL) --editable 'python/tools[format]'
	touch $@

$(VENV)/.deploy: python/tools/pyproject.toml | $(VENV)/.installed
	$(INSTALL) --editable 'python/tools[deploy]'
	touch $@

# Without the router (its packages are for x86-64 and Arm Linux), its test skips, loudly.
$(VENV)/.routers: tests/deploy/requirements-routers.txt | $(VENV)/.installed
	$(INSTALL) --no-deps --upgrade --target $(VENV)/routers -r $< || \
	  echo 'test: no router could be installed, so router_test skips' >&2
	touch $@

$(VENV)/.fuzz: python/tools/pyproject.toml | $(VENV)/.installed
	$(INSTALL) --editable 'python/tools[fuzz]'
	touch $@

# Without the disassembler (its packages are for x86-64 and Arm Linux), the tests that need it skip.
$(VENV)/.disassembly: python/tools/pyproject.toml | $(VENV)/.installed
	$(INSTALL) --editable 'python/tools[disassembly]' || \
	  echo 'test-gpu: no disassembler could be installed' >&2
	touch $@

$(MODEL)/config.json: | $(VENV)/.installed
	$(RUN) isobit.convert.smollm2 --output $(MODEL)

$(VENV)/.nccl: python/tools/pyproject.toml | $(VENV)/.installed
	$(INSTALL) --editable 'python/tools[nccl]'
	touch $@

# PyTorch has an environment of its own: 5 GB, and its packages pin others than the client's tools do.
$(TORCH)/.installed: tests/torch/requirements.txt | $(VENV)/.installed
	$(PYTHON) -m venv $(TORCH)
	$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	touch $@

# The second version shares all else with the first.
$(TORCH)/.second: | $(TORCH)/.installed
	$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
	  --target $(TORCH)/second torch==$(SECOND_TORCH)
	ln -sfn "$$($(TORCH)/bin/python -c 'import nvidia; print(*nvidia.__path__)')" $(TORCH)/second/nvidia
	touch $@

# What RL frameworks need besides, of newer versions than the operators' tests.
$(TORCH)/.frameworks: tests/integrations/requirements.txt | $(TORCH)/.installed
	$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
	  --target $(TORCH)/frameworks -r $<
	touch $@

$(TORCH)/.verl: tests/integrations/requirements-verl.txt | $(TORCH)/.frameworks
	$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
	  --target $(TORCH)/verl -r $<
	touch $@

$(TORCH)/.clients: tests/gateway/requirements-frameworks.txt | $(TORCH)/.frameworks
	$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python --upgrade \
	  --target $(TORCH)/clients -r $<
	touch $@

build/torch/build.ninja build/torch-asan/build.ninja build/torch-cuda/build.ninja: | $(TORCH)/.installed
build/cuda/build.ninja build/torch-cuda/build.ninja: | $(VENV)/.nccl

build/fuzz/build.ninja: | build/.fuzz_deps
build/.fuzz_deps: deploy/install_deps.sh
	deploy/install_deps.sh fuzz
	mkdir -p $(@D) && touch $@

# CMake itself notices every later change of its files.
build/%/build.ninja: CMakePresets.json | build/.deps
	[[ $* != *cuda ]] || command -v nvcc >/dev/null || { echo 'make: the preset $* needs nvcc 13 on PATH or in' \
	  '/usr/local/cuda/bin: https://developer.nvidia.com/cuda-downloads' >&2; exit 1; }
	cmake --preset $* -DISOBIT_PYTHON=$(CURDIR)/$(VENV)/bin/python
	touch $@
