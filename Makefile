# Everything that flash-comm does from a shell. `make` alone lists the targets.
#
# Without PY, each target first sets up .venv with the packages of constraints.txt (once: stamp files in .venv).
# With PY=python3 (or any interpreter) it uses that environment as it is and installs nothing.

NP ?= 8
MPIRUN ?= mpirun
SWEEP_ARGS ?=
# Launches of `make sweep` into one folder, and the budget of each: the launch is the replicate of every interval.
LAUNCHES ?= 2
LAUNCH_BUDGET ?= 30s
# What is one launch by itself, in a folder of its own or none.
ALONE := $(filter --dry-run --help -h --resume --resume=% --into --into=% --out --out=%,$(SWEEP_ARGS))
PYTEST_ARGS ?=
# Runs that figures are drawn of, and further options; without a run: the newest under results/.
RUNS ?=
FIGURES_ARGS ?=
# The interpreter that .venv is made from: PYTHON if given, else the first of these that is new enough.
PYTHON ?= python3
PYTHONS := $(if $(filter file,$(origin PYTHON)),python3 python3.14 python3.13 python3.12 python3.11,"$(PYTHON)")

# Open MPI as root (containers, CI) and with more ranks than cores, in the spelling of its versions 1-4 and 5. Any other
# MPI ignores these.
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
export OMPI_MCA_rmaps_base_oversubscribe = 1
export PRTE_MCA_rmaps_default_mapping_policy = :oversubscribe

export MPIRUN

VENV := .venv
ifeq ($(strip $(PY)),)
  RUN := $(VENV)/bin/python
  # Tools and launcher of .venv come first; set-up itself runs without this, so that it sees the machine as it is.
  IN_ENV = PATH="$(CURDIR)/$(VENV)/bin:$$PATH"
  READY_RUN := $(VENV)/.ready-run
  READY_TEST := $(VENV)/.ready-test
  READY_LINT := $(VENV)/.ready-lint
  READY_NOTEBOOKS := $(VENV)/.ready-notebooks
  CHECK_PACKAGES :=
else
  RUN := $(PY)
  # An interpreter given by its path brings its own launcher (the mpich wheel) and tools along.
  IN_ENV = $(if $(findstring /,$(PY)),PATH="$$(cd "$(dir $(PY))" && pwd):$$PATH")
  CHECK_PACKAGES := --packages
endif
CHECK = FLASH_COMM_PY="$(RUN)" $(IN_ENV) "$(RUN)" tools/setup_env.py check $(CHECK_PACKAGES)
CPP_SOURCES = find kernels_cu -type f \( -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.hpp' -o -name '*.cpp' \)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:  # each target sets up first, checks second, runs third
.PHONY: help sweep figures shipped-figures test test-full lint format lab env lock clean distclean need-python

help:  ## list the targets
	@echo 'flash-comm: targets of this Makefile (PY=python3 uses an existing environment, installs nothing)'
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  \1|\2/p' Makefile | while IFS='|' read -r name what; do \
	    printf '  %-11s %s\n' "$$name" "$$what"; done

sweep: $(READY_RUN) need-python  ## measure all-reduce under mpirun, twice (NP=8 ranks, SWEEP_ARGS='--dry-run' and the like)
	@$(CHECK) run --need mpirun
ifneq ($(ALONE),)
	$(IN_ENV) $(MPIRUN) -n $(NP) "$(RUN)" -m experiments.sweep $(SWEEP_ARGS)
else
	@run="results/$$(date -u +%Y%m%dT%H%M%SZ)-sweep"; launch=1; while [ "$$launch" -le $(LAUNCHES) ]; do \
	    echo "launch $$launch of $(LAUNCHES) into $$run"; \
	    $(IN_ENV) $(MPIRUN) -n $(NP) "$(RUN)" -m experiments.sweep --budget $(LAUNCH_BUDGET) $(SWEEP_ARGS) --into "$$run" || exit; \
	    launch=$$((launch + 1)); \
	done; \
	$(IN_ENV) "$(RUN)" -m experiments.fit --draws 10 "$$run" || echo "no model was fitted to $$run, for the reason above"; \
	$(IN_ENV) "$(RUN)" -m experiments.figures "$$run"
endif

figures: $(READY_RUN) need-python  ## the paper's figures and claims from the newest run (RUNS='results/a results/b' for others)
	@$(CHECK) run
	$(IN_ENV) "$(RUN)" -m experiments.figures $(RUNS) $(FIGURES_ARGS)
	$(IN_ENV) "$(RUN)" -m experiments.claims $(RUNS)

# What the repository shows of the runs that it ships: after these were replaced, this and a look at the pictures.
shipped-figures: $(READY_RUN) need-python
	$(IN_ENV) "$(RUN)" -m experiments.figures experiments/data/h200-shared/*/ --out docs/figures/h200-shared --formats svg --no-counted
	$(IN_ENV) "$(RUN)" -m experiments.claims experiments/data/h200-shared/*/ experiments/data/h200-decode --out docs/figures/h200-shared
	$(IN_ENV) "$(RUN)" tools/notebooks.py

test: $(READY_TEST) need-python  ## run the tests, all but those marked `full` (PYTEST_ARGS='-k ll' and the like)
	@$(CHECK) test --need mpirun
	$(IN_ENV) "$(RUN)" -m pytest -m 'not full' $(PYTEST_ARGS)

test-full: $(READY_TEST) need-python  ## run all tests, the long ones too (at most 30 minutes)
	@$(CHECK) test --need mpirun
	$(IN_ENV) "$(RUN)" -m pytest $(PYTEST_ARGS)

lint: $(READY_LINT) need-python  ## check style and types; changes nothing
	@$(CHECK) lint
	"$(RUN)" -m ruff check .
	"$(RUN)" -m ruff format --check .
	"$(RUN)" -m mypy
	$(CPP_SOURCES) -print0 | $(IN_ENV) xargs -0 -r clang-format --dry-run --Werror --style=file

format: $(READY_LINT) need-python  ## bring Python and CUDA sources into the project's format
	@$(CHECK) lint
	"$(RUN)" -m ruff check --fix-only --quiet .
	"$(RUN)" -m ruff format .
	$(CPP_SOURCES) -print0 | $(IN_ENV) xargs -0 -r clang-format -i --style=file

lab: $(READY_NOTEBOOKS) need-python  ## start JupyterLab in notebooks/
	@$(CHECK) notebooks
	$(IN_ENV) "$(RUN)" -m jupyterlab notebooks

env: $(READY_RUN) $(READY_TEST) $(READY_LINT)  ## set up .venv for sweep, test and lint, and stop there

lock:  ## resolve the newest versions within pyproject's bounds into constraints.txt
	"$(PYTHON)" tools/setup_env.py lock

clean:  ## remove caches and build products; keeps .venv and results/
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -path ./results -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean  ## also remove the .venv that set-up made; keeps results/
	if [ -e $(VENV)/.flash-comm ]; then rm -rf $(VENV); fi
	rm -f $(VENV).lock $(VENV).log

# With PY: that interpreter exists and is new enough. Without: .venv was made by one that is.
need-python:
ifneq ($(strip $(PY)),)
	@command -v "$(PY)" >/dev/null || { echo "error: PY=$(PY): there is no such interpreter" >&2; exit 2; }
	@"$(PY)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "error: PY=$(PY) is $$("$(PY)" --version 2>&1), and flash-comm needs Python 3.11 or newer" >&2; exit 2; }
endif
	@"$(RUN)" tools/setup_env.py compiler

# A stamp is written last, by an atomic rename, and removed before anything in .venv is changed: a set-up that was killed
# leaves none, and the next one starts afresh.
$(VENV)/.ready-%: pyproject.toml constraints.txt tools/setup_env.py
	@for python in $(PYTHONS); do \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        "$$python" tools/setup_env.py compiler && exec "$$python" tools/setup_env.py install $*; exit 2; \
	    fi; \
	done; \
	echo "error: flash-comm needs Python 3.11 or newer, and finds none among: $(subst ",,$(PYTHONS))" >&2; exit 2
