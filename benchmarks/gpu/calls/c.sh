#!/usr/bin/env bash
# Call c: the scheduler over an 8B in FP8 and over a 135M, what graphs of prompts save, and memcheck on the kernels' writes.
CALL=c; source "$(dirname "$0")/lib.sh"

row install 30 python3 -m pip install -q --no-index --no-deps --no-compile --target "$SCRATCH/site" --upgrade .kit/common/*.whl
use_kernels .kit/common
row keep 5 cp -r "$KIT" .kit/common "$SCRATCH/"
TINY="--shape tiny --concurrency 2 --prompt-tokens 40 --max-tokens 8 --tree-budget 3"
python_row scheduling 70 benchmarks.gpu.scheduling --precision fp8 $(on cuda --max-tokens 64) $(on cpu $TINY)
python_row scheduling_eager 40 benchmarks.gpu.scheduling --precision fp8 --eager-prompts $(on cuda --concurrency 8 --max-tokens 64) $(on cpu $TINY)
python_row scheduling_135m 40 benchmarks.gpu.scheduling $(on cuda --shape smollm2-135m --concurrency 1 8 16) \
  $(on cpu --shape tiny --concurrency 2 --prompt-tokens 4 --max-tokens 4 --tree-budget 3)
python_row sanitizer 60 benchmarks.gpu.kernels --no-checks --no-times --cases rings norms --tools memcheck
end
