# `make demo` and `make test` need nothing but Python 3.10-3.13 and a package index.
PYTHON ?= python3
# Pinned, and installed before anything that depends on it, so that no other package chooses a build of it.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# The benchmarks load one module of it, which needs nothing else of verl; the rest stays out of the environment.
VERL := build/peers/verl-0.9.1.done

.PHONY: demo test slow lint format bench clean

demo: $(VENV)/demo.done
	$(BIN)/trackway demo

test: $(VENV)/dev.done
	$(BIN)/python -m pytest -n auto --dist worksteal

# The benchmarks' peers are among what is tested.
slow: $(VENV)/bench.done $(VERL)
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/dev.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev.done
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/bench.done $(VERL)
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info

$(VENV)/torch.done:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Trackway needs Python 3.10 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; name another one: make PYTHON=python3.12 ...")'
	@echo "Making $(VENV) and installing PyTorch; this happens once and takes a few minutes."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(TORCH)
	@touch $@

$(VENV)/demo.done: $(VENV)/torch.done pyproject.toml
	@echo "Installing Trackway with what the demo needs."
	@$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/dev.done: $(VENV)/torch.done pyproject.toml
	@echo "Installing Trackway with what its tests need."
	@$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/demo.done

$(VENV)/bench.done: $(VENV)/torch.done pyproject.toml
	@echo "Installing Trackway with what it is measured against."
	@$(PIP) -e '.[bench]'
	@touch $@ $(VENV)/dev.done $(VENV)/demo.done

$(VERL): $(VENV)/torch.done
	@rm -rf $(@D)
	@$(PIP) --no-deps --target $(@D) $(subst -,==,$(basename $(@F)))
	@touch $@
