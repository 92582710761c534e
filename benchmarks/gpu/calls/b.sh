#!/usr/bin/env bash
# Call b, after a on the same machine: does an engine of TensorRT for RTX run here, and what do graphs of prompts and a
# seventeenth row cost?
CALL=b; source "$(dirname "$0")/lib.sh"

RTX=$SCRATCH/$(second_half_of "tensorrt_rtx*_libs*")
join "$RTX" "$SCRATCH/a/$(basename "$RTX").part1" "$KIT/$(basename "$RTX").part2"
row install 20 python3 -m pip install -q --no-index --no-deps --no-compile --target "$SCRATCH/site" --upgrade "$RTX" "$SCRATCH"/a/*.whl
use_kernels "$SCRATCH/common"
python_row rtx_smoke 30 benchmarks.gpu.rtx_smoke "$KIT/smoke.engine"
python_row rtx_engines 40 benchmarks.gpu.engines "$KIT/native" --repeats 10
TINY="--shape tiny --concurrency 2 --prompt-tokens 40 --max-tokens 8 --tree-budget 3"
python_row scheduling 60 benchmarks.gpu.scheduling $(on cuda --max-tokens 64) $(on cpu $TINY)
python_row scheduling_eager 30 benchmarks.gpu.scheduling --eager-prompts $(on cuda --concurrency 8 --max-tokens 64) $(on cpu $TINY)
python_row scheduling_17_rows 30 benchmarks.gpu.scheduling $(on cuda --concurrency 32 --max-tokens 64 --tree-budget 16) $(on cpu $TINY)
end
