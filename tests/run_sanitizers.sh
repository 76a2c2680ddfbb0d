#!/usr/bin/env bash
# Runs the tests of the CUDA kernels under compute-sanitizer's four tools, a share of the cases each
# (ISOBIT_TEST_SCALE), and says one line for each tool and test. Needs a GPU.
#
#   tests/run_sanitizers.sh build/cuda [TOOL...]
set -euo pipefail

build=$1
shift
tools=("$@")
((${#tools[@]} > 0)) || tools=(memcheck racecheck synccheck initcheck)
export ISOBIT_TEST_SCALE=${ISOBIT_TEST_SCALE:-0.01}
command -v compute-sanitizer >/dev/null || {
  echo 'run_sanitizers: compute-sanitizer is not on PATH; it comes with the CUDA toolkit' >&2
  exit 1
}
logs=$build/sanitizers
rm -rf "$logs"
mkdir -p "$logs"

# A test provokes an error of the API, memory that is not there: that is no finding.
options_memcheck=(--report-api-errors no)
# racecheck does not see that a bulk copy has completed on an mbarrier: it reports the pipelines of
# cuBLAS's own kernels as well as ours. What those copies fill is left out.
options_racecheck=(--racecheck-memcpy-async no)
options_synccheck=()
options_initcheck=()

# sanitize TOOL TEST: the tool's findings and the test's output go to a log that ends with the exit
# code: 99 for findings, 1 for a test that failed.
sanitize() {
  local log=$logs/$1.$(basename "$2").log code=0
  local -n options=options_$1
  compute-sanitizer --tool "$1" --error-exitcode 99 "${options[@]}" "$2" --gtest_brief=1 \
    >"$log" 2>&1 || code=$?
  echo "exit $code after $SECONDS s" >>"$log"
}

status=0
for tool in "${tools[@]}"; do
  SECONDS=0
  for test in "$build"/tests/kernels/cuda/*_test; do
    # The one runs nothing on the GPU, the other, beyond what the rest run, cuBLAS alone.
    [[ $test == */linear_schedule_test || $test == */linear_accuracy_test ]] ||
      sanitize "$tool" "$test" &
  done
  wait
  for log in "$logs/$tool".*.log; do
    outcome=clean
    # A test whose cases all skipped has shown nothing.
    grep -q 'PASSED  \] [1-9]' "$log" && grep -q '^exit 0 ' "$log" || outcome=FAILED
    [[ $outcome == clean ]] || status=1
    printf '%-48s %s, %s; %s\n' "${log#"$logs/"}" "$outcome" "$(tail -n 1 "$log")" \
      "$(grep 'SUMMARY' "$log" | tail -n 1 || true)"
  done
done
echo "logs: $logs"
exit "$status"
