# What a fresh machine needs: Python 3.11 or newer, make, a C library. Everything else is set up in .venv, once.
PYTHON ?= python3
#: Files that `make demo` reads; none: topics of Python's own language reference.
FILES ?=
#: What `make chaos` does: how many faults, and the seed that decides what, when and to whom; none: by lot.
KILLS ?= 200
SEED ?=
#: More options for the target's command, such as ARGS="--chunks 16".
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

.DEFAULT_GOAL := help
TIERS := parallel extended
.PHONY: help demo demo-crash serve-demo quick test test-all test-again $(TIERS:%=test-%) $(TIERS:%=again-%) chaos attack check bench bench-check docs clean
help: ## Show the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(STAMPS)/local ## Let a team of agents read texts with a model on this machine; FILES="a.txt b.txt" reads those.
	@$(BIN)/ensemble-ray demo $(ARGS) $(FILES)

demo-crash: $(STAMPS)/local ## The same, killed half-way and resumed: what was answered is not asked again.
	@$(BIN)/ensemble-ray demo --crash $(ARGS) $(FILES)

serve-demo: $(STAMPS)/serve ## Serve teams with that model, ask them with the openai client, decide a review over HTTP, stop.
	@$(BIN)/ensemble-ray demo --serve $(ARGS)

#: Where unit tests are, and those of one package, as PACKAGE=schedule or PACKAGE=execute/agent; none: all.
PACKAGE ?=
UNITS := tests/ensemble_ray tests/architecture tests/actors
PACKAGES := $(patsubst tests/ensemble_ray/%/__init__.py,%,$(wildcard $(addprefix tests/ensemble_ray/,*/__init__.py */*/__init__.py)))
PACKAGES += architecture actors serve
ONE = -m "not program and not cluster" $(firstword $(wildcard $(addsuffix $(PACKAGE),tests/ensemble_ray/ tests/)))
ALL = -m "not program and not cluster and not heavy" $(UNITS) --numprocesses=2

quick: $(STAMPS)/dev ## Run the unit tests that start no process and take less than a third of a second; PACKAGE=schedule runs all of one package.
ifneq ($(filter-out $(PACKAGES),$(PACKAGE)),)
	@echo "There is no package '$(PACKAGE)'; there are $(sort $(PACKAGES))" >&2; exit 2
else
	$(BIN)/python -m pytest $(if $(PACKAGE),$(ONE),$(ALL)) $(ARGS)
endif

test: $(STAMPS)/dev ## Run the tests; ARGS="tests/serve -x" runs those.
ifeq ($(ARGS),)
	@$(MAKE) --no-print-directory test-parallel
else
	$(BIN)/python -m pytest $(ARGS)
endif

test-all: test test-extended ## Run the tests, and those that take long or repeat another one on a whole deployment.

test-again: $(TIERS:%=again-%) ## Run once more, alone, the tests that failed in the last `make test` or `make test-all`.

#: Processes that run tests: one more than processors, since many tests wait for programs and clusters.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
#: The parts of all tests. Each remembers which of its tests failed, and how it ended.
parallel = -m "not extended" --numprocesses=$(WORKERS)
extended = -m extended --numprocesses=$(WORKERS)
MEMORY := .pytest_cache
pytest = $(BIN)/python -u -m pytest -o cache_dir=$(MEMORY)/$(1)

$(TIERS:%=test-%): test-%: $(STAMPS)/dev
	@mkdir -p $(MEMORY) && code=0; TEST_TIER=$* $(call pytest,$*) -p tests.accounting --durations=30 $($*) || code=$$?; \
		echo $$code > $(MEMORY)/$*.code; exit $$code

# 1: tests failed. Anything else that is not 0 is no matter of single tests, and stays a failure.
$(TIERS:%=again-%): again-%: $(STAMPS)/dev
	@case "$$(cat $(MEMORY)/$*.code 2>/dev/null || echo 0)" in 0) ;; 1) $(call pytest,$*) --last-failed --last-failed-no-failures=none -m "" && echo 0 > $(MEMORY)/$*.code ;; *) exit 1 ;; esac

chaos: $(STAMPS)/dev ## Kill and freeze runs, damage and remove records at random moments; check what is promised; KILLS=200 SEED=1 ARGS="--kinds freeze,damage".
	$(BIN)/python -m tests.chaos --kills $(KILLS) $(if $(SEED),--seed $(SEED)) $(ARGS)

attack: $(STAMPS)/dev ## Meet hostile pages, answers, inputs, files and team files, each under limits of memory and processor time.
	$(BIN)/python -m pytest tests/attack $(ARGS)

check: $(STAMPS)/dev ## Check the form: formatting, lint, import contracts, types of the code and of the pages, prose.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m tests.typing.pages
	$(BIN)/python -m tests.architecture.prose

bench: $(STAMPS)/dev ## Measure against the floor and print the table.
	$(BIN)/python -m benchmarks $(ARGS)

bench-check: $(STAMPS)/dev ## Compare calls per task and modules at import with benchmarks/baseline.json; ARGS=--write replaces it.
	$(BIN)/python -m benchmarks check $(ARGS)

docs: $(STAMPS)/dev ## Build the documentation as a site, in build/site; ARGS=--help.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build $(ARGS)
	@echo "Open build/site/index.html"

clean: ## Remove what was set up and built.
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name it: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "Cannot make a virtual environment; Debian and Ubuntu have it in the package python3-venv" >&2; exit 1; }
	@mkdir -p $(STAMPS) && touch $@

# Installed in place, so that a change of the code counts at once; set up again only when pyproject.toml changes.
$(STAMPS)/local: pyproject.toml $(STAMPS)/venv
	@echo "Setting up $(VENV); this takes a few minutes, once ..."
	@$(PIP) install --quiet --editable '.[local]'
	@$(BIN)/ensemble-ray models install
	@touch $@

$(STAMPS)/serve: $(STAMPS)/local
	@$(PIP) install --quiet --editable '.[local,serve]'
	@touch $@

$(STAMPS)/dev: pyproject.toml $(STAMPS)/venv
	@echo "Setting up $(VENV); this takes a few minutes, once ..."
	@$(PIP) install --quiet --editable '.[dev]'
	@$(BIN)/ensemble-ray models install
	@touch $@ $(STAMPS)/local $(STAMPS)/serve
