"""Counts the test cases that passed, failed and were skipped in the given results directories, and
shows what the failed ones printed last.

tests/run_tests.sh leaves such a directory: ctest.xml from ctest, and NAME.xml from each GoogleTest program
that did not crash. A GoogleTest program counts by its cases, any other test as one.
"""

import argparse
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path


def gtest_outcomes(path: Path) -> Counter:
    """Outcomes of the cases of one GoogleTest program."""
    outcomes = Counter()
    for case in ElementTree.parse(path).iter("testcase"):
        if case.find("failure") is not None:
            outcomes["failed"] += 1
        elif case.get("result") == "completed":
            outcomes["passed"] += 1
        else:
            outcomes["skipped"] += 1
    return outcomes


def outcomes_of(results: Path) -> Counter:
    """Outcomes of one results directory; none if no test ran."""
    outcomes = Counter()
    if not (results / "ctest.xml").is_file():
        return outcomes
    for test in ElementTree.parse(results / "ctest.xml").iter("testcase"):
        status = {"run": "passed", "fail": "failed"}.get(test.get("status"), "skipped")
        cases = results / f"{test.get('name')}.xml"
        counted = gtest_outcomes(cases) if cases.is_file() else Counter()
        # A program can fail outside its cases: by a crash, a leak or a timeout.
        if not counted or (status == "failed" and not counted["failed"]):
            counted[status] += 1
        outcomes.update(counted)
    return outcomes


def failures_of(results: Path, num_lines: int) -> Iterator[str]:
    """For each failed test of one results directory: its name and the last lines of its output."""
    if not (results / "ctest.xml").is_file():
        return
    for test in ElementTree.parse(results / "ctest.xml").iter("testcase"):
        if test.get("status") == "fail":
            output = test.findtext("system-out", "").rstrip().splitlines()
            yield "\n  ".join([f"FAILED: {results.parent}: {test.get('name')}", *output[-num_lines:]])


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts test cases by outcome.")
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--untested", type=int, default=0, help="failures that left no result")
    parser.add_argument("--failures", type=int, default=0, metavar="LINES", help="of each failed test")
    arguments = parser.parse_args()
    if arguments.failures:
        for results in arguments.results:
            for failure in failures_of(results, arguments.failures):
                print(failure)
    outcomes = Counter(failed=arguments.untested)
    for results in arguments.results:
        outcomes.update(outcomes_of(results))
    print(", ".join(f"{outcomes[name]} {name}" for name in ("passed", "failed", "skipped")))


if __name__ == "__main__":
    main()
