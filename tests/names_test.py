"""Holds names to the glossary (docs/glossary.md, "Words with one meaning"): words that no name has, or only
names of one folder or beside certain words.

A name is what the code of C++, CUDA, protobuf and Python calls something, except a local variable of one word
and the sentence that names a test. REMAINING lists the names that break a rule today, each with the number of
files that have it. It may only shrink: rename, then correct or remove the line.
"""

import re
import tempfile
import unittest
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("bench", "common", "deploy", "kernels", "proto", "python", "rollout", "tests", "tools",
           "trainer_bridge")  # fmt: skip
SUFFIXES = {".h", ".cc", ".cu", ".cuh", ".inc", ".proto", ".py"}

# By word: whether a name with it, in this file and beside these other words, breaks the rule.
Rule = Callable[[str, set[str]], bool]
RULES: dict[str, Rule] = {
    "face": lambda file, others: True,
    "front": lambda file, others: True,
    "meeting": lambda file, others: True,
    "part": lambda file, others: True,
    "place": lambda file, others: True,
    # A slot of a ring buffer, in the kernels of GPUs.
    "stage": lambda file, others: "kernels/cuda/" not in file,
    # Ranks, samples or windows; not heads per KV head, row blocks, octets, bands, strips.
    "group": lambda file, others: bool(others & {"column", "head", "kv", "query", "row", "strip", "tile"}),
}
FORMS = {"staged": "stage", "staging": "stage", "grouped": "group"}

# Names of the standard library and of a company, and an English idiom.
NOT_OURS = re.compile(r"\b(push|pop|emplace)_front\b|HuggingFace|InPlace|\bin_place\b|\bPUT_IN_PLACE\b")
GUARD = re.compile(r"\bISOBIT_\w+_H_\b")
TEST_NAME = re.compile(r"\b(?:TYPED_)?TEST(?:_[FP])?\([^()]*\)|\btest_\w+|\b\w+Test\b")
TEXT = {
    True: re.compile(r'"""(?:.*?)"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*', re.DOTALL),
    False: re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL),
}
# Of the names that Abseil and protobuf make of ours.
PREFIX = re.compile(r"^(FLAGS|add|clear|has|mutable|set)_(?=[a-z])")
NAME = re.compile(r"\b[A-Za-z_]\w*\b")
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

REMAINING = {
    "AddPart": 1,
    "CallFace": 1,
    "CommonPart": 3,
    "DevicePart": 4,
    "DevicePlaceOf": 5,
    "DitherPart": 1,
    "FetchPart": 1,
    "FindPlace": 1,
    "Front": 4,
    "HeadGroup": 3,
    "HeadGroups": 3,
    "ISOBIT_FRONT_PYTHON": 1,
    "LeavePlace": 2,
    "NonfinitePlace": 2,
    "PackStaged": 3,
    "Part": 4,
    "PartEnd": 1,
    "PartOf": 3,
    "PartOfStep": 1,
    "PartOfTensor": 10,
    "PartsOf": 1,
    "Place": 11,
    "PlaceFlags": 3,
    "PlaceOf": 3,
    "PlaceOfProcess": 4,
    "PlaceRows": 1,
    "Places": 1,
    "PrintFrontCost": 1,
    "ProcessPlace": 5,
    "RandomParts": 3,
    "StageWeights": 3,
    "StagedSlice": 3,
    "StagingOf": 3,
    "StartFace": 1,
    "StepPart": 4,
    "TakePart": 1,
    "TakePlace": 2,
    "ThroughFront": 1,
    "TiledParts": 2,
    "WithoutFront": 1,
    "column_parts": 2,
    "compared_place": 2,
    "face_": 1,
    "first_place": 2,
    "first_place_": 2,
    "groups_of_row": 2,
    "heads_of_group": 2,
    "kDevicePartNames": 2,
    "kMaxParts": 8,
    "kParts": 3,
    "kStage": 1,
    "kStagedValues": 1,
    "kStepPartNames": 3,
    "kv_groups": 2,
    "part_": 2,
    "part_rows": 11,
    "parts_": 3,
    "place_": 2,
    "place_of": 1,
    "places_": 4,
    "query_groups": 2,
    "row_parts": 2,
    "stage_micros": 5,
    "staged_": 1,
    "vllm_face": 3,
}


def words_of(name: str) -> set[str]:
    """The words of a name in CamelCase or snake_case, in lower case and singular."""
    words = (word.lower() for word in WORD.findall(name))
    return {FORMS.get(word, word.removesuffix("s")) for word in words}


def names_in(text: str, is_python: bool) -> set[str]:
    """The names in a source, without comments, strings, and what is exempt."""
    for pattern in (TEXT[is_python], GUARD, TEST_NAME, NOT_OURS):
        text = pattern.sub(" ", text)
    names = {PREFIX.sub("", name) for name in NAME.findall(text)}
    return {name for name in names if not re.fullmatch("[a-z]+", name)}


def breaches(root: Path) -> dict[str, int]:
    """The names that break a rule, each with the number of files that have it."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in (path for folder in FOLDERS for path in (root / folder).rglob("*")):
        file = path.relative_to(root).as_posix()
        if path.suffix not in SUFFIXES or "_pb2" in path.name or "build" in path.parts:
            continue
        for name in names_in(path.read_text("utf-8"), path.suffix == ".py"):
            words = words_of(name)
            if any(RULES[word](file, words - {word}) for word in words & RULES.keys()):
                found[name].add(file)
    return {name: len(files) for name, files in sorted(found.items())}


class RepositoryTest(unittest.TestCase):
    def test_names_keep_to_the_glossary(self):
        found = breaches(ROOT)
        more = {name: count for name, count in found.items() if count > REMAINING.get(name, 0)}
        self.assertEqual(more, {}, "names that docs/glossary.md has other words for")
        self.assertEqual(sorted(REMAINING.keys() - found.keys()), [], "renamed: remove them from REMAINING")


class ControlTest(unittest.TestCase):
    """Every rule finds a violation of it, and only that."""

    def found(self, file: str, text: str) -> list[str]:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / file
            path.parent.mkdir(parents=True)
            path.write_text(text)
            return list(breaches(Path(scratch)))

    def test_violations_are_found(self):
        cases = {
            "face": "StartFace",
            "front": "ThroughFront",
            "meeting": "MeetingPoint",
            "part": "kMaxParts",
            "place": "PlaceOfProcess",
            "stage": "StageWeights",
            "group": "groups_of_row",
        }
        self.assertEqual(cases.keys(), RULES.keys())
        for name in (*cases.values(), "LOCAL_PARTS", "part_", "_places", "StagedSlice", "HeadGroups"):
            with self.subTest(name=name):
                self.assertEqual(self.found("rollout/a.cc", f"  auto x = {name}(1);\n"), [name])
                self.assertEqual(self.found("python/a.py", f"def {name}(): pass\n"), [name])

    def test_what_is_allowed_is_let_through(self):
        text = """// StartFace: a comment. "kMaxParts"
#ifndef ISOBIT_TRAINER_BRIDGE_FRONT_OPS_H_
TEST_F(APlaceTest, EveryPartOfTheKeyCounts) { const auto part = queue.front(); list.pop_front(); }
Log("a StagedSlice"); RankGroup group; PartyPlacement party; AddInPlace(HuggingFaceOrder());
"""
        self.assertEqual(self.found("common/a.cc", text), [])
        self.assertEqual(self.found("kernels/cuda/linear/a.cu", "constexpr int kStages = 4;\n"), [])
        text = '"""PartOf."""\n# PARTS\ndef test_a_place(): part = "kMaxParts"\nclass AFrontTest: pass\n'
        self.assertEqual(self.found("python/a.py", text), [])


if __name__ == "__main__":
    unittest.main()
