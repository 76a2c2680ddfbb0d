#!/usr/bin/env bash
# Runs the tests of the CUDA kernels under compute-sanitizer's tools: one tool after the other, the
# tests side by side, each a share of its cases (ISOBIT_TEST_SCALE) and no longer than its time
# (ISOBIT_SANITIZER_SECONDS for each). Ends with a table. Fails if a test has findings, has failed,
# has run nothing, or has not ended. Needs a GPU.
#
#   tests/run_sanitizers.sh build/cuda [TOOL...]
set -euo pipefail

build=$1
shift
tools=("$@")
((${#tools[@]} > 0)) || tools=(memcheck racecheck synccheck initcheck)
seconds=${ISOBIT_SANITIZER_SECONDS:-300}
command -v compute-sanitizer >/dev/null || {
  echo 'run_sanitizers: compute-sanitizer is not on PATH; it comes with the CUDA toolkit' >&2
  exit 1
}
logs=$build/sanitizers
rm -rf "$logs"
mkdir -p "$logs"

tests=()
for test in "$build"/tests/kernels/cuda/*_test; do
  # The one runs nothing on the GPU, the other, beyond what the rest run, cuBLAS alone.
  [[ $test == */linear_schedule_test || $test == */linear_accuracy_test ]] || tests+=("$test")
done

# Barriers of a block that the tools make room for: left to themselves they count those that are
# declared, and lose track of ours, which lie in dynamic shared memory.
barriers='--num-cuda-barriers 256'
declare -A options=(
  # A test provokes an error of the API, memory that is not there: that is no finding.
  [memcheck]='--report-api-errors no'
  # racecheck reported the pipelines of cuBLAS's own kernels as well as ours, though bulk copies
  # complete on mbarriers: what they fill is left out.
  [racecheck]="--racecheck-memcpy-async no $barriers"
  [synccheck]="$barriers"
)

# sanitize TOOL TEST: the tool's findings and the test's output go to a log, what came of it to a
# file beside it.
sanitize() {
  local name log tool_options share=0.01 code=0 errors outcome=clean begin=$SECONDS
  name=$(basename "$2")
  log=$logs/$1.$name
  read -ra tool_options <<<"${options[$1]-}"
  [[ $1 != racecheck ]] || share=0.003 # ten times as slow as the others
  ISOBIT_TEST_SCALE=${ISOBIT_TEST_SCALE:-$share} timeout -k 10 "$seconds" \
    compute-sanitizer --tool "$1" --error-exitcode 99 --print-limit 20 "${tool_options[@]}" \
    "$2" --gtest_brief=1 >"$log.log" 2>&1 || code=$?
  errors=$(sed -n 's/.* SUMMARY: \([0-9]*\) .*/\1/p' "$log.log" | tail -n 1)
  if ((code == 124 || code == 137)); then
    outcome=UNFINISHED
  elif [[ -n $errors && $errors != 0 ]]; then
    outcome="$errors FOUND"
  elif ((code != 0)) || [[ -z $errors ]]; then
    outcome="FAILED, exit $code"
  elif ! grep -q 'PASSED  \] [1-9]' "$log.log"; then
    outcome='NOTHING RUN' # all its cases were skipped
  fi
  echo "$outcome, $((SECONDS - begin)) s" | tee "$log.outcome" | sed "s/^/$1 $name: /"
}

status=0
for tool in "${tools[@]}"; do
  for test in "${tests[@]}"; do sanitize "$tool" "$test" & done
  wait
done

echo
printf '%-26s' test
printf '%-20s' "${tools[@]}"
echo
for test in "${tests[@]}"; do
  name=$(basename "$test")
  printf '%-26s' "$name"
  for tool in "${tools[@]}"; do
    outcome=$(<"$logs/$tool.$name.outcome")
    [[ $outcome == clean* ]] || status=1
    printf '%-20s' "$outcome"
  done
  echo
done
echo "logs: $logs"
exit "$status"
