# make bench   compares the library with stock PyTorch on this machine
# make test    lint, then all tests
# make train   trains a small Llama for two minutes on two CPU ranks; its loss falls
# Each makes .venv, installs the pinned requirements and builds in place first; a second run does
# only what has changed. A .venv that is a link to an environment of yours is used as it is.
PYTHON ?= python3
VENV ?= .venv
BENCH_ARGS ?= --quick
PYTEST_ARGS ?=
TRAIN_ARGS ?= --seconds 105
# Two files at a time: tests between processes wait much and use several cores for moments only.
PYTEST_WORKERS ?= 2

bin := $(VENV)/bin
python := $(bin)/python
native := $(shell find csrc examples tests bench \( -name '*.h' -o -name '*.c' -o -name '*.cpp' -o -name '*.cu' \
            -o -name '*.cuh' \) 2>/dev/null | sort)
# The stamps lie in the environment, so that they go with it.
stamps := $(VENV)/stamps
linked := $(shell test -L $(VENV) && echo yes)

.PHONY: bench test train lint format build clean

bench: build
	$(python) -m bench $(BENCH_ARGS)

# Lint and compiling side by side: the types take one core for minutes.
test: environment
	@$(MAKE) --no-print-directory --jobs=2 lint build
	$(python) -m pytest --numprocesses $(PYTEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

train: build
	PYTHONPATH=. OMP_NUM_THREADS=1 $(python) -m torch.distributed.run --standalone --nproc-per-node 2 \
	  examples/train_gpt.py --folder runs/train-$$(date +%Y%m%d-%H%M%S) $(TRAIN_ARGS)

lint: environment
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	@echo $(bin)/clang-format --dry-run -Werror "(all C, C++ and CUDA files)"
	@$(bin)/clang-format --dry-run -Werror $(native)
	$(bin)/mypy

format: environment
	$(bin)/ruff check --fix .
	$(bin)/ruff format .
	$(bin)/clang-format -i $(native)

.PHONY: environment
ifeq ($(linked),yes)
environment:

build: environment
	$(python) setup.py --quiet build_ext --inplace
else
environment: $(stamps)/requirements

build: $(stamps)/installed
	$(python) setup.py --quiet build_ext --inplace
endif

$(python):
	@$(PYTHON) -c 'import sys; v = sys.version_info; (3, 10) <= v < (3, 14) or sys.exit( \
	  f"Python 3.10 to 3.13 is needed, {sys.executable} is {v.major}.{v.minor}; name another: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(stamps)/requirements: requirements.txt constraints.txt requirements-nodeps.txt | $(python)
	$(python) -m pip install --quiet --requirement requirements.txt --constraint constraints.txt
	$(python) -m pip install --quiet --no-deps --requirement requirements-nodeps.txt
	@mkdir -p $(@D) && touch $@

$(stamps)/installed: pyproject.toml setup.py $(stamps)/requirements
	$(python) -m pip install --quiet --no-build-isolation --no-deps --editable .
	@mkdir -p $(@D) && touch $@

clean:
	rm -rf build dist *.egg-info pyparallel/lib pyparallel/include pyparallel/*.so
