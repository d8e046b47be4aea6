# Every target sets itself up: Python from 3.11 on, make and a C compiler are all it needs.
# The first Python that is there, starts, and is new enough; `make PYTHON=/path/to/python` takes another one.
PYTHONS := python3.11 python3.12 python3.13 python3.14 python3 python
NEW_ENOUGH := import sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(firstword $(foreach python,$(PYTHONS),$(shell $(python) -c '$(NEW_ENOUGH)' 2>/dev/null && echo $(python))))
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2
# Ranks are threads of one process and two test workers share two cores: more threads only fight each other.
export OMP_NUM_THREADS ?= 1
# Nothing here may reach for a model hub.
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test smoke test-full check bench golden clean
.DEFAULT_GOAL := test

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python from 3.11 on among: $(PYTHONS). Install one with its venv module," \
		"or say where it is: make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(READY)  ## a small GPT from one device to four, in a minute
	PATH="$(CURDIR)/$(BIN):$$PATH" examples/demo.sh

check: $(READY)  ## format, lint, types, import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check  ## what every change must pass
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not full"

smoke: $(READY)  ## under a minute
	$(BIN)/python -m pytest -m "smoke and not full"

test-full: check  ## everything, with ten times the random examples
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --hypothesis-profile=full

bench: $(READY)  ## time of each pass, of compiling Llama-3-8B, of a step against eager, DDP, FSDP2, DTensor and torch's pipelines; memory
	$(BIN)/python bench/passes.py
	PYTHONPATH=. $(BIN)/python bench/compile.py
	PYTHONPATH=. $(BIN)/python bench/overhead.py
	PYTHONPATH=. $(BIN)/python bench/host.py
	PYTHONPATH=. $(BIN)/python bench/pipeline.py
	PYTHONPATH=. $(BIN)/python bench/state.py
	PYTHONPATH=. $(BIN)/python bench/memory.py

golden: $(READY)  ## rewrite the expected texts under tests/codegen/golden
	$(BIN)/python -m pytest -m "not full" --golden tests

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build *.egg-info
