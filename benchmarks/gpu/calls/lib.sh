# What the calls share. A call sources it from the repository's root, after it has set CALL to its name; with RESUME, rows
# that were ok in an earlier call are left out.
#
#   DEVICE=cpu   the same commands at the sizes of a CPU, to try a call before it costs GPU time
#   DRY=1        print the commands and run none
#   OUT=FOLDER   where results and the call's whole output go (default: artifacts/gpu/calls/CALL)

set -uo pipefail
: "${CALL:?} ${DEVICE:=cuda} ${DRY:=} ${RESUME:=} ${OUT:=artifacts/gpu/calls/$CALL} ${SCRATCH:=/tmp/redraft-kit}"
KIT=.kit/$CALL
PATIENCE=$([ "$DEVICE" = cpu ] && echo 20 || echo 1)
mkdir -p "$OUT" "$SCRATCH"
VERDICTS=$(mktemp)
trap 'rm -f "$VERDICTS"' EXIT
# The scratch folder outlives a call, so that the second half of a file finds the first.
export PYTHONPATH="$SCRATCH/site:$PWD" PATH="$PWD/.venv/bin:$PATH:/usr/local/cuda/bin" PYTHONUNBUFFERED=1 REDRAFT_ANY_GPU=1
[ "$DEVICE" = cpu ] && export CUDA_VISIBLE_DEVICES=
[ -n "$DRY" ] || exec > >(tee "$OUT/$CALL.log") 2>&1

# gpu ARGUMENTS, or cpu ARGUMENTS: these arguments on that device only.
on() { [ "$DEVICE" = "$1" ] && echo "${@:2}"; }

# say WORDS ...: a line of words, those with spaces in quotes.
say() { local word line=; for word; do [[ $word == *\ * ]] && line+=" \"$word\"" || line+=" $word"; done; echo "${line# }"; }

# row NAME SECONDS COMMAND ...: run a command within its time. The next row begins whatever came of it.
row() {
  local name=$1 limit=$2 begun=$SECONDS status=0
  shift 2
  if [ -n "$DRY" ]; then say "$@"; return; fi
  if [ -n "$RESUME" ] && [ -e "$OUT/$name.ok" ]; then echo "$name: ok before" >> "$VERDICTS"; return; fi
  echo "== $name, at most $((limit * PATIENCE)) s: $*"
  timeout --kill-after=5 $((limit * PATIENCE)) "$@" || status=$?
  echo "$name: $([ $status = 0 ] && echo ok || { [ $status = 124 ] && echo timed out || echo "failed ($status)"; }), $((SECONDS - begun)) s" >> "$VERDICTS"
  return $status
}

# python_row NAME SECONDS MODULE ARGUMENTS ...: a script of ours that writes OUT/NAME.json.
python_row() {
  local name=$1 limit=$2 module=$3
  shift 3
  row "$name" "$limit" python3 -m "$module" --device "$DEVICE" --output "$OUT/$name.json" "$@"
}

# beside ROW ...: begin a row that measures nothing beside the next ones; together: wait for these.
BESIDE=()
beside() { "$@" & BESIDE+=($!); }
together() { wait "${BESIDE[@]}"; }

# architecture: this GPU's, such as sm_90, which is also the one that is listed without a GPU.
architecture() { nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sed -n '1s/\.//;1s/^/sm_/p' | grep . || echo sm_90; }

# profilers: whether ncu and compute-sanitizer are there and reach the GPU: under gVisor, whose kernel says 4.4.0, they do not.
profilers() { [ -n "$DRY" ] || { [ "$(uname -r)" != 4.4.0 ] && command -v ncu > /dev/null && command -v compute-sanitizer > /dev/null; }; }
METRICS=gpu__time_duration.sum,dram__bytes.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed,sm__throughput.avg.pct_of_peak_sustained_elapsed,sm__warps_active.avg.pct_of_peak_sustained_active,launch__registers_per_thread

# second_half_of PATTERN: the name of the file whose second half is in this call's folder.
second_half_of() { basename "$(find "$KIT" -name "$1.part2" 2>/dev/null | head -n 1)" .part2; }

# join FILE PART ...: put a file together again from its parts.
join() {
  [ -n "$DRY" ] && return
  cat "${@:2}" > "$1" || { echo "a part of $1 is missing: run the call before this one on the same machine"; exit 1; }
}

# use_kernels FOLDER: load the kit's kernels instead of a minute of nvcc. Every call does: what git does not ignore, as these
# copies, may be gone when the tree is sent again.
use_kernels() { [ "$DEVICE" = cpu ] || row kernels 5 bash -c "mkdir -p plugins/compiled && cp '$1'/*.{ptx,cubin} plugins/compiled/"; }

# end: say what came of each row; the call fails where one did.
end() {
  [ -n "$DRY" ] && return
  echo "== call $CALL"
  cat "$VERDICTS"
  ! grep -qE "failed|timed out" "$VERDICTS"
}
