#!/usr/bin/env bash
# Runs the tests of one build directory and ends with a line of counts.
#
#   tests/run_tests.sh build/release [arguments of ctest, such as --preset check or -R forward_test]
set -euo pipefail

build=$1
shift
results=$build/test-results
rm -rf "$results"
mkdir -p "$results"

# ThreadSanitizer's memory map does not fit every kernel's address randomisation, so this switches
# randomisation off if it may.
launcher=()
if setarch --addr-no-randomize true 2>/dev/null; then
  launcher=(setarch --addr-no-randomize)
fi

status=0
"${launcher[@]}" ctest --test-dir "$build" --parallel "$(nproc)" --output-on-failure \
  --no-tests=error --output-junit test-results/ctest.xml "$@" </dev/null || status=$?
python3 "$(dirname "$0")/count_results.py" "$results"
exit "$status"
