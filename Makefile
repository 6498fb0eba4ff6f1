# One way in. `make demo` and `make test` set up what they need; nothing outside .venv is touched.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SEEDS  ?= 20

# slow tests that run after the others, beside the remaining slow ones: two cores, two processes
SECOND = $(addprefix tests/real/test_,training.py tune_command.py tuning.py weights.py)

.PHONY: help setup demo fix check test prove bench clean
help:
	@echo "make setup | demo | fix | check | test | prove SEEDS=200 | bench | clean"

setup: $(VENV)/.ready
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	@$(BIN)/swarmd demo

fix: setup
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format --quiet .

check: setup
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy

test: check
	($(BIN)/pytest -p no:cacheprovider -m "not prove and not slow" && \
	 $(BIN)/pytest -p no:cacheprovider -m "slow and not prove" $(SECOND)) & second=$$!; \
	$(BIN)/pytest -m "slow and not prove" $(addprefix --ignore=,$(SECOND)); first=$$?; wait $$second && exit $$first

prove: setup
	$(BIN)/pytest -m prove
	$(BIN)/python -m tests.prove --seeds $(SEEDS)
	$(BIN)/python -m tests.prove_training --seeds $(SEEDS) --partitions 1000

bench: setup
	$(BIN)/python benchmarks/serving.py
	$(BIN)/python benchmarks/wan.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
