# What regenerates the tables and plots of docs/: each part writes files of docs/results, by the same names, into REPORTS.
# Drafters that only a table needs are trained from TEACHER by its part, where they are not there yet.
REPORTS   := artifacts/reports
ANSWERS   := artifacts/answers
OWN       := benchmarks/prompts.jsonl
COMPARED  := $(ENGINES)/$(NAME)-methods-$(PRECISION)$(SPLIT)
TUNED     := $(COMPARED)-tuned
LEVEL     := $(ENGINES)/$(NAME)-methods-equal-$(PRECISION)$(SPLIT)
WIDTHS    := $(ENGINES)/$(NAME)-beam-widths-$(PRECISION)$(SPLIT)
BUDGETS   := $(ENGINES)/$(NAME)-tree-budgets-$(PRECISION)$(SPLIT)
SHAPES    := $(ENGINES)/$(NAME)-tree-shapes-$(PRECISION)$(SPLIT)
WAYS      := $(ENGINES)/$(NAME)-constructions-$(PRECISION)$(SPLIT)
SETTING   := $(ENGINES)/$(NAME)-lyanna-$(PRECISION)$(SPLIT)
BEAMED    := $(ENGINES)/$(NAME)-beam-shapes-$(PRECISION)$(SPLIT)
DRAWN     := $(ENGINES)/$(NAME)-beam-draws-$(PRECISION)$(SPLIT)
RESAMPLED := $(ENGINES)/$(NAME)-resampling-$(PRECISION)$(SPLIT)
BEAMS     := $(ENGINES)/$(NAME)-beam-packing-$(PRECISION)$(SPLIT)
CHECKED   := $(ENGINES)/$(NAME)-cross-check-$(PRECISION)$(SPLIT)
NARROW    := $(ENGINES)/$(NAME)-w3l4-$(PRECISION)$(SPLIT)
UNTRAINED := artifacts/drafters/$(NAME)-untrained
LATENCY   := $(ENGINES)/$(NAME)-untrained-$(PRECISION)$(SPLIT)
TABLED    := artifacts/drafters/$(NAME)-tables
COUNTS    := artifacts/counts/$(NAME)
REPLAYED  := --model $(MODEL) --answers $(ANSWERS)
BATCHED   := best redrafter_best_first lyanna eagle sps sps_tree ngram_trie
PARTS     := steps methods equal spec-bench trees lyanna redrafter rsd training precision

folders    = $(addsuffix /config.json,$(addprefix $(TABLED)/,$(1)))
ABLATIONS := $(call folders,ablations/full ablations/no_token_info ablations/no_first_token)
INFO      := $(call folders,$(foreach seed,1 2 3,token_info/sparse/$(seed) token_info/dense/$(seed)))
OWN_HEAD  := $(call folders,head/target head/own)
DISTILLED := $(call folders,distillation/generated distillation/text_soft distillation/text_hard)
EQUAL     := $(call folders,equal/recurrent equal/draft_lm equal/eagle equal/hidden_state equal/medusa)
# $(call on-spec-bench,command,what it is): the command with the data set, or a line that says that it is left out
on-spec-bench = $(if $(SPEC_BENCH),$(1) --dataset $(SPEC_BENCH),@echo "left out: $(2), which takes SPEC_BENCH=spec_bench.jsonl")

.PHONY: bench one-rank answers $(PARTS:%=bench-%)
bench: $(PARTS:%=bench-%) ## all tables and plots of docs/, on PROMPTS and SPEC_BENCH; its parts:

one-rank:
	@$(if $(filter-out 1,$(TP)),$(error TP=$(TP): bench compares bundles of one rank; benchmarks/speed/tensor_parallel.py compares numbers of ranks))
$(PARTS:%=bench-%): one-rank | $(MODEL)/source.json

bench-steps: $(addsuffix /manifest.json,$(BASELINE) $(BUNDLE)) ## step times, the host's part of a step, prefix reuse
	$(PY) -m benchmarks.speed.step_times $(BASELINE) --output $(REPORTS)/step_times.json
	$(PY) -m benchmarks.speed.host_overhead --output $(REPORTS)/host_overhead.json
	$(PY) -m benchmarks.speed.host_overhead --logits --output $(REPORTS)/host_overhead_logits.json
	$(PY) -m benchmarks.cache.prefix_reuse --bundle $(BUNDLE) --output $(REPORTS)/prefix_reuse.json

bench-methods: $(BUNDLE)/budget.json $(BASELINE)/manifest.json $(TUNED)/budget.json $(WIDTHS)/budget.json ## single stream, streams, all methods, by batch, beam widths
	$(PY) -m benchmarks.speed.single_stream --auto-regressive $(BASELINE) --speculative $(BUNDLE) --dataset $(PROMPTS) \
	  --streams --repeats 1 --output $(REPORTS)/single_stream.json
	$(PY) -m benchmarks.speed.single_stream --auto-regressive $(BASELINE) --speculative $(BUNDLE) --dataset $(PROMPTS) \
	  --num-prompts 16 --max-tokens 96 --temperature 0 --streams 2 4 8 16 --output $(REPORTS)/streams.json
	$(PY) -m benchmarks.speed.single_stream --auto-regressive $(BASELINE) --speculative $(COMPARED) --methods --dataset $(PROMPTS) \
	  --num-prompts 20 --max-tokens 64 --streams --repeats 1 --output $(REPORTS)/methods.json
	$(PY) -m benchmarks.speed.method_batches --bundle $(TUNED) --auto-regressive $(BASELINE) --methods $(BATCHED) --batches 2 4 8 16 \
	  --dataset $(PROMPTS) --output $(REPORTS)/method_batches.json
	$(PY) -m benchmarks.speed.method_batches --bundle $(WIDTHS) --auto-regressive $(BASELINE) --best-of tuned --dataset $(PROMPTS) \
	  --num-prompts 16 --max-tokens 32 --rounds 1 --output $(REPORTS)/beam_widths.json

bench-equal: $(BASELINE)/manifest.json $(LEVEL)/manifest.json $(LEVEL)-tuned/budget.json ## methods by drafters of equal data and budgets
	$(PY) -m benchmarks.speed.single_stream --auto-regressive $(BASELINE) --speculative $(LEVEL) --methods --dataset $(PROMPTS) \
	  --num-prompts 20 --max-tokens 64 --streams --repeats 1 --output $(REPORTS)/methods_equal.json
	$(PY) -m benchmarks.speed.method_batches --bundle $(LEVEL)-tuned --auto-regressive $(BASELINE) --methods $(BATCHED) --batches 2 4 8 16 \
	  --dataset $(PROMPTS) --output $(REPORTS)/method_batches_equal.json

bench-spec-bench: $(addsuffix /manifest.json,$(COMPARED) $(BASELINE)) ## methods on the six tasks of SPEC_BENCH
	$(call on-spec-bench,$(PY) -m benchmarks.speed.single_stream --auto-regressive $(BASELINE) --speculative $(COMPARED) --num-prompts 60 --max-tokens 64 \
	  --methods --streams --repeats 1 --output $(REPORTS)/methods_spec_bench.json,methods by task)

bench-trees: $(addsuffix /manifest.json,$(BASELINE) $(NARROW) $(BUNDLE) $(BUDGETS) $(SHAPES) $(WAYS)) answers | $(TEACHER) ## tree shapes and sizes, constructions, n-grams and their retrieval
	$(PY) -m benchmarks.speed.single_stream --auto-regressive $(BASELINE) --speculative $(BUDGETS) --methods --dataset $(PROMPTS) --temperature 0 \
	  --streams --repeats 1 --output $(REPORTS)/tree_budgets.json
	$(PY) -m benchmarks.speed.single_stream --auto-regressive $(BASELINE) --speculative $(SHAPES) --methods --dataset $(PROMPTS) --temperature 0 \
	  --max-tokens 96 --streams --repeats 1 --output $(REPORTS)/tree_shapes.json
	$(PY) -m benchmarks.speed.single_stream --auto-regressive $(BASELINE) --speculative $(WAYS) --dataset $(PROMPTS) --max-tokens 32 \
	  --methods shared likely rsd_s rsd_c specinfer spectr random_chain --temperature 0.3 0.7 1 --streams --repeats 1 --output $(REPORTS)/constructions.json
	$(PY) -m benchmarks.speed.single_stream --auto-regressive $(BASELINE) --speculative $(WAYS) --dataset $(PROMPTS) --max-tokens 32 \
	  --methods shared_7 likely_7 rsd_s_7 spectr_7 --temperature 1 --streams --repeats 1 --output $(REPORTS)/constructions_7.json
	$(call on-spec-bench,$(PY) -m benchmarks.speed.single_stream --auto-regressive $(BASELINE) --speculative $(WAYS) --num-prompts 80 --max-tokens 32 \
	  --methods shared likely rsd_s rsd_c specinfer spectr random_chain --temperature 1 --streams --repeats 1 \
	  --output $(REPORTS)/constructions_spec_bench.json,constructions on its prompts)
	$(PY) -m benchmarks.speed.grid --bundle $(NARROW) $(BUNDLE) --dataset $(PROMPTS) --num-prompts 20 --max-tokens 64 \
	  --output $(REPORTS)/grid.json
	$(PY) -m benchmarks.replay.answers --bundle $(BUNDLE) --dataset $(OWN) --max-tokens 512 --output $(ANSWERS)-own
	$(PY) -m benchmarks.replay.retrieval --answers $(ANSWERS) $(if $(filter-out $(OWN),$(PROMPTS)),--warm-up $(ANSWERS)-own) \
	  --budgets 4 12 16 32 --output $(REPORTS)/retrieval.json

RESAMPLING := $(PY) -m benchmarks.speed.single_stream --auto-regressive $(BASELINE) --speculative $(RESAMPLED) --dataset $(PROMPTS) \
  --num-prompts 40 --max-tokens 64 --streams 2 --repeats 1
AT_ONCE := $(PY) -m benchmarks.speed.method_batches --bundle $(SETTING) --auto-regressive $(BASELINE) --num-prompts 32 \
  --dataset $(PROMPTS)
bench-lyanna: $(addsuffix /manifest.json,$(BASELINE) $(RESAMPLED) $(SETTING) $(LATENCY)) $(ABLATIONS) $(INFO) answers ## Lyanna, tables 1 and 2, figures 8 to 13
	$(PY) -m benchmarks.replay.ablation $(REPLAYED) --drafters $(patsubst %/,%,$(dir $(ABLATIONS))) \
	  drafters/$(DEFAULT)-hidden_state --output $(REPORTS)/ablation.json
	$(PY) -m benchmarks.training.training_table $(TABLED)/token_info/sparse $(TABLED)/token_info/dense \
	  --output $(REPORTS)/token_info_table.json
	$(RESAMPLING) --methods off fused alone_above_0 alone_above_1 alone_above_2 --output $(REPORTS)/resampling.json
	$(RESAMPLING) --methods off_12 fused_12 alone_12 --output $(REPORTS)/resampling_12.json
	$(PY) -m benchmarks.speed.single_stream --auto-regressive $(BASELINE) --speculative $(SETTING) --methods --dataset $(PROMPTS) \
	  --num-prompts 40 --max-tokens 64 --streams --repeats 1 --output $(REPORTS)/lyanna.json
	$(AT_ONCE) --output $(REPORTS)/lyanna_batches.json
	$(AT_ONCE) --temperature 1 --output $(REPORTS)/lyanna_batches_sampled.json
	$(PY) -m benchmarks.speed.drafting_latency heads --output $(REPORTS)/drafting_heads.json
	$(PY) -m benchmarks.speed.drafting_latency drafters --bundle $(LATENCY) --output $(REPORTS)/drafting_latency.json

bench-redrafter: $(DISTILLED) $(OWN_HEAD) $(addsuffix /manifest.json,$(BASELINE) $(CHECKED) $(BEAMS) $(BEAMED) $(DRAWN)) answers ## ReDrafter, figures 6 and 7, tables 4 and 6, a head of its own, draws as wide as beams; replays checked live
	$(PY) -m benchmarks.speed.single_stream --auto-regressive $(BASELINE) --speculative $(BEAMED) --methods --dataset $(PROMPTS) \
	  --num-prompts 20 --max-tokens 64 --temperature 0 --streams --repeats 1 --output $(REPORTS)/beam_shapes_live.json
	$(PY) -m benchmarks.speed.single_stream --auto-regressive $(BASELINE) --speculative $(DRAWN) --methods redrafter rsd_s spectr \
	  --dataset $(PROMPTS) --num-prompts 40 --max-tokens 64 --temperature 1 --streams --repeats 1 --output $(REPORTS)/beam_draws.json
	$(PY) -m benchmarks.replay.cross_check $(REPLAYED) --bundle $(CHECKED) --num-prompts 40 --output $(REPORTS)/cross_check.json
	$(PY) -m benchmarks.replay.beam_packing $(REPLAYED) --drafter $(DRAFTER) --output $(REPORTS)/beam_packing.json
	$(PY) -m benchmarks.speed.beam_packing_throughput --bundle $(BEAMS) --dataset $(PROMPTS) --num-prompts 16 --warm-up 2 \
	  --rounds 1 --batches 1 4 16 --output $(REPORTS)/beam_packing_throughput.json
	$(PY) -m benchmarks.replay.beam_shapes $(REPLAYED) --drafters $(DRAFTER) --num-prompts 10 --output $(REPORTS)/beam_shapes.json
	$(PY) -m benchmarks.replay.beam_shapes $(REPLAYED) --drafters $(patsubst %/,%,$(dir $(DISTILLED))) --num-prompts 20 \
	  --lengths 5 --widths 1 4 16 64 --output $(REPORTS)/distillation.json
	$(PY) -m benchmarks.replay.beam_shapes $(REPLAYED) --drafters $(patsubst %/,%,$(dir $(OWN_HEAD))) --num-prompts 20 \
	  --lengths 5 --widths 1 4 --output $(REPORTS)/drafter_heads.json

RSD := $(PY) -m benchmarks.rsd.experiments --model $(MODEL) --drafter $(DRAFTER) --engines $(ENGINES) --precision $(PRECISION) \
  --num-prompts 80
bench-rsd: $(COMPARED)/manifest.json ## what rejection costs; RSD, both experiments and their token rates on SPEC_BENCH
	$(PY) -m benchmarks.speed.drafting_latency rejection --bundle $(COMPARED) --dataset $(PROMPTS) --num-prompts 64 \
	  --output $(REPORTS)/rejection.json
	$(call on-spec-bench,$(RSD) --output $(REPORTS)/rsd,experiments 1 and 2)
	$(call on-spec-bench,$(RSD) --output $(REPORTS)/rsd --timing,their token rates)
	$(call on-spec-bench,$(RSD) --drafter drafters/$(DEFAULT)-draft_lm --output $(REPORTS)/rsd_draft_lm --experiments exp1 \
	  --temperature 1 --max-tokens 32 --slots 8,draft lengths with a draft LM)
	$(call on-spec-bench,$(RSD) --output $(REPORTS)/rsd_tasks --experiments exp2 --cells 14 --temperature 0.3 1 \
	  --tasks rag math_reasoning,quality on two tasks more)

bench-training: $(COUNTS)/token_counts.npy $(ABLATIONS) $(EQUAL) ## drafters on held-out text, learning curves, token frequency
	$(PY) -m benchmarks.training.held_out $(wildcard drafters/$(DEFAULT)*) --model $(MODEL) --data $(TEACHER) $(HELD_OUT) \
	  --output $(REPORTS)/held_out.json
	$(PY) -m benchmarks.training.token_frequency $(COUNTS)/token_counts.npy --output $(REPORTS)/token_frequency.json

bench-precision: $(CALIBRATION) ## what 8-bit networks change
	$(PY) -m benchmarks.speed.precision --model $(MODEL) --calibration $(CALIBRATION) --dataset $(PROMPTS) --num-prompts 20 \
	  --output $(REPORTS)/precision.json

answers: $(BUNDLE)/manifest.json
	$(PY) -m benchmarks.replay.answers --bundle $(BUNDLE) --dataset $(PROMPTS) --output $(ANSWERS)

$(COMPARED)/manifest.json: always benchmarks/methods/methods.toml $(CALIBRATED) | $(MODEL)/source.json
	$(COMPILE) --methods benchmarks/methods/methods.toml --output $(COMPARED)
$(BUDGETS)/manifest.json: always benchmarks/methods/tree_budgets.toml $(CALIBRATED) | $(MODEL)/source.json
	$(COMPILE) --methods benchmarks/methods/tree_budgets.toml --output $(BUDGETS)
$(SHAPES)/manifest.json: always benchmarks/methods/tree_shapes.toml $(CALIBRATED) | $(MODEL)/source.json
	$(COMPILE) --methods benchmarks/methods/tree_shapes.toml --output $(SHAPES)
$(RESAMPLED)/manifest.json: always benchmarks/methods/resampling.toml $(CALIBRATED) | $(MODEL)/source.json
	$(COMPILE) --methods benchmarks/methods/resampling.toml --output $(RESAMPLED)
$(SETTING)/manifest.json: always benchmarks/methods/lyanna.toml $(CALIBRATED) | $(MODEL)/source.json
	$(COMPILE) --methods benchmarks/methods/lyanna.toml --output $(SETTING)
$(BEAMED)/manifest.json: always benchmarks/methods/beam_shapes.toml $(CALIBRATED) | $(MODEL)/source.json
	$(COMPILE) --methods benchmarks/methods/beam_shapes.toml --output $(BEAMED)
$(DRAWN)/manifest.json: always benchmarks/methods/tensor_parallel.toml $(CALIBRATED) | $(MODEL)/source.json
	$(COMPILE) --methods benchmarks/methods/tensor_parallel.toml --output $(DRAWN)
$(WAYS)/manifest.json: always benchmarks/methods/constructions.toml $(CALIBRATED) | $(MODEL)/source.json
	$(COMPILE) --methods benchmarks/methods/constructions.toml --output $(WAYS)
$(CHECKED)/manifest.json: always benchmarks/methods/cross_check.toml $(CALIBRATED) | $(MODEL)/source.json
	$(COMPILE) --methods benchmarks/methods/cross_check.toml --output $(CHECKED)
$(BEAMS)/manifest.json: always benchmarks/methods/beam_packing.toml $(CALIBRATED) | $(MODEL)/source.json
	$(COMPILE) --methods benchmarks/methods/beam_packing.toml --max-tree 226 --slots 16 --output $(BEAMS)
$(LEVEL)/manifest.json: always benchmarks/methods/methods.toml $(EQUAL) $(CALIBRATED) | $(MODEL)/source.json
	sed -e 's|"drafters/$(DEFAULT)-|"$(TABLED)/equal/|; s|"drafters/$(DEFAULT)"|"$(TABLED)/equal/recurrent"|' \
	  benchmarks/methods/methods.toml > $(TABLED)/equal/methods.toml
	$(COMPILE) --methods $(TABLED)/equal/methods.toml --output $(LEVEL)
%-tuned/budget.json: %/manifest.json # a copy, since methods are also compared at trees of one size
	rm -rf $(@D) && cp -r $* $(@D)
	$(PY) build/tune.py --bundle $(@D) $(BATCHED:%=--method %) --num-prompts 8 --minutes 60 --prompts $(OWN)
$(WIDTHS)/manifest.json: always benchmarks/methods/beam_widths.toml $(CALIBRATED) | $(MODEL)/source.json
	$(COMPILE) --methods benchmarks/methods/beam_widths.toml --max-tree 321 --output $(WIDTHS)
$(WIDTHS)/budget.json: $(WIDTHS)/manifest.json
	$(PY) build/tune.py --bundle $(WIDTHS) --method tuned --minutes 60 --prompts $(OWN)
$(NARROW)/manifest.json: always $(DRAFTER)/config.json $(CALIBRATED) | $(MODEL)/source.json
	$(COMPILE) --drafter $(DRAFTER) --beam-width 3 --beam-length 4 --output $(NARROW)
$(LATENCY)/manifest.json: always $(CALIBRATED) | $(MODEL)/source.json
	$(PY) -m benchmarks.speed.drafting_latency untrained --model $(MODEL) --output $(UNTRAINED)
	$(COMPILE) --methods $(UNTRAINED)/methods.toml --output $(LATENCY)

$(TEACHER): # make distill takes DATA and TOKENS; it goes on with a folder that it left unfinished, these parts take it as it is
	$(MAKE) distill
$(TEACHER)-prefill: | $(MODEL)/source.json
	$(PY) build/distill.py --model $(MODEL) $(if $(DATA),--prompts $(DATA)) --output $@ --source prefill --slots 8 --shard-documents 256 \
	  --tokens 770000

CHANGED :=
SEED    := 1
TRAIN = $(PY) build/train_drafter.py --model $(MODEL) --data $(TAUGHT) --output $(@D) --held-out 2 --seed $(SEED) $(CHANGED)
$(call folders,%): TAUGHT = $(strip $(TEACHER) $(HELD_OUT))
$(call folders,distillation/text_%): TAUGHT = $(TEACHER)-prefill
$(call folders,distillation/text_hard): CHANGED := --labels hard
$(call folders,ablations/no_token_info): CHANGED := --set token_info=false
$(call folders,ablations/no_first_token): CHANGED := --set first_token=false
$(call folders,token_info/%): SEED = $(notdir $*)
$(call folders,token_info/dense/%): CHANGED := --set info_vocabulary=1000000
$(call folders,ablations/%): | $(TEACHER) $(MODEL)/source.json
	$(TRAIN) --drafter hidden_state --positions 150000 --every 25
$(call folders,token_info/%): | $(TEACHER) $(MODEL)/source.json # every token is drafted, and its info is known or not
	$(TRAIN) --drafter hidden_state --hot-vocabulary 0 --positions 24000 --every 8
$(call folders,head/own): CHANGED := --set head=own
$(call folders,head/%): | $(TEACHER) $(MODEL)/source.json
	$(TRAIN) --drafter recurrent --positions 100000
$(call folders,distillation/%): | $(TEACHER) $(TEACHER)-prefill $(MODEL)/source.json
	$(TRAIN) --drafter recurrent --positions 150000
$(call folders,equal/%): | $(TEACHER) $(MODEL)/source.json
	$(TRAIN) --drafter $* --positions 2000000 --every 400
$(COUNTS)/token_counts.npy: | $(TEACHER) $(MODEL)/source.json
	$(PY) build/count_tokens.py --model $(MODEL) --data $(TEACHER) --output $(COUNTS)
