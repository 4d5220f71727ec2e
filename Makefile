# Two commands do everything: `make run` (the main job on embedded defaults) and `make test` (the whole suite).
# Both create the virtual environment from requirements.lock and are quick the second time.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Processes that share the tests; `auto` is one more than the cores, 0 runs them in one process.
WORKERS ?= auto
# For all targets together.
SECONDS_TO_FUZZ ?= 600

.PHONY: run test kernels fuzz lint format lock clean

run: $(STAMP)
	$(BIN)/foretick demo --http-port 7800

test: lint kernels
	$(BIN)/python -m pytest -n $(WORKERS)

kernels: $(STAMP)
	$(BIN)/python -m tests.warm

fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS_TO_FUZZ)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(STAMP)

# Resolve again from pyproject.toml; commit the result.
lock:
	rm -rf .cache/lock && $(PYTHON) -m venv .cache/lock
	.cache/lock/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.cache/lock/bin/python -m pip install --quiet ".[demo,exactly-once,grafana,mcp]" --group dev
	.cache/lock/bin/python -m pip freeze --exclude foretick | grep -v '^foretick' > requirements.lock

clean:
	rm -rf $(VENV) .cache build *.egg-info
