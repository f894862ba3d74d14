# demo and test need nothing but python3 and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

WARDEN_FLAGS := -Os -s -static -nostdlib -ffreestanding -fno-builtin -fno-stack-protector \
	-fno-asynchronous-unwind-tables -fno-ident -Wl,--build-id=none -Wl,-z,noseparate-code -Wl,-z,norelro \
	-Wall -Wextra -Werror
WARDEN := src/hutch/isolation/warden.c
DATA := src/hutch/isolation/data

# Boots a machine in software, which must not be starved by what else is tested.
MACHINE := tests/contract/test_cgroup_v2.py

.PHONY: help demo setup test check bench bench-peers bench-scale soak format warden clean

help:
	@echo 'make demo    install into .venv and see code run in a sandbox'
	@echo 'make test    everything, with what it needs installed'
	@echo 'make check   format, lint, types and unit tests, in seconds'
	@echo 'make bench   ratios against plain bubblewrap, and others where they are installed'
	@echo 'make bench-peers, make bench-scale'
	@echo '             install those others; many sandboxes at once and in turn'
	@echo 'make soak    many runs, killed at random moments'
	@echo 'make warden  rebuild the warden and the system-call filters'

$(STAMP): pyproject.toml requirements/dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(BIN)/python -m compileall -q src
	@touch $(STAMP)

demo: $(STAMP)
	@$(BIN)/python -I docs/demo.py $(BIN)/hutch

setup: $(STAMP)
	@$(BIN)/python tests/setup.py

test: setup
	$(BIN)/python -m pytest -q $(MACHINE)
	$(BIN)/python -m pytest -n 4 --dist loadfile --ignore $(MACHINE) tests

check: $(STAMP)
	$(BIN)/ruff format --check src tests bench docs
	$(BIN)/ruff check src tests bench docs
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n 2 tests/unit

format: $(STAMP)
	$(BIN)/ruff format src tests bench docs
	$(BIN)/ruff check --fix src tests bench docs

bench: $(STAMP)
	@$(BIN)/python bench/run.py

bench-peers: $(STAMP)
	@$(BIN)/python bench/peers.py

bench-scale: $(STAMP)
	@$(BIN)/python bench/scale.py

soak: $(STAMP)
	@$(BIN)/python bench/soak.py

warden:
	gcc $(WARDEN_FLAGS) -fcf-protection=none -o $(DATA)/warden-x86_64 $(WARDEN)
	aarch64-linux-gnu-gcc $(WARDEN_FLAGS) -o $(DATA)/warden-aarch64 $(WARDEN)
	PYTHONPATH=src $(PYTHON) -m hutch.isolation.seccomp

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
