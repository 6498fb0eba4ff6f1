# One way in. `make demo` and `make test` set up what they need; nothing outside .venv is touched.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SEEDS  ?= 20

# slow tests in parts of about the same length: two cores take one part after the other, the quick tests first
TRAINING := $(addprefix tests/real/test_,training.py collaboration.py weights.py) tests/cli/test_train_commands.py
TUNING   := $(addprefix tests/real/test_,tuning.py tune_command.py)
FAULTS   := $(addprefix tests/real/test_,drain.py faults.py)
PARTS    := quick slow-tuning slow-faults slow-training slow-rest
PYTEST   := $(BIN)/pytest -p no:cacheprovider
SLOW     := $(PYTEST) -m "slow and not prove"

.PHONY: help setup demo fix check test $(PARTS) prove bench clean
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

test: setup
	@$(MAKE) --no-print-directory -j2 -Otarget check $(PARTS)

quick: setup
	$(PYTEST) -m "not prove and not slow"
slow-tuning: setup
	$(SLOW) $(TUNING)
slow-faults: setup
	$(SLOW) $(FAULTS)
slow-training: setup
	$(SLOW) $(TRAINING)
slow-rest: setup
	$(SLOW) $(addprefix --ignore=,$(TRAINING) $(TUNING) $(FAULTS))

prove: setup
	$(BIN)/pytest -m prove
	$(BIN)/python -m tests.prove --seeds $(SEEDS)
	$(BIN)/python -m tests.prove_training --seeds $(SEEDS) --partitions 1000

bench: setup
	$(BIN)/python benchmarks/serving.py
	$(BIN)/python benchmarks/wan.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
