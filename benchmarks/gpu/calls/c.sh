#!/usr/bin/env bash
# Call c: step and draft times of an 8B with ReDrafter, Lyanna and EAGLE-3, in bf16 and in FP8, and memcheck on today's writes.
CALL=c; source "$(dirname "$0")/lib.sh"

row install 30 python3 -m pip install -q --no-index --no-deps --no-compile --target "$SCRATCH/site" --upgrade .kit/common/*.whl
use_kernels .kit/common
row keep 5 cp -r "$KIT" .kit/common "$SCRATCH/"
python_row llama_8b 70 benchmarks.gpu.llama_7b $(on cuda --shape llama-3.1-8b --context 1024 --batches 1 8 32 --rows 1 5 16 17 32) \
  $(on cpu --shape tiny --context 8 --batches 1 3 --rows 1 4 --repeats 1)
python_row llama_8b_fp8 70 benchmarks.gpu.llama_7b --fp8 $(on cuda --shape llama-3.1-8b --context 1024 --batches 1 8 32 --rows 1 5 16 17 32) \
  $(on cpu --shape tiny --context 8 --batches 1 3 --rows 1 4 --repeats 1)
python_row scheduling_135m 30 benchmarks.gpu.scheduling $(on cuda --shape smollm2-135m --concurrency 1 8 16) \
  $(on cpu --shape tiny --concurrency 2 --prompt-tokens 4 --max-tokens 4 --tree-budget 3)
python_row sanitizer 60 benchmarks.gpu.kernels --no-checks --no-times --cases rings norms --tools memcheck
end
