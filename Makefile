# Every target works from any folder: make -C DIR, or make -f DIR/Makefile, which starts make again in this folder.
TARGETS := help train test lint bench colabs clean
.PHONY: $(TARGETS)
.DEFAULT_GOAL := help
.NOTPARALLEL:

# This file's folder, found without the functions that split a path at its spaces.
quote = '$(subst ','\'',$(1))'
HERE := $(shell f=$(call quote,$(strip $(MAKEFILE_LIST))); case $$f in (*/*) cd "$${f%/*}" ;; esac && pwd -P)

ifneq ($(CURDIR),$(HERE))

$(TARGETS):
	@exec $(MAKE) --no-print-directory -C $(call quote,$(HERE)) $@

else

WORKDIR ?= runs/stdlib_moe
BENCH ?= language_quality

help:
	@echo 'make train    train the default sparse language model into WORKDIR ($(WORKDIR)), or resume it'
	@echo '              ARGS="--config.model.num_experts=16" goes to the program'
	@echo 'make test     run the tests; TESTS="tests/core -k routing" goes to pytest'
	@echo 'make lint     run ruff and mypy'
	@echo 'make bench    run benchmarks/BENCH.py ($(BENCH)); ARGS="..." goes to it'
	@echo 'make colabs   execute every notebook of colabs/'
	@echo 'make clean    remove .venv, caches and build leftovers; keeps runs/'
	@echo 'Each first makes .venv if it is missing or out of date; PYTHON=python3.12 says from which interpreter.'

ifneq ($(shell [ -w . ] && { [ ! -e .venv ] || [ -w .venv ]; } && echo writable),writable)

$(filter-out help,$(TARGETS)):
	@echo $(call quote,cannot write to $(CURDIR): copy it to a folder of your own) >&2; exit 1

else

VENV_PYTHON := .venv/bin/python
# `exec` lets a signal sent to make reach the program: no shell stands between.
RUN := exec $(VENV_PYTHON)
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax
# The TPU library, which the tests compile with, complains at length of a machine without an accelerator.
export JAX_PLATFORMS ?= $(if $(wildcard /dev/accel* /dev/vfio/* /dev/nvidia* /dev/kfd /dev/dxg),,cpu)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

train: .venv/ready
	@$(RUN) -m moe_jax.language.main --config=configs/language/stdlib_moe.py --workdir="$(WORKDIR)" $(ARGS)

test: .venv/ready-test
	@$(RUN) -m pytest --numprocesses=auto --maxprocesses=4 --dist=loadfile $(TESTS)

lint: .venv/ready-lint
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m mypy

bench: .venv/ready-bench
	@$(RUN) -m benchmarks.$(BENCH) $(ARGS)

ifeq ($(wildcard colabs/*.py),)
colabs:
	@echo 'colabs/ holds no notebook'
else
EXECUTE_NOTEBOOK = import pathlib, sys, jupytext, nbclient; source = pathlib.Path(sys.argv[1]); \
  notebook = jupytext.read(source); context = {"metadata": {"path": str(source.parent)}}; \
  nbclient.NotebookClient(notebook, kernel_name="python3", resources=context).execute(); \
  jupytext.write(notebook, source.with_suffix(".ipynb"))

colabs: .venv/ready-colab
	@for notebook in colabs/*.py; do \
	  echo "$$notebook"; $(VENV_PYTHON) -c '$(EXECUTE_NOTEBOOK)' "$$notebook" || exit 1; \
	done
endif

clean:
	rm -rf .venv .cache .hypothesis build moe_jax.egg-info

# .venv/ready is written last: a .venv without it is the rest of an interrupted install and is made anew, and so is one
# whose interpreter is gone. A complete .venv older than the pins is brought up to date in place.
# Each extra that was asked for has a stamp of its own, .venv/ready-EXTRA.

VENV_RUNS := $(shell $(VENV_PYTHON) -c 'print("yes")' 2>/dev/null)
PYTHONS := python3 python3.13 python3.12 python3.11
NO_PYTHON := found no Python 3.11 or newer as $(PYTHONS): install one, or name it: PYTHON=/path/to/python3.11
ifdef PYTHON
PYTHONS := "$(PYTHON)"
NO_PYTHON := PYTHON=$(PYTHON) does not run as Python 3.11 or newer
endif
NO_VENV := cannot make a virtual environment: install its venv module and pip (Debian: apt install python3-venv)

fail = { echo "$(1)" >&2; exit 1; }

find_python = for python in $(PYTHONS) none; do \
    "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; \
  done; \
  [ "$$python" != none ] || $(call fail,$(NO_PYTHON))

# Debian's Python may lack ensurepip, which `-m venv` needs; a pip from outside then puts pip into .venv.
make_venv = "$$python" -m venv --clear .venv >/dev/null 2>&1 || { \
    if "$$python" -m pip --version >/dev/null 2>&1; then outer_pip() { "$$python" -m pip "$$@"; }; \
    elif pip3 --version >/dev/null 2>&1; then outer_pip() { pip3 "$$@"; }; \
    else $(call fail,$$python $(NO_VENV)); fi; \
    "$$python" -m venv --clear --without-pip .venv 2>/dev/null || $(call fail,$$python $(NO_VENV)); \
    outer_pip --python $(VENV_PYTHON) install --quiet pip || exit 1; \
  }

# $(1): the extras in brackets, or nothing. The silenced warning only explains what an editable install is.
install = PYTHONWARNINGS='ignore:Editable installation' $(VENV_PYTHON) -m pip install --quiet --constraint constraints.txt --editable '.$(1)'

.venv/ready: constraints.txt setup.cfg $(if $(VENV_RUNS),,REBUILD)
	@if [ -e .venv/ready ] && [ '$(VENV_RUNS)' ]; then \
	  echo 'bringing .venv up to date with constraints.txt'; \
	else \
	  $(find_python); \
	  echo "making .venv with $$python from constraints.txt; this takes minutes"; \
	  $(make_venv); \
	fi; \
	rm -f .venv/ready*; \
	$(call install,) && touch .venv/ready

.venv/ready-%: .venv/ready
	@echo 'adding the packages of the $* extra to .venv'
	@$(call install,[$*]) && touch $@

.PHONY: REBUILD

endif
endif
