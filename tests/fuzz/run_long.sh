#!/usr/bin/env bash
# Runs each fuzzing target of a build of the preset fuzz on INPUTS inputs, one target on each core, and
# prints each target's result. Fails if a target crashes, hangs or takes over 256 MB; the input is then
# in BUILD/tests/fuzz/found.
#
#   tests/fuzz/run_long.sh build/fuzz INPUTS [TARGET...]
set -euo pipefail
cd "$(dirname "$0")/../.."

export build=$1 inputs=$2
shift 2
targets=("$@")
((${#targets[@]} > 0)) || mapfile -t targets < <(cd "$build/tests/fuzz" && printf '%s\n' *_fuzz)

run_target() {
  local found=$build/tests/fuzz/found/$1 log=$build/tests/fuzz/$1.log
  mkdir -p "$found"
  local result=ok
  ASAN_OPTIONS=quarantine_size_mb=16 "$build/tests/fuzz/$1" -runs="$inputs" -max_len=65536 -timeout=10 \
    -rss_limit_mb=256 -print_final_stats=1 -artifact_prefix="$found/" "$found" "tests/fuzz/corpus/$1" \
    >"$log" 2>&1 || result=FAILED
  printf '%-24s %-6s %s\n' "$1" "$result" \
    "$(awk '/number_of_executed_units|peak_rss_mb|slowest_unit/ { printf "%s %s  ", $1, $2 }' "$log")"
  [[ $result == ok ]]
}
export -f run_target
printf '%s\n' "${targets[@]}" | xargs -P "$(nproc)" -I{} bash -c 'run_target {}'
