#!/usr/bin/env bash
# Call b, after a on the same machine: does an engine of TensorRT for RTX run here, what do an 8B's steps and drafts take in
# FP8 and a 135M's in bf16, and how near the bandwidth is attention?
CALL=b; source "$(dirname "$0")/lib.sh"

RTX=$SCRATCH/$(second_half_of "tensorrt_rtx*_libs*")
join "$RTX" "$SCRATCH/a/$(basename "$RTX").part1" "$KIT/$(basename "$RTX").part2"
row install 20 python3 -m pip install -q --no-index --no-deps --no-compile --target "$SCRATCH/site" --upgrade "$RTX" "$SCRATCH"/a/*.whl
use_kernels "$SCRATCH/common"
python_row rtx_smoke 30 benchmarks.gpu.rtx_smoke "$KIT/smoke.engine"
python_row rtx_engines 40 benchmarks.gpu.engines "$KIT/native" --repeats 10
TINY="--shape tiny --context 8 --batches 1 3 --rows 1 4 --repeats 1"
python_row llama_8b_fp8 100 benchmarks.gpu.llama_7b --precision fp8 --kernels \
  $(on cuda --shape llama-3.1-8b --context 1024 --batches 1 8 32 64 --rows 1 5 16 --systems eagle3 redrafter lyanna) $(on cpu $TINY)
python_row llama_135m 40 benchmarks.gpu.llama_7b --kernels \
  $(on cuda --shape smollm2-135m --context 256 --batches 1 8 16 --rows 1 16 --systems redrafter) $(on cpu $TINY)
python_row attention 30 benchmarks.gpu.kernels --no-checks --no-sanitizer --shapes Llama-3-8B
end
