#!/usr/bin/env bash
# Runs the tests of the CUDA kernels under compute-sanitizer's four tools, a share of the cases each
# (ISOBIT_TEST_SCALE), and ends with one line for each tool and test. Needs a GPU.
#
#   tests/run_sanitizers.sh build/cuda [NAME_OF_TEST...]
set -euo pipefail

build=$1
shift
export ISOBIT_TEST_SCALE=${ISOBIT_TEST_SCALE:-0.02}
command -v compute-sanitizer >/dev/null || {
  echo 'run_sanitizers: compute-sanitizer is not on PATH; it comes with the CUDA toolkit' >&2
  exit 1
}
tests=("$@")
if ((${#tests[@]} == 0)); then
  mapfile -t tests < <(cd "$build/tests/kernels/cuda" && find . -maxdepth 1 -type f -executable | sort)
fi

logs=$build/sanitizers
mkdir -p "$logs"
status=0
for tool in memcheck racecheck synccheck initcheck; do
  for test in "${tests[@]}"; do
    name=$(basename "$test")
    log=$logs/$tool.$name.log
    outcome=clean
    # A test that fails, a finding, or nothing run at all: each is an error.
    compute-sanitizer --tool "$tool" --error-exitcode 99 "$build/tests/kernels/cuda/$name" \
      --gtest_brief=1 >"$log" 2>&1 || outcome="FAILED (exit $?)"
    grep -q 'PASSED  \] [1-9]' "$log" || outcome="${outcome/clean/FAILED: ran nothing}"
    [[ $outcome == clean ]] || status=1
    printf '%-10s %-28s %s; %s\n' "$tool" "$name" "$outcome" "$(grep 'SUMMARY' "$log" | tail -n 1 || true)"
  done
done
echo "logs: $logs"
exit "$status"
