# make demo | test | lint | docs | clean.  Each sets up its own virtual environment; nothing else needs to be installed but Python and pip.
PYTHON ?= python3
VENV   ?= .venv
VENV36 ?= .venv36
JOBS   ?= 2
# a folder with the complete vendor-made files, when there is one; the small copies in tests/data are always tested
ORACLES ?=
PYTEST_ARGS ?=

ifneq ($(strip $(ORACLES)),)
# one word: as two, pytest takes the folder for a place to look for tests before it knows the option
PYTEST_ORACLES := --oracles=$(ORACLES)
endif

SETUP := PYTHON=$(PYTHON) bash tools/setup.sh

.PHONY: demo test test-main test-triton36 lint docs clean
demo: $(VENV)/.ready-demo
	$(VENV)/bin/python examples/demo.py --out out

# The oldest supported Triton first, so that the last lines are the main run's summary.
test: lint test-triton36
	$(MAKE) --no-print-directory test-main

test-main: $(VENV)/.ready-test
	HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-ci} $(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile $(PYTEST_ORACLES) $(PYTEST_ARGS)

test-triton36: $(VENV36)/.ready-triton36
	HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-ci} $(VENV36)/bin/python -m pytest -n $(JOBS) --dist loadfile -m kernel $(PYTEST_ORACLES) $(PYTEST_ARGS)
	$(VENV36)/bin/python -m pytest -n $(JOBS) --dist loadfile tests/contract/test_contract_linear.py tests/contract/test_contract_moe.py tests/contract/test_contract_ids.py

lint: $(VENV)/.ready-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(VENV)/.ready-test
	$(VENV)/bin/mkdocs build --strict --quiet --site-dir site

$(VENV)/.ready-demo $(VENV)/.ready-test: pyproject.toml tools/setup.sh
	$(SETUP) $(VENV) $(subst .ready-,,$(notdir $@))

$(VENV36)/.ready-triton36: pyproject.toml tools/setup.sh
	$(SETUP) $(VENV36) triton36

clean:
	rm -rf $(VENV) $(VENV36) out site .pytest_cache .hypothesis .mypy_cache .ruff_cache
