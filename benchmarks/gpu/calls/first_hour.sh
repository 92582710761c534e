#!/usr/bin/env bash
# The first half hour on a GPU: its first questions, one after the other. The same command goes on with the rows that are
# not ok yet. MODEL is the folder of the default model.
CALL=first_hour RESUME=1; source "$(dirname "$0")/lib.sh"
: "${MODEL:=artifacts/models/SmolLM2-135M-Instruct}"

row compile 60 python3 -m benchmarks.gpu.kernel_resources "$(architecture)"
python_row kernels 180 benchmarks.gpu.kernels --no-sanitizer --no-times --cases trees rings norms --shapes Phi-3-mini Gemma-3-4B Llama-3-8B
PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 row tests 180 python3 -m pytest -m gpu -p no:cacheprovider
python_row steps 240 benchmarks.gpu.llama_7b --systems - $(on cuda --shape llama-3.1-8b --context 1024 --batches 1 8 32 --rows 1 5 16) \
  $(on cpu --shape tiny --context 8 --batches 1 2 --rows 1 5 --repeats 1)
python_row attention 120 benchmarks.gpu.kernels --no-checks --no-sanitizer
python_row scheduling 360 benchmarks.gpu.scheduling $(on cpu --shape tiny --concurrency 2 --prompt-tokens 4 --max-tokens 4 --tree-budget 3)
BUILD="python3 -m redraft build --model $MODEL"
LIMITS="--backend torch --slots 32 --max-len 1024 --max-tree 32"
ASK="--num-prompts $(on cuda 16)$(on cpu 2) --max-tokens $(on cuda 64)$(on cpu 4)"
for precision in fp32 bf16; do
  row "build_$precision" 90 $BUILD $LIMITS --methods benchmarks/gpu/methods.toml --precision $precision --output "$OUT/methods-$precision"
  row "build_ar_$precision" 40 $BUILD $LIMITS --no-drafter --precision $precision --output "$OUT/ar-$precision"
done
row equality 120 python3 -m benchmarks.verify.lossless --bundle "$OUT/methods-fp32" --auto-regressive "$OUT/ar-fp32" $ASK \
  --settings greedy "temperature 1" --concurrency 1 8 --output "$OUT/equality.json"
row batches 120 python3 -m benchmarks.speed.method_batches --bundle "$OUT/methods-bf16" --auto-regressive "$OUT/ar-bf16" $ASK \
  $(on cuda --num-prompts 32 --concurrency 1 8 32) $(on cpu --concurrency 1) --output "$OUT/batches.json"
if profilers; then
  python_row sanitizer 180 benchmarks.gpu.kernels --no-checks --no-times --cases rings norms --tools memcheck racecheck
  row ncu 60 ncu --clock-control none --kernel-name regex:tree_attention --metrics "$METRICS" \
    python3 -m benchmarks.gpu.kernels --launch 32 4096 16
fi
row rtx_build 120 $BUILD --backend tensorrt_rtx --no-drafter --precision fp16 --slots 2 --max-len 320 --max-tree 8 --prefill-chunk 16 --output "$OUT/rtx"
python_row rtx 60 benchmarks.gpu.engines "$OUT/rtx" --repeats 10
end
