# redraft: `make help` lists the targets.
PYTHON      ?= python3.11
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH       ?= torch==2.13.0+cpu

DEFAULT   := SmolLM2-135M-Instruct
SOURCE    ?= default
CHAT_TEMPLATE ?=
ADAPTER   ?=
ADAPTED   := $(if $(ADAPTER),-$(notdir $(ADAPTER:/=)))
MODEL     ?= artifacts/models/$(patsubst %.gguf,%,$(notdir $(patsubst default,$(DEFAULT),$(SOURCE:/=))))$(ADAPTED)
override MODEL := $(MODEL:/=)
NAME      ?= $(notdir $(MODEL))
KIND      ?= recurrent
OTHER_KIND := $(filter-out recurrent,$(KIND))
LAYERS    := $(if $(filter eagle3,$(KIND)),--target-layers usual)
OWN_DRAFTER = artifacts/drafters/$(NAME)$(OTHER_KIND:%=-%)
# One's own drafter goes before the one that ships.
DRAFTER   ?= $(patsubst %/config.json,%,$(firstword \
  $(wildcard $(OWN_DRAFTER)/config.json $(if $(OTHER_KIND),,drafters/$(NAME)/config.json)) $(OWN_DRAFTER)))
ENGINES   ?= artifacts/engines
BACKEND   ?= openvino
PRECISION ?= bf16
SHAPE     ?= --beam-width 4
METHODS   ?=
TP        ?= 1
UCX_TLS   ?= posix,self
SPLIT     := $(addprefix -,$(filter-out openvino,$(BACKEND)))$(if $(filter-out 1,$(TP)),-tp$(TP))
CALIBRATION ?= artifacts/calibration/$(NAME).json
# Without a trained drafter a bundle drafts from n-grams. `train` and `drafter` make one; a DRAFTER that the user named must be there.
TRAINED   := $(or $(METHODS),$(OTHER_KIND),$(filter-out file,$(origin DRAFTER)),$(filter train drafter,$(MAKECMDGOALS)),$(wildcard $(DRAFTER)/config.json))
NGRAMS    := $(ENGINES)/$(NAME)-ngrams-$(PRECISION)$(SPLIT)
BUNDLE    ?= $(if $(TRAINED),$(ENGINES)/$(NAME)-$(or $(OTHER_KIND),redrafter)-$(PRECISION)$(SPLIT),$(NGRAMS))
BASELINE  ?= $(ENGINES)/$(NAME)-ar-$(PRECISION)$(SPLIT)

DATA      ?=
COLUMN    ?=
TEACHER   ?= artifacts/data/$(NAME)$(if $(LAYERS),-layers)
HELD_OUT  = $(addprefix --data ,$(shell ls -d $(TEACHER)-held-out 2>/dev/null))
TOKENS    ?= 5000000
POSITIONS ?= 5000000
HOURS     ?= 1
TUNE_MINUTES ?= 4
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
OPENAI_PORT ?= 8003
RUN_DIR   ?= artifacts/run
PROMPTS   ?= benchmarks/prompts.jsonl
RATES     ?= 0.5 1 2
PROTOCOL  ?= grpc
LOADTEST  ?=
CLIENTTEST ?=
RESULTS   ?= artifacts/loadtest/$(notdir $(BUNDLE))

PY      := .venv/bin/python
SETUP   := .venv/.setup
LAUNCH  := $(if $(filter-out 1,$(TP)),.venv/bin/mpiexec.gforker -genv UCX_TLS $(UCX_TLS) -genv PYTHONIOENCODING ascii:backslashreplace -n $(TP))
CALIBRATED := $(if $(filter fp8,$(PRECISION)),$(CALIBRATION))
READ    = $(if $(COLUMN),--column "$(COLUMN)")
DISTILL = $(PY) build/distill.py --model $(MODEL) $(if $(DATA),--prompts $(DATA) $(READ)) --output $(TEACHER) --held-out $(TEACHER)-held-out \
  --tokens $(TOKENS) $(LAYERS)
# COMPILE builds a bundle, unless the one that is there was built from the same. One whose folder the user named is not replaced.
COMPILE := $(PY) build/build_engines.py --backend $(BACKEND) --model $(MODEL) --precision $(PRECISION) \
  $(CALIBRATED:%=--calibration %) $(if $(filter-out 1,$(TP)),--tp $(TP))
named    = $(if $(filter file,$(origin $(1))),--replace)

.DEFAULT_GOAL := help
# Targets that depend on `always` run each time and decide by content.
.PHONY: always help setup model hours drafter distill train engines tune serve stop loadtest saturation test-clients mpi quickstart test test-slow test-all verify lint kernels docs wheel clean
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "Variables: SOURCE ADAPTER CHAT_TEMPLATE MODEL DRAFTER SHAPE METHODS BUNDLE BASELINE PROMPTS RATES PROTOCOL LOADTEST CLIENTTEST RESULTS;"
	@echo "BACKEND and the PRECISION that it takes: openvino fp32 bf16 int8, torch fp32 bf16, tensorrt bf16 int8 fp8,"
	@echo "tensorrt_rtx fp16 bf16 fp32 int8 fp8; for fp8 CALIBRATION;"
	@echo "for engines, tune, serve, loadtest TP (ranks that share the target, TP=2); for drafter DATA HOURS; for distill and"
	@echo "train DATA TEACHER TOKENS POSITIONS KIND (eagle, eagle3, ...); COLUMN of DATA or PROMPTS that holds the prompts; for tune TUNE_MINUTES;"
	@echo "for serve, stop, loadtest HTTP_PORT GRPC_PORT METRICS_PORT OPENAI_PORT RUN_DIR; for setup PYTHON TORCH_INDEX TORCH. See README.md."

CHECK_PYTHON = $(PYTHON) -c "import ensurepip, sys; sys.exit(sys.version_info[:2] != (3, 11))" 2>/dev/null || { echo \
  "make: needs Python 3.11 with venv, got $(PYTHON) ($$($(PYTHON) --version 2>&1 | tail -1)). Set PYTHON to it (Debian:" \
  "apt-get install python3.11-venv)"; exit 1; }
setup: $(SETUP) ## virtual environment .venv (nothing outside of it is touched)
$(SETUP): pyproject.toml requirements.txt requirements-gpu.txt requirements-triton.txt $(wildcard requirements/*.txt)
	@command -v g++ >/dev/null || { echo "setup: g++ is missing (Debian: apt-get install g++)"; exit 1; }
	@$(CHECK_PYTHON)
	@$(PYTHON) -m venv .venv
	@.venv/bin/python -c "import ctypes; ctypes.CDLL('libpython3.11.so.1.0')" 2>/dev/null || { echo "setup: libpython3.11," \
	  "which Triton's Python backend loads, is missing (Debian: apt-get install libpython3.11)"; exit 1; }
	@if nvidia-smi -L >/dev/null 2>&1; then \
	  echo "setup: NVIDIA GPU found, torch with CUDA"; \
	  .venv/bin/pip install --no-compile -r requirements-gpu.txt; \
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
	@.venv/bin/python -m compileall -qq -j 0 .venv/lib & \
	  $(PYTHON) -m venv .venv/triton && \
	  .venv/triton/bin/pip install -q --progress-bar on -r requirements-triton.txt && \
	  .venv/triton/bin/pip install -q --progress-bar on --no-deps nvidia-pytriton==0.7.0; \
	  status=$$?; wait; exit $$status
	@touch $@

model: $(MODEL)/source.json ## fetch the target SOURCE (folder, .gguf or hub id; default: SmolLM2-135M-Instruct) into MODEL
# A SOURCE that is given is held against the model that is there.
$(MODEL)/source.json: $(if $(CHAT_TEMPLATE)$(ADAPTER)$(filter-out default,$(SOURCE)),always) | $(SETUP)
	$(if $(filter-out $(DEFAULT)$(ADAPTED),$(if $(filter default,$(SOURCE)),$(NAME))),$(error $(if $(wildcard \
	  $(MODEL)/source.json),CHAT_TEMPLATE needs the SOURCE that $(MODEL) was fetched from,$(MODEL) is not there: \
	  make model SOURCE=<folder, .gguf or hub id> fetches it)))
	$(PY) build/fetch_model.py $(SOURCE) --name $(NAME) --output $(dir $(MODEL)) $(CHAT_TEMPLATE:%=--chat-template %) \
	  $(ADAPTER:%=--adapter %)

distill: $(TEACHER)-engine/manifest.json ## write teacher data into TEACHER from the prompts of DATA (without: the target's own)
	$(DISTILL) --bundle $(TEACHER)-engine
# The check says how long the engine's sequences are to be.
$(TEACHER)-engine/manifest.json: always | $(MODEL)/source.json
	length=$$($(DISTILL) --bundle $(TEACHER)-engine --check) && \
	  $(PY) build/build_engines.py --backend $(BACKEND) --model $(MODEL) --no-drafter --features $(LAYERS) --slots 64 \
	  --max-len $$length --max-tree 1 --prefill-chunk 64 --replace --output $(TEACHER)-engine

train: | $(MODEL)/source.json ## train a drafter on TEACHER into artifacts/drafters
	$(PY) build/train_drafter.py --model $(MODEL) --data $(TEACHER) $(HELD_OUT) --output $(OWN_DRAFTER) \
	  --positions $(POSITIONS) --kind $(KIND)

hours:
	@test -z "$(OTHER_KIND)" || { echo "make drafter plans for KIND=recurrent:" \
	  "make distill train KIND=$(KIND) TOKENS=... POSITIONS=... trains another"; exit 1; }
	@awk 'BEGIN { exit !(ARGV[1] ~ /^[0-9.]+$$/ && ARGV[1] > 0) }' "$(HOURS)" || \
	  { echo "make: HOURS=$(HOURS): expected a number above 0, such as HOURS=0.5"; exit 1; }

# Teacher data and training are sized for HOURS by a plan, with which a killed run goes on.
drafter: TOKENS = 1000
drafter: hours $(TEACHER)-engine/manifest.json ## a drafter for SOURCE from DATA in HOURS: distill, train, judge, build, tune, say what was gained
	$(PY) build/drafter.py plan $(OWN_DRAFTER)/plan.json --model $(MODEL) --teacher $(TEACHER) --engine $(TEACHER)-engine \
	  --hours $(HOURS) \
	  $(if $(DATA),--prompts $(DATA) $(READ))
	sizes=$$($(PY) build/drafter.py sizes $(OWN_DRAFTER)/plan.json) && test -n "$$sizes" && \
	  $(MAKE) distill $$sizes && $(MAKE) train $$sizes
	$(MAKE) $(NGRAMS)/budget.json
	$(MAKE) $(BUNDLE)/budget.json DRAFTER=$(OWN_DRAFTER)
	$(PY) build/drafter.py gains $(OWN_DRAFTER) --model $(MODEL) --teacher $(TEACHER) --ngrams $(NGRAMS) --bundle $(BUNDLE) \
	  $(if $(DATA),--prompts $(DATA) $(READ))

DRAFTING := $(sort $(BUNDLE) $(NGRAMS))
engines: $(BUNDLE)/manifest.json $(BASELINE)/manifest.json ## build the bundles BUNDLE and, without drafter, BASELINE
$(BUNDLE)/manifest.json: $(if $(TRAINED),$(or $(METHODS),$(DRAFTER)/config.json))
$(DRAFTING:%=%/manifest.json): always $(CALIBRATED) | $(MODEL)/source.json
	$(COMPILE) $(if $(filter $(BUNDLE),$(@D)),$(call named,BUNDLE)) $(if $(and $(TRAINED),$(filter-out $(NGRAMS),$(@D))),\
	  $(if $(METHODS),--methods $(METHODS),--drafter $(DRAFTER) $(SHAPE)),--no-drafter --construction ngram_trie) --output $(@D)
$(BASELINE)/manifest.json: always $(CALIBRATED) | $(MODEL)/source.json
	$(COMPILE) $(call named,BASELINE) --no-drafter --output $(BASELINE)

$(CALIBRATION): | $(MODEL)/source.json
	$(PY) build/calibrate.py --model $(MODEL) --prompts benchmarks/prompts.jsonl --output $(CALIBRATION)

$(DRAFTER)/config.json: | $(MODEL)/source.json
	$(error $(if $(filter %.gguf,$(DRAFTER)),$(DRAFTER) is a GGUF file and no drafter is read from one: set DRAFTER to the folder \
	  that it was converted from,$(if $(wildcard $(DRAFTER)/.),$(DRAFTER) holds no drafter: it has no config.json,no drafter at \
	  $(DRAFTER): train one with make distill train, or set DRAFTER to a folder, such as .venv/bin/hf download OWNER/NAME \
	  --local-dir FOLDER makes)))

NO_MPI = the bundle is split over $(TP) ranks, for which MPI is missing ($(firstword $(LAUNCH))): \
  pip install 'redraft[ranks]' (in a clone: -r requirements/ranks.txt)
mpi: | $(SETUP)
	@$(if $(LAUNCH),test -x $(firstword $(LAUNCH)) || { echo "make: $(NO_MPI)"; exit 1; })

tuned = $(LAUNCH) $(PY) build/tune.py --bundle $(1) --minutes $(TUNE_MINUTES) --prompts benchmarks/prompts.jsonl
tune: mpi $(BUNDLE)/manifest.json ## measure step times and acceptance in about TUNE_MINUTES, write the budget table; again if there is one
	$(call tuned,$(BUNDLE))
.PRECIOUS: $(DRAFTING:%=%/budget.json) # whole whenever tuning ends: the methods that were tuned
$(DRAFTING:%=%/budget.json): %/budget.json: always %/manifest.json
	$(PY) -m redraft.bundle.budget $* || $(call tuned,$*)

serve: mpi $(BUNDLE)/budget.json ## fetch SOURCE, build and tune what is not there, start Triton on 127.0.0.1; returns when a request has succeeded
	$(PY) -m redraft.cli serve --bundle $(BUNDLE) --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) \
	  --metrics-port $(METRICS_PORT) --openai-port $(OPENAI_PORT) --run-dir $(RUN_DIR)

stop: | $(SETUP) ## stop it
	$(PY) -m redraft.cli stop --run-dir $(RUN_DIR)

SERVER    = 127.0.0.1:$(or $($(shell echo $(PROTOCOL) | tr a-z A-Z)_PORT),$(error PROTOCOL=$(PROTOCOL): expected grpc, http or openai))
COUNTERS  = http://127.0.0.1:$(METRICS_PORT)/metrics
LOAD      = $(PY) -m benchmarks.load.loadtest --tokenizer $(BUNDLE) --dataset $(PROMPTS) $(READ) --protocol $(PROTOCOL) \
  --url $(SERVER) --metrics-url $(COUNTERS)
loadtest: | $(SETUP) ## load-test the running server at RATES by PROTOCOL; LOADTEST has more flags, such as --runs 1
	$(LOAD) --request-rate $(RATES) --result-dir $(RESULTS) $(LOADTEST)

saturation: | $(SETUP) ## the running server with and without speculation, from 0.25 to 1.2 of saturation
	$(LOAD) --of-saturation 0.25 0.5 0.75 1 1.2 --label speculative --baseline-url $(SERVER) --baseline-metrics-url $(COUNTERS) \
	  --baseline $(RESULTS)-saturation-ar --result-dir $(RESULTS)-saturation $(LOADTEST)

# An environment of its own, as these clients pin other versions than the service.
CLIENTS   := artifacts/clients
$(CLIENTS)/.setup: requirements-clients.txt
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install -q --no-deps $(TORCH) 2>/dev/null || \
	  $(CLIENTS)/bin/pip install -q --no-deps --retries 1 --extra-index-url $(TORCH_INDEX) $(TORCH)
	$(CLIENTS)/bin/pip install -q --progress-bar on -r requirements-clients.txt
	@touch $@
test-clients: $(CLIENTS)/.setup | $(SETUP) ## LiteLLM, LangChain, AIPerf and GuideLLM against the running /v1, a line each
	$(PY) -m benchmarks.load.other_clients.compare --environment $(CLIENTS) --bundle $(BUNDLE) --url 127.0.0.1:$(OPENAI_PORT) \
	  --output artifacts/reports/other_clients.json $(CLIENTTEST)

COMPARED := $(ENGINES)/$(NAME)-methods-$(PRECISION)$(SPLIT)
$(COMPARED)/manifest.json: always benchmarks/methods/methods.toml $(CALIBRATED) | $(MODEL)/source.json
	$(COMPILE) --replace --methods benchmarks/methods/methods.toml --output $(COMPARED)
PAIRS := $(ENGINES)/$(NAME)-lossless-$(PRECISION)$(SPLIT)
$(PAIRS)/manifest.json: always benchmarks/methods/lossless.toml $(CALIBRATED) | $(MODEL)/source.json
	$(COMPILE) --replace --methods benchmarks/methods/lossless.toml --slots 8 --output $(PAIRS)

quickstart: mpi $(BUNDLE)/budget.json $(BASELINE)/manifest.json ## everything: build, serve, load-test, compare, report
	$(PY) -m benchmarks.load.quickstart --baseline $(BASELINE) --bundle $(BUNDLE) \
	  --ports $(HTTP_PORT) $(GRPC_PORT) $(METRICS_PORT) $(OPENAI_PORT) --request-rate $(RATES) --dataset $(PROMPTS) $(READ)

PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart 0
test: | $(SETUP) ## the tests that a change needs while it is made, in under 5 minutes on 2 cores
	$(PYTEST) -m "not slow"
test-slow: | $(SETUP) ## the other tests: every shipped drafter, TensorRT for RTX, crashes and restarts of a service
	$(PYTEST) -m slow
test-all: | $(SETUP) ## all tests
	$(PYTEST)

verify: $(MODEL)/source.json ## speculation changes nothing: all of PROMPTS, fp32
	$(MAKE) engines PRECISION=fp32
	$(PY) -m benchmarks.verify.lossless --auto-regressive $(ENGINES)/$(NAME)-ar-fp32 \
	  --speculative $(ENGINES)/$(NAME)-$(if $(TRAINED),$(or $(OTHER_KIND),redrafter),ngrams)-fp32 --prompts $(PROMPTS)
	$(MAKE) $(ENGINES)/$(NAME)-methods-fp32/manifest.json PRECISION=fp32
	$(PY) -m benchmarks.verify.lossless --speculative $(ENGINES)/$(NAME)-methods-fp32 --prompts $(PROMPTS) \
	  --max-tokens 32 --concurrency 8 --output artifacts/reports/lossless-methods.json
	$(MAKE) $(ENGINES)/$(NAME)-lossless-fp32/manifest.json PRECISION=fp32
	$(PY) -m benchmarks.verify.lossless --speculative $(ENGINES)/$(NAME)-lossless-fp32 --prompts $(PROMPTS) \
	  --settings greedy "temperature 1" --max-tokens 32 --concurrency 8 --output artifacts/reports/lossless-pairs.json
	$(PY) -m benchmarks.verify.structured --bundle $(ENGINES)/$(NAME)-lossless-fp32 --methods all --num-schemas 20 \
	  --num-prompts 8 --output artifacts/reports/structured_methods.json

lint: | $(SETUP) ## ruff, format check, mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

kernels: | $(SETUP) ## compile the CUDA kernels (no GPU needed): registers, spills, occupancy, instructions; fails beyond limits
	$(PY) -m benchmarks.gpu.kernel_resources

docs: | $(SETUP) ## render tables, plots and the command line into docs/, then the site into artifacts/docs; fails on a broken link
	rm -rf artifacts/docs
	$(PY) -m studies.figures.site
	$(PY) -m sphinx -q -E -n -W --keep-going -d artifacts/docs/.doctrees docs artifacts/docs
	@echo "docs: artifacts/docs/index.html"

wheel: | $(SETUP) ## the run time with its operators compiled, into dist
	$(PY) -m hatchling build -t wheel -d dist

clean: ## remove what was built (not .venv, not downloads)
	rm -rf artifacts/engines artifacts/plugins artifacts/loadtest artifacts/reports artifacts/run artifacts/tests artifacts/docs dist
