# Two commands do everything: `make run` (the main job on embedded defaults) and `make test` (the whole suite).
# Both create the virtual environment and are quick the second time: the first installs requirements.lock, what a
# daemon needs, and the second requirements-dev.lock, which holds the same versions and all that tests need.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RUNTIME := $(VENV)/.installed-runtime
STAMP  := $(VENV)/.installed
# Processes that share the tests; `auto` is one more than the cores, 0 runs them in one process.
WORKERS ?= auto
# A test that waits for real programs may starve on a busy machine: three in a worker may run once more, and the report
# shows why. Faults on a real broker are what chaos looks for: there the first failure counts.
RERUNS := --reruns=1 --max-suite-reruns=3 --rerun-show-tracebacks $(addprefix --rerun-exclude-path=tests/,chaos transactions)
# For all targets together.
SECONDS_TO_FUZZ ?= 600

# Tests that need neither PyTorch nor a broker nor a browser; tests/kit/unit.py skips what does.
UNIT := $(addprefix tests/,dashboards flash ingest metrics scheduler tapes daemon/config daemon/gateway)

# How much faster the clock of alerts runs than the machine's; less on a busy machine.
FASTER ?= 20

.PHONY: run test rescale faults unit one coverage kernels fuzz site lint format lock clean sbom systemd machine

run: $(RUNTIME)
	$(BIN)/foretick demo

test: lint kernels
	$(BIN)/python -m pytest -n $(WORKERS) $(RERUNS)

# Groups of daemons that grow and shrink under load: alone, since six daemons and a broker take all of a small machine.
# One of its ten seeds, another with each commit. It may run once more, and the report shows why: on a slow machine
# the time limits of broker and daemons are near.
rescale: $(STAMP)
	$(BIN)/python -m pytest -v -n 0 -m long --drawn -k test_a_group_that_grows --reruns=1 \
		--rerun-show-tracebacks tests/chaos/test_chaos_rescale.py

# The service under a systemd of its own, in namespaces: it takes root, and Debian's archive the first time.
systemd: $(STAMP)
	$(BIN)/python -m pytest -v -n 0 -m long tests/systemd/test_systemd_process_1.py

# Its root, which comes from the archive.
machine: $(STAMP)
	$(BIN)/python -m tests.systemd.container

# Faults of running daemons, one after the other: what alerts and the doctor say of each. Leaves .cache/faults.md.
faults: $(STAMP)
	TESTS_FASTER=$(FASTER) $(BIN)/python -m pytest -v -n 0 -m long tests/e2e/test_e2e_faults.py

unit: $(STAMP)
	$(BIN)/python -m pytest -q -n $(WORKERS) -p tests.kit.unit $(UNIT)

# One test: make one T=tests/flash/test_flash_lookup.py::test_name
one: $(STAMP)
	$(BIN)/python -m pytest -m "" $(or $(T),$(error T is missing: make one T=tests/FILE.py::NAME))

# One process, since compiled kernels are not counted anyway; T=PATH covers a part of the suite.
coverage: $(STAMP)
	mkdir -p .cache/coverage
	$(BIN)/coverage run -m pytest -n 0 $(T)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage html --quiet
	$(BIN)/coverage report --skip-covered --sort=cover

kernels: $(STAMP)
	$(BIN)/python -m tests.warm

fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS_TO_FUZZ)

# The pages of docs/ as a site, in .cache/site.
site: $(STAMP)
	$(BIN)/mkdocs build --quiet

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(RUNTIME): requirements.lock pyproject.toml
$(STAMP): requirements-dev.lock pyproject.toml
# Modules are compiled when they are imported: pip would compile all of them, a minute of a core.
$(RUNTIME) $(STAMP):
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "PyTorch and its CUDA libraries are downloaded: this takes minutes, and says nothing meanwhile"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes -r $<
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

# Resolve again from pyproject.toml; commit the result. The second file keeps the versions of the first.
RESOLVE = .cache/lock/bin/uv pip compile --quiet --no-cache --upgrade --generate-hashes --universal \
	--python-version 3.11 --no-annotate --no-header --group build pyproject.toml
lock:
	rm -rf .cache/lock && $(PYTHON) -m venv .cache/lock
	.cache/lock/bin/python -m pip install --quiet uv
	$(RESOLVE) --extra demo --extra exactly-once --output-file requirements.lock
	$(RESOLVE) --all-extras --group dev --constraint requirements.lock --output-file requirements-dev.lock

# What a daemon is made of, and the licences: .cache/sbom.
sbom: $(STAMP)
	$(BIN)/python -m tests.deploy.sbom .cache/sbom

clean:
	rm -rf $(VENV) .cache build *.egg-info
