#!/usr/bin/env bash
# Builds for the GPU of this machine, tests there, looks for bad accesses and races, and times, all
# within 8 minutes and without a network. Each stage has its own time limit, so that a stage that
# hangs costs its own result only.
#
#   bench/device_check.sh [OUT]              a machine with a GPU, nvcc, torch, scikit-build-core,
#                                            pybind11, scikit-learn, pytest
#   bench/device_check.sh --emulated [OUT]   the host's kernels in the GPU's place: tries the script
set -uo pipefail
cd "$(dirname "$0")/.."
emulated=
if [ "${1:-}" = --emulated ]; then
  emulated=--emulated
  shift
fi
OUT=${1:-${OUT:-build/device_check}}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
summary=$OUT/summary.txt
: >"$summary"
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
started=$SECONDS

stage() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2 begun=$SECONDS
  shift 2
  timeout --kill-after=5 "$limit" "$@" >"$OUT/$name.log" 2>&1
  local status=$?
  local verdict="failed ($status)"
  [ $status = 0 ] && verdict=ok
  [ $status = 124 ] && verdict="stopped after $limit s"
  printf '%-12s %-22s %4d s\n' "$name" "$verdict" $((SECONDS - begun)) | tee -a "$summary"
  return $status
}

site=$OUT/site
rm -rf "$site"
if [ -n "$emulated" ]; then
  # More threads only wait for each other on the small arrays.
  export NORMALIGN_CUDA=OFF NORMALIGN_EMU=ON OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
else
  architecture=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
  export NORMALIGN_CUDA=ON NORMALIGN_CUDA_ARCHITECTURES=$architecture NORMALIGN_EMU=OFF
  nvidia-smi --query-gpu=name,driver_version,clocks.sm,memory.total --format=csv,noheader |
    tee -a "$summary"
fi
if ! stage build "${BUILD_SECONDS:-150}" "$PYTHON" -m pip install --no-build-isolation --no-deps --no-index \
  --target "$site" .; then
  tail -30 "$OUT/build.log"
  exit 1
fi
# From here on the installed package is used: the tests are named, the source tree is not on the path.
root=$PWD
export PYTHONPATH=$site
cd "$OUT"
stage info 30 "$PYTHON" -m normalign info && cat "$OUT/info.log"

tests=("$root"/tests/test_gpu_*.py "$root/tests/test_graph.py")
run_tests=("$PYTHON" -m pytest -q -p no:cacheprovider --rootdir "$root" -c "$root/pyproject.toml")
stage tests "${TEST_SECONDS:-120}" "${run_tests[@]}" "${tests[@]}"
tail -3 "$OUT/tests.log"

stage times 150 "$PYTHON" "$root/bench/device_check.py" --out "$OUT" --seconds 110 $emulated
[ -f "$OUT/device_check.md" ] && cat "$OUT/device_check.md"

if [ -z "$emulated" ] && command -v compute-sanitizer >/dev/null; then
  # A short list: one kernel of each kind, at a size with edges.
  some='test_zero_rows_and_nan_rows or test_launches or test_symmetric_gram or
        (test_every_shape and 13 and 300) or test_empty_input or test_near_pairs_lose_no_digits or
        (test_follows_the_definition and margin) or (test_sizes and 7-257) or test_ignored_classes or
        test_a_batch_of_machines or test_failures_in_the_middle_of_a_batch or test_joint_of_squares'
  for tool in memcheck racecheck; do
    left=$((470 - (SECONDS - started)))
    [ $left -gt 20 ] || break
    stage "$tool" $((left < 60 ? left : 60)) compute-sanitizer --tool "$tool" --error-exitcode 9 \
      "${run_tests[@]}" -x -k "${some//$'\n'/ }" "${tests[@]}"
    grep -E "ERROR SUMMARY|RACECHECK SUMMARY" "$OUT/$tool.log"
  done
fi
echo "all stages: $((SECONDS - started)) s" | tee -a "$summary"
if grep -qE "failed|stopped" "$summary"; then exit 1; fi
