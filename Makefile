# What a clone needs: `make serve` and `make test` do everything from nothing. All else is `redraft --help`.
PYTHON      ?= python3.11
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH       ?= torch==2.13.0+cpu
ARGS        ?=
REDRAFT := .venv/bin/redraft
PY      := .venv/bin/python
SETUP   := .venv/.setup
PYTEST  := OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup serve stop loadtest quickstart test test-all lint kernels docs wheel clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo; echo "ARGS has more flags of the command, such as ARGS=\"--backend torch\". $(REDRAFT) --help lists all commands."

setup: $(SETUP) ## virtual environment .venv (nothing outside of it is touched)
serve: $(SETUP) ## fetch and build a small model, and serve it: redraft serve
	$(REDRAFT) serve $(ARGS)
stop: $(SETUP) ## stop it: redraft stop
	$(REDRAFT) stop $(ARGS)
loadtest: $(SETUP) ## load-test the running service: redraft loadtest
	$(REDRAFT) loadtest $(ARGS)
quickstart: $(SETUP) ## serve with and without speculation, load-test both in turn, write a report
	$(PY) -m benchmarks.load.quickstart $(ARGS)
test: $(SETUP) ## the tests that a change needs while it is made, in under 5 minutes on 2 cores
	$(PYTEST) -m "not slow" $(ARGS)
test-all: $(SETUP) ## all tests
	$(PYTEST) $(ARGS)
lint: $(SETUP) ## ruff, format check, mypy
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy
kernels: $(SETUP) ## compile the CUDA kernels (no GPU needed) and check their registers, spills and instructions
	$(PY) -m benchmarks.gpu.kernel_resources
docs: $(SETUP) ## render tables, plots and the command line into docs/, then the site into artifacts/docs
	rm -rf artifacts/docs
	$(PY) -m studies.figures.site
	$(PY) -m sphinx -q -E -n -W --keep-going -d artifacts/docs/.doctrees docs artifacts/docs
	@echo "docs: artifacts/docs/index.html"
wheel: $(SETUP) ## the package with its operators and CUDA kernels compiled, into dist
	$(PY) -m hatchling build -t wheel -d dist
clean: ## remove what was built (not .venv, not downloads)
	rm -rf artifacts/engines artifacts/plugins artifacts/loadtest artifacts/reports artifacts/run artifacts/tests artifacts/docs dist

$(SETUP): pyproject.toml requirements.txt requirements-gpu.txt requirements-triton.txt $(wildcard requirements/*.txt)
	@command -v g++ >/dev/null || { echo "setup: g++ is missing (Debian: apt-get install g++)"; exit 1; }
	@$(PYTHON) -c "import ensurepip, sys; sys.exit(sys.version_info[:2] != (3, 11))" 2>/dev/null || { echo "make: needs Python \
	3.11 with venv, got $(PYTHON) ($$($(PYTHON) --version 2>&1 | tail -1)). Set PYTHON to it (Debian: apt-get install" \
	"python3.11-venv)"; exit 1; }
	@$(PYTHON) -m venv .venv
	@$(PY) -c "import ctypes; ctypes.CDLL('libpython3.11.so.1.0')" 2>/dev/null || { echo "setup: libpython3.11, which" \
	"Triton's Python backend loads, is missing (Debian: apt-get install libpython3.11)"; exit 1; }
	@if nvidia-smi -L >/dev/null 2>&1; then \
	  echo "setup: NVIDIA GPU found, torch with CUDA"; .venv/bin/pip install --no-compile -r requirements-gpu.txt; \
	else \
	  echo "setup: torch for the CPU"; \
	  .venv/bin/pip install -q --no-compile --no-deps $(TORCH) 2>/dev/null || \
	  .venv/bin/pip install --no-compile --no-deps --retries 1 --extra-index-url $(TORCH_INDEX) $(TORCH) || \
	  { echo "setup: no $(TORCH) at $(TORCH_INDEX). Set TORCH_INDEX to a mirror, or" \
	    "TORCH=torch==2.13.0 for the default build (gigabytes of CUDA)."; exit 1; }; \
	fi
	@echo "setup: the other packages, about 2 minutes"
	.venv/bin/pip install --no-compile --progress-bar on -r requirements.txt
	.venv/bin/pip install -q --no-deps -e .
	@# Meanwhile byte code, on all cores: pip would compile one file after the other, and do nothing else.
	@$(PY) -m compileall -qq -j 0 .venv/lib & \
	  $(PYTHON) -m venv .venv/triton && \
	  .venv/triton/bin/pip install -q --progress-bar on -r requirements-triton.txt && \
	  .venv/triton/bin/pip install -q --progress-bar on --no-deps nvidia-pytriton==0.7.0; \
	  status=$$?; wait; exit $$status
	@touch $@
