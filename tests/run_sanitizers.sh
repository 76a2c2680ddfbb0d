#!/usr/bin/env bash
# Runs the tests of the CUDA kernels under compute-sanitizer's tools, one tool after the other. Each
# test case is a process of its own, several at a time on each GPU, with a share of its random inputs
# (ISOBIT_TEST_SCALE) and a time limit (ISOBIT_SANITIZER_SECONDS). Prints a table at the end. Fails if
# a case has findings, fails or does not end, or if no case of a test has run. Uses all GPUs, or those
# of CUDA_VISIBLE_DEVICES. ISOBIT_SANITIZER_CASES is a regular expression for the cases to run, such
# as '^cuda_linear_test LinearTest.Tiles'.
#
#   tests/run_sanitizers.sh build/cuda [TOOL...]
set -euo pipefail

build=$1
shift
tools=("$@")
((${#tools[@]} > 0)) || tools=(memcheck racecheck synccheck initcheck)
command -v compute-sanitizer >/dev/null || {
  echo 'run_sanitizers: compute-sanitizer is not on PATH; it comes with the CUDA toolkit' >&2
  exit 1
}
export logs=$build/sanitizers
rm -rf "$logs"
mkdir -p "$logs"

if [[ -n ${CUDA_VISIBLE_DEVICES-} ]]; then
  export gpus=${CUDA_VISIBLE_DEVICES//,/ }
else
  gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader | tr '\n' ' ')
  export gpus
fi
num_gpus=$(wc -w <<<"$gpus")
jobs=$((num_gpus * 4))
((jobs <= $(nproc))) || jobs=$(nproc)

# cases_of TEST: the names of its cases, one a line.
cases_of() {
  "$1" --gtest_list_tests | awk '/^[^ ]/ { suite = $1 } /^ / && !/DISABLED_/ { print suite $1 }'
}

tests=()
cases=() # TEST CASE
for test in "$build"/tests/kernels/cuda/{,*/}*_test; do
  # Some run nothing on the GPU; one runs only cuBLAS beyond what the others run.
  [[ $test != *_schedule_test && $test != */linear_accuracy_test ]] || continue
  num_cases=${#cases[@]}
  while read -r name; do
    [[ ! "${test##*/} $name" =~ ${ISOBIT_SANITIZER_CASES-} ]] || cases+=("$test $name")
  done < <(cases_of "$test")
  ((${#cases[@]} == num_cases)) || tests+=("$test")
done
((${#cases[@]} > 0)) || {
  echo 'run_sanitizers: there is no such case' >&2
  exit 1
}

# Runs TOOL on CASE of TEST: findings and output go to a log, the outcome to a file beside it.
sanitize() {
  local tool=$1 test=$2 case=$3 share=0.01 code=0 errors outcome=clean begin=$SECONDS
  local log=$logs/$tool.${test##*/}.${case//\//-} tool_options=() devices
  # How many barriers of a block the tools can track. By default they count the declared ones, and
  # miss ours, which are in dynamic shared memory.
  local barriers=(--num-cuda-barriers 256)
  case $tool in
    # A test provokes an API error on purpose, by asking for too much memory: not a finding.
    memcheck) tool_options=(--report-api-errors no) ;;
    # racecheck reported the pipelines of cuBLAS's own kernels as well as ours, though bulk copies
    # complete on mbarriers: what they fill is left out. It is ten times as slow as the others. Of the
    # clusters of linear layers some do not end under it (docs/benchmarks/determinism.md).
    racecheck)
      tool_options=(--racecheck-memcpy-async no "${barriers[@]}") share=0.003
      export ISOBIT_TEST_WITHOUT_CLUSTERS=1
      ;;
    synccheck) tool_options=("${barriers[@]}") ;;
  esac
  read -ra devices <<<"$gpus"
  CUDA_VISIBLE_DEVICES=${devices[slot % ${#devices[@]}]} ISOBIT_TEST_SHARED_GPU=1 \
    ISOBIT_TEST_SCALE=${ISOBIT_TEST_SCALE:-$share} timeout -k 10 "${ISOBIT_SANITIZER_SECONDS:-300}" \
    compute-sanitizer --tool "$tool" --error-exitcode 99 --print-limit 20 "${tool_options[@]}" \
    "$test" --gtest_brief=1 --gtest_filter="$case" >"$log.log" 2>&1 || code=$?
  errors=$(sed -n 's/.* SUMMARY: \([0-9]*\) .*/\1/p' "$log.log" | tail -n 1)
  if ((code == 124 || code == 137)); then
    outcome=UNFINISHED
  elif [[ -n $errors && $errors != 0 ]]; then
    outcome="$errors FOUND"
  elif grep -q 'before first instrumented API call' "$log.log" && grep -q 'PASSED  \] 1 ' "$log.log"; then
    outcome=host # nothing of it runs on the GPU
  elif ((code != 0)) || [[ -z $errors ]]; then
    outcome="FAILED, exit $code"
  elif ! grep -q 'PASSED  \] 1 ' "$log.log"; then
    outcome=skipped
  fi
  echo "$outcome" >"$log.outcome"
  echo "$tool ${test##*/} $case: $outcome, $((SECONDS - begin)) s"
}
export -f sanitize

for tool in "${tools[@]}"; do
  printf "$tool %s\n" "${cases[@]}" | xargs --max-args=3 --max-procs="$jobs" --process-slot-var=slot \
    bash -c 'sanitize "$@"' sanitize
done

# of_test TOOL TEST: one cell of the table: the test's first bad outcome, if any.
of_test() {
  local outcomes bad clean
  outcomes=$(cat "$logs/$1.${2##*/}".*.outcome)
  bad=$(grep -vxE 'clean|skipped|host' <<<"$outcomes" || true)
  clean=$(grep -cx clean <<<"$outcomes" || true)
  if [[ -n $bad ]]; then
    echo "$(wc -l <<<"$bad") x ${bad%%$'\n'*}"
  elif ((clean == 0)); then
    echo 'NOTHING RUN'
  else
    echo "clean, $clean cases"
  fi
}

echo
status=0
printf '%-32s' test
printf '%-22s' "${tools[@]}"
echo
for test in "${tests[@]}"; do
  printf '%-32s' "${test##*/}"
  for tool in "${tools[@]}"; do
    cell=$(of_test "$tool" "$test")
    [[ $cell == clean* ]] || status=1
    printf '%-22s' "$cell"
  done
  echo
done
echo "logs: $logs"
exit "$status"
