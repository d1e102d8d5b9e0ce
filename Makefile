# `make run` and `make test` need python3 (3.11 or newer) and no root. Another interpreter: make run PYTHON=python3.12
PYTHON ?= python3
SHELL := /bin/bash
# Processes that share the tests, which mostly wait.
JOBS ?= 4
BIN := .venv/bin
# tests/conftest.py says which tests one process runs, and in which order.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadscope --no-loadscope-reorder
# Packages of their own, each for a framework that metaq can be the broker of.
INTEGRATIONS := $(patsubst %/pyproject.toml,%,$(wildcard integrations/*/pyproject.toml))
PACKAGING := setup.py pyproject.toml $(INTEGRATIONS:%=%/pyproject.toml)

# Debian keeps some servers that the tests talk to in sbin, which is not on everyone's PATH.
export PATH := $(PATH):/usr/sbin:/sbin

# Where compiled modules are not kept, each broker compiles all of its own again: twice the time of a start, a thousand times.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run test test-slow test-all test-long lint format docs screenshots bench dist sbom compile interpret test-compiled

run: .venv/.stamp-run
	@echo "starting a broker with its data in ./data; Ctrl-C stops it; when it is ready: telnet 127.0.0.1 8123, and http://127.0.0.1:8124/ in a browser"
	@$(BIN)/metaq serve --data data --listen 127.0.0.1:8123

# What is fast, and a little of each kind that is slow.
test: .venv/.stamp-dev
	$(PYTEST) -m "not slow"

test-slow: .venv/.stamp-dev
	$(PYTEST) -m slow

# Both forms.
test-all: test test-slow test-compiled

test-long: .venv/.stamp-dev
	$(BIN)/python -m tests.crash.long

lint: .venv/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/.stamp-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documents as a site in ./site. The theme would print what its authors say about the next version of mkdocs.
docs: .venv/.stamp-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "to read it, with search: python3 -m http.server --bind 127.0.0.1 --directory site"

# The hot modules as extensions, in place, from then on in every command; `make interpret` takes them away again.
compile: .venv/.stamp-dev
	COMPILE_METAQ=1 $(BIN)/python setup.py --quiet build_ext --inplace

interpret:
	find . -name '*.so' -path './metaq/*' -delete
	rm -rf build

# With the modules of the wheel that `make test-slow` builds and installs.
test-compiled: .venv/.stamp-dev
	$(BIN)/python -m tests.packaging.built
	$(PYTEST) -m "not slow" tests/protocol tests/store tests/engine tests/client tests/tx tests/wire tests/crash tests/server/text tests/server/remoting; status=$$?; \
	    $(MAKE) interpret; exit $$status

# Every page of the console in both themes and at two widths, in ./screenshots, and those of the documents in docs/images.
screenshots: .venv/.stamp-dev
	$(BIN)/python -m tests.docs.screens screenshots

bench: .venv/.stamp-dev
	$(BIN)/python -m benchmarks

# What a release publishes, in dist/: the sdist and a wheel of metaq, and of the package for each framework.
dist: .venv/.stamp-dev
	for package in . $(INTEGRATIONS); do $(BIN)/python -m build --outdir dist $$package || exit; done

# What the package needs when it runs, with versions and licences: CycloneDX in JSON, in dist/.
sbom: .venv/.stamp-dev
	$(BIN)/python -m tests.packaging.sbom dist/metaq-broker.cdx.json

.venv/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "metaq needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "making an environment in .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/.stamp-run: .venv/.stamp-venv $(PACKAGING)
	@echo "installing metaq and what it needs into .venv"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[timers]'
	@touch $@

.venv/.stamp-dev: .venv/.stamp-venv $(PACKAGING)
	@echo "installing metaq, and all that its tests need, into .venv; this takes some minutes"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' $(INTEGRATIONS:%=-e %)
	@touch $@
