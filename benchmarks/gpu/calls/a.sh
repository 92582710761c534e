#!/usr/bin/env bash
# Call a: is today's source right on this GPU, does FP8 pay, and where does the time of an 8B's step and drafts in bf16 go?
CALL=a; source "$(dirname "$0")/lib.sh"

row machine 10 bash -c 'nvidia-smi -L; uname -r; python3 -m pip list 2>/dev/null | grep -iE "^(torch|triton|transformers|numpy) "'
row install 30 python3 -m pip install -q --no-index --no-deps --no-compile --target "$SCRATCH/site" --upgrade .kit/common/*.whl
use_kernels .kit/common
row keep 5 cp -r "$KIT" .kit/common "$SCRATCH/"
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
beside row tests 90 python3 -m pytest -m gpu -q -p no:cacheprovider -p xdist -n 6 --tb=short -rf
beside python_row checks 60 benchmarks.gpu.kernels --no-sanitizer --no-times --small
beside python_row checks_full 90 benchmarks.gpu.kernels --no-sanitizer --no-times --cases rings norms trees \
  --shapes $(on cuda Phi-3-mini Gemma-3-4B Llama-3-8B) $(on cpu SmolLM2-135M)
together
python_row matmuls 30 benchmarks.gpu.matmuls $(on cpu --shape tiny --rows 1 16)
TINY="--shape tiny --context 8 --batches 1 3 --rows 1 4 --repeats 1"
python_row llama_8b 100 benchmarks.gpu.llama_7b --kernels \
  $(on cuda --shape llama-3.1-8b --context 1024 --batches 1 8 32 64 --rows 1 5 16 --systems eagle3 redrafter lyanna) $(on cpu $TINY)
end
