# Two commands are enough: `make demo` and `make test`. Each creates .venv and installs what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Tests run in three processes for two cores, since some wait for servers and sites; one BLAS and one torch thread
# each: two threads on busy cores are slower than one. A module's tests stay together, with what it sets up.
PYTEST := OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal

.PHONY: demo test test-fast test-lowest test-pythons release check browser bench bench-scale bench-gpu docs clean help

help:            ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

demo: $(VENV)/user  ## compare FedAvg, AFL and DeepAFL on embedded data and prove invariance, in about a minute
	$(BIN)/fedsolve demo

test: check browser  ## lint, type check and the whole test suite
	$(PYTEST)

test-fast: $(VENV)/dev  ## the part of the suite that takes under three minutes
	$(PYTEST) -m "not slow"

test-lowest: $(VENV)/dev  ## the first commands of a user, with the oldest versions of everything that are allowed
	$(BIN)/python -m benchmarks.installed --smoke --lowest

# The newest other Python that is here, on the path or of pyenv; PYTHONS="python3.12 python3.13" takes those.
PYTHONS ?= $(shell for v in 3.14 3.13 3.12; do for p in python$$v $$HOME/.pyenv/versions/$$v*/bin/python; do \
	$$p -c "" 2>/dev/null && echo $$p && exit; done; done)
test-pythons: $(VENV)/dev  ## the first commands of a user with the newest other Python that is here
	@for p in $(PYTHONS); do $$p --version && $(BIN)/python -m benchmarks.installed --smoke --python $$p || exit 1; done

release: $(VENV)/dev  ## build wheel and archive into dist/, check them, install the wheel elsewhere and try it
	$(BIN)/python -m benchmarks.installed --smoke --dist dist $(if $(BASE),--base $(BASE))

check: $(VENV)/dev  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The report is tested in a real browser; where none can be installed those tests are skipped, visibly.
browser:
	@command -v chromium || command -v chromium-browser || command -v google-chrome \
	|| { [ "$$(id -u)" = 0 ] && apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium >/dev/null; } \
	|| echo "no Chromium found and none could be installed: the browser tests will be skipped"

bench: $(VENV)/user  ## speed, traffic and memory against the authors' formulation; growth with clients
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.scale clients --json benchmarks/results/scale-clients.json

# Needs fedsolve[ray], and 20 GB of disk for a while.
bench-scale: $(VENV)/dev  ## workers in Ray, and 2,000,000 rows by mmap and parquet
	$(BIN)/python -m benchmarks.scale engines --json benchmarks/results/scale-engines.json
	$(BIN)/python -m benchmarks.scale machines --json benchmarks/results/scale-machines.json --plot docs/workers-scaling.png
	$(BIN)/python -m benchmarks.scale rows --json benchmarks/results/scale-rows.json --plot docs/rows-growth.png

bench-gpu: $(VENV)/user  ## the closed forms on a GPU, beside the CPU and the authors' formulation (needs torch with CUDA)
	$(BIN)/python -m benchmarks.gpu --json benchmarks/results/gpu.json

docs: $(VENV)/dev  ## the documentation site, in site/index.html; a warning or a broken link is an error
	$(BIN)/python -m sphinx -W --keep-going -q docs site

clean:           ## remove the environment and what runs left behind
	rm -rf $(VENV) site fedsolve-demo .mypy_cache .ruff_cache

$(VENV)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedsolve needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/user: $(VENV)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/dev: $(VENV)/user
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
