#!/usr/bin/env bash
# Call a: is today's source right on this GPU, where does a step's time go, and does FP8 pay?
CALL=a; source "$(dirname "$0")/lib.sh"

row machine 10 bash -c 'nvidia-smi -L; uname -r; python3 -m pip list 2>/dev/null | grep -iE "^(torch|triton|transformers|numpy) "'
row install 30 python3 -m pip install -q --no-index --no-deps --no-compile --target "$SCRATCH/site" --upgrade .kit/common/*.whl
use_kernels .kit/common
row keep 5 cp -r "$KIT" .kit/common "$SCRATCH/"
PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 row tests 75 python3 -m pytest -m gpu -q -x -p no:cacheprovider ||
  { end; exit 1; }  # nothing below is worth its time: read the failure, mend it, and call again
python_row checks 30 benchmarks.gpu.kernels --no-sanitizer --no-times --small
python_row checks_full 50 benchmarks.gpu.kernels --no-sanitizer --no-times --cases rings norms trees \
  --shapes $(on cuda Phi-3-mini Gemma-3-4B Llama-3-8B) $(on cpu SmolLM2-135M)
python_row profile_8b 30 benchmarks.gpu.profile $(on cuda --shape llama-3.1-8b --batches 1 32 --rows 1 16) \
  $(on cpu --shape tiny --context 8 --batches 1 2 --rows 1 4)
python_row profile_135m 15 benchmarks.gpu.profile $(on cuda --shape smollm2-135m --context 256 --batches 1 --rows 1 16) \
  $(on cpu --shape tiny --context 8 --batches 1 --rows 1)
python_row matmuls 25 benchmarks.gpu.matmuls $(on cpu --shape tiny --rows 1 16)
end
