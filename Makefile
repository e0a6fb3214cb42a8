# make artifacts ARCH=sm90    environment, kernels, libcula.so, verification, a checked call
# make test                   all tests that need no GPU
# make help                   the rest
#
# ARCH    sm90 sm100 sm103 sm120 cpu all, or a list: sm90,sm120. cpu is always built.
# JOBS    parallel compiles; default: the cores of the machine, but not more than its memory allows
# PYTHON  the Python (3.10 or newer) that makes .venv; default python3
# ARGS    passed on to build_kernels.py build (artifacts) or pytest (test, test-gpu)

ARCH ?= sm90
JOBS ?=
PYTHON ?= python3
ARGS ?=

VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --no-input
RUN := $(VENV)/bin/python

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help env artifacts verify list test test-gpu sanitize bench wheel lint clean distclean

help: ## this list
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile
	@echo
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

artifacts: $(VENV)/.build ## build artifacts/ for ARCH and cpu, verify it, end with a checked call
	@$(RUN) build_kernels.py build --arch "$(ARCH)" $(if $(JOBS),-j $(JOBS)) --demo $(ARGS)

verify: $(VENV)/.build ## check artifacts/ against its manifest and the matrix, and the machine code of its kernels
	@$(RUN) build_kernels.py verify
	@$(RUN) build_kernels.py lint

test: $(VENV)/.test ## all tests that need no GPU (make artifacts first)
	$(RUN) -m pytest -m "not gpu" $(ARGS)

test-gpu: $(VENV)/.test ## the tests that need a GPU
	$(RUN) -m pytest -m gpu $(ARGS)

sanitize: $(VENV)/.test ## a subset of the GPU cases under compute-sanitizer
	PYTHON=$(RUN) tests/gpu/sanitize.sh

bench: $(VENV)/.test ## measure every op next to its floor and its peers (needs a GPU)
	$(RUN) -m benchmarks.run $(ARGS)

wheel: artifacts ## package artifacts/ for ARCH: two wheels and a tarball in dist/
	@$(RUN) -m aot.build.wheel

lint: $(VENV)/.lint ## ruff over the Python sources
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check aot/build aot/archs.py aot/matrix.py build_kernels.py tests/build

env: $(VENV)/.build ## only the environment of the build

clean: ## remove artifacts/; compiled kernels stay in build/ and are used again
	rm -rf artifacts

distclean: clean ## remove build/ and .venv too
	rm -rf build $(VENV)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "error: Python 3.10 or newer is needed; \`$(PYTHON)\` is $$($(PYTHON) --version 2>&1 || true). Name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "error: $(PYTHON) cannot make a virtual environment (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }

# The .pth file makes cula importable with .venv/bin/python from any folder.
$(VENV)/.build: requirements/build.txt | $(VENV)/bin/python
	@echo "installing the pinned build tools into $(VENV) (about 500 MB to download, once)"
	@$(PIP) install -q --no-deps -r requirements/build.txt
	@printf '%s\n' "$(CURDIR)/loader" "$(CURDIR)/python" > "$$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/cula_source.pth"
	@touch $@

$(VENV)/.test: requirements/test.txt $(VENV)/.build
	@echo "installing the pinned test tools into $(VENV) (torch among them, once)"
	@$(PIP) install -q -r requirements/test.txt
	@touch $@

$(VENV)/.lint: requirements/lint.txt | $(VENV)/bin/python
	@$(PIP) install -q -r requirements/lint.txt
	@touch $@
