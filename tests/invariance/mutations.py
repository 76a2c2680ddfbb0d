"""Do the tests of bits see an error? Alters contract, CPU backend, pages and guesses, one error at a time.

    python tests/invariance/mutations.py [--scratch DIR] [--jobs N] [NAME...]

All errors are compiled into one build, each behind a switch that the environment sets: a run takes a build of
some minutes, then seconds for each error. It prints a table: how many logits of the tiny models and of the
witnesses (tiny_models.h) changed, and which tests failed. Exit status 1: an error that no test saw. Not part
of `make test`; run it when a golden test, a witness or the contract changes. Needs numpy.
"""

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = "kernels/contract/"
CPU = "kernels/cpu/"
ENGINE = "rollout/engine/"
GUESSES = "rollout/guesses/"
SCHEDULE = "rollout/schedule/"
ROWS = CPU + "row_kernels.inc"
TESTS = (
    "golden_test",
    "exp_log_test",
    "log_prob_test",
    "row_functions_test",
    "noise_test",
    "fingerprint_test",
    "rope_test",
    "prefix_sharing_test",
    "engine_sharing_test",
    "prefix_bits_test",
    "drafters_test",
    "fast_path_test",
    "speculation_test",
    "speculation_soak_test",
    "block_list_test",
    "engine_slots_test",
    "guessed_slots_test",
    "scorer_slots_test",
)
SWITCH = """// Which error is switched on; included into every source.
#pragma once
#include <cstdlib>
namespace isobit { inline const int kMutant = std::getenv("MUTANT") ? std::atoi(std::getenv("MUTANT")) : 0; }
"""


@dataclass(frozen=True)
class Mutation:
    """Replaces texts of a file; where the new text says MUTANT, the switch is true."""

    name: str
    file: str
    edits: tuple[tuple[str, str], ...]


def edit(name: str, file: str, *edits: tuple[str, str]) -> Mutation:
    return Mutation(name, file, edits)


def choice(name: str, file: str, old: str, new: str) -> Mutation:
    """Another expression."""
    return edit(name, file, (old, f"(MUTANT ? ({new}) : ({old}))"))


MUTATIONS = (
    edit(
        "leaves: units of 32 columns",
        CONTRACT + "constants.h",
        (
            "inline constexpr int kLeafUnit = 16;",
            "inline const int kLeafUnit = MUTANT ? 32 : 16;",
        ),
    ),
    edit(
        "leaves: o_proj in units of 16 columns",
        CONTRACT + "leaf_plan.h",
        (
            "PlanLeaves(kv_heads * columns_per_kv, columns_per_kv)",
            "PlanLeaves(kv_heads * columns_per_kv, MUTANT ? 16 : columns_per_kv)",
        ),
    ),
    edit(
        "leaves: chain for tree, tree for chain",
        CPU + "linear.cc",
        (
            "shape.sum == contract::LeafSum::kTree ?",
            "(shape.sum == contract::LeafSum::kTree) != MUTANT ?",
        ),
    ),
    edit(
        "leaves: chain for tree",
        ROWS,
        (
            "  if (kind == SegmentSum::kTree) {",
            "  if (kind == SegmentSum::kTree && !MUTANT) {",
        ),
    ),
    choice(
        "RMSNorm: halves for adjacent pairs",
        ROWS,
        "contract::Add(sums[2 * i], sums[2 * i + 1])",
        "contract::Add(sums[i], sums[i + width])",
    ),
    edit(
        "RMSNorm: a running sum for the tree",
        ROWS,
        (
            "    for (int width = kChunkLeaves / 2;",
            "    if (MUTANT) {\n"
            "      for (int i = 1; i < kChunkLeaves; ++i) sums[0] = contract::Add(sums[0], sums[i]);\n"
            "    } else for (int width = kChunkLeaves / 2;",
        ),
    ),
    choice(
        "residual: one rounding",
        CONTRACT + "row_functions.h",
        "FloatToBf16(Add(Bf16ToFloat(residual), Bf16ToFloat(delta)))",
        "FloatToBf16(Add(Bf16ToFloat(residual), Add(sum, bias)))",
    ),
    choice(
        "SwiGLU: g * (sigmoid * u)",
        CONTRACT + "row_functions.h",
        "Mul(Mul(g, Sigmoid(g)), Bf16ToFloat(up))",
        "Mul(g, Mul(Sigmoid(g), Bf16ToFloat(up)))",
    ),
    choice(
        "RoPE: multiply and subtract for fma",
        CONTRACT + "row_functions.h",
        "Fma(a, cosine, -Mul(b, sine))",
        "Sub(Mul(a, cosine), Mul(b, sine))",
    ),
    choice(
        "RoPE: angles rounded to fp32",
        CONTRACT + "rope.cc",
        "static_cast<double>(p) * static_cast<double>(frequency)",
        "static_cast<float>(p) * frequency",
    ),
    edit(
        "q_norm, k_norm: behind RoPE",
        CPU + "attention.cc",
        (
            "    if (weight != nullptr) {\n      const float inverse",
            "    const auto normalise = [&] {\n"
            "      if (weight == nullptr) return;\n      const float inverse",
        ),
        (
            "      rows.normalise(head, inverse, weight, head, head_dim);\n    }",
            "      rows.normalise(head, inverse, weight, head, head_dim);\n"
            "    };\n    if (!MUTANT) normalise();",
        ),
        (
            "    rows.rotate(head, head + head_dim / 2, cosine, sine, head_dim / 2);\n",
            "    rows.rotate(head, head + head_dim / 2, cosine, sine, head_dim / 2);\n"
            "    if (MUTANT) normalise();\n",
        ),
    ),
    edit(
        "attention: tiles of 64 keys",
        CONTRACT + "constants.h",
        (
            "ISOBIT_HD constexpr int32_t KvTile(int32_t head_dim) { return head_dim <= 128 ?",
            "ISOBIT_HD int32_t KvTile(int32_t head_dim) { return head_dim <= 128 && !MUTANT ?",
        ),
    ),
    edit(
        "attention: splits of 256 positions",
        CONTRACT + "constants.h",
        (
            "inline constexpr int kSplit = 512;",
            "inline const int kSplit = MUTANT ? 256 : 512;",
        ),
    ),
    edit(
        "attention: 4 lanes",
        ROWS,
        (
            "      sums[r] = contract::Add(sums[r], scores[j + r]);",
            "      const int lane = MUTANT ? r % 4 : r;\n"
            "      sums[lane] = contract::Add(sums[lane], scores[j + r]);",
        ),
    ),
    edit(
        "attention: alpha behind the lanes' sums",
        ROWS,
        (
            "sums[r] = contract::Mul(row->lanes[r], alpha)",
            "sums[r] = MUTANT ? 0.0f : row->lanes[r] * alpha",
        ),
        (
            "row->lanes[r] = sums[r]",
            "row->lanes[r] = MUTANT ? row->lanes[r] * alpha + sums[r] : sums[r]",
        ),
    ),
    choice(
        "attention: (s - max) * scale",
        ROWS,
        "contract::Exp2(contract::Fma(scores[j], scale, -shift))",
        "contract::Exp2(contract::Mul(contract::Sub(scores[j], max), scale))",
    ),
    edit(
        "attention: splits fold right to left",
        CPU + "attention.cc",
        (
            "  for (int64_t split = first_key / contract::kSplit * contract::kSplit; split < end;\n"
            "       split += contract::kSplit) {",
            "  const int64_t first_split = first_key / contract::kSplit * contract::kSplit;\n"
            "  const int64_t last_split = (end - 1) / contract::kSplit * contract::kSplit;\n"
            "  for (int64_t at = first_split; at < end; at += contract::kSplit) {\n"
            "    const int64_t split = MUTANT ? last_split - (at - first_split) : at;",
        ),
    ),
    choice(
        "attention: fma in the fold",
        CONTRACT + "attention.h",
        "Add(Mul(a, f.left), Mul(b, f.right))",
        "Fma(a, f.left, Mul(b, f.right))",
    ),
    choice(
        "exp2: last bit of the last coefficient",
        CONTRACT + "exp_log.h",
        "Exp2Coefficient(5)",
        "FromBits(BitsOf(Exp2Coefficient(5)) + 1u)",
    ),
    choice(
        "log: last bit of the last coefficient",
        CONTRACT + "exp_log.h",
        "-0x1.38b590p-4f",
        "-0x1.38b592p-4f",
    ),
    choice(
        "logprobs: weights of 39 bits",
        ROWS,
        "static_cast<int32_t>(contract::Mul(rest, 0x1p20f))",
        "2 * static_cast<int32_t>(contract::Mul(rest, 0x1p19f))",
    ),
    choice(
        "entropy: multiply and add for fma",
        CONTRACT + "log_prob.h",
        "Fma(Sub(a.max, max), a.sum, a.weighted_distance)",
        "Add(Mul(Sub(a.max, max), a.sum), a.weighted_distance)",
    ),
    choice("noise: u = word * 2^-32 + 2^-34", CONTRACT + "noise.h", "0x1p-33f", "0x1p-34f"),
    choice(
        "pages: reused one position too far",
        SCHEDULE + "prefix_starts.cc",
        "static_cast<int64_t>(found.pages.size()) * pages_.page_size()",
        "static_cast<int64_t>(found.pages.size()) * pages_.page_size() + (found.pages.empty() ? 0 : 1)",
    ),
    edit(
        "pages: of old weights stay",
        ENGINE + "engine_control.cc",
        ("  table_.ForgetPrefixes();", "  if (!MUTANT) table_.ForgetPrefixes();"),
    ),
    edit(
        "pages: no copy before the first write",
        SCHEDULE + "state_pool.cc",
        (
            "  if (!state.last_is_borrowed_) return true;",
            "  if (!state.last_is_borrowed_ || MUTANT) return true;",
        ),
    ),
    choice(
        "pages: no copy of a page in the cache",
        SCHEDULE + "state_pool.cc",
        "tree_.Has(last)",
        "false",
    ),
    edit(
        "pages: the step does not say that it writes what it reads",
        SCHEDULE + "prefix_starts.cc",
        (
            "step.writes_past |= !found.pages.empty()",
            "step.writes_past |= !MUTANT && !found.pages.empty()",
        ),
    ),
    edit(
        "pages: a path in use counts as old",
        SCHEDULE + "state_pool.cc",
        ("  tree_.Touch(path);", "  if (!MUTANT) tree_.Touch(path);"),
    ),
    choice(
        "pages: tokens that were never computed are found",
        SCHEDULE + "batching.cc",
        "tokens.first(std::min(computed, tokens.size()))",
        "tokens",
    ),
    edit(
        "pages: entered behind pages of others",
        SCHEDULE + "state_pool.cc",
        (
            "  if (std::equal(path.begin(), path.end(), state.begin())) {",
            "  if (std::equal(path.begin(), path.end(), state.begin()) || MUTANT) {",
        ),
    ),
    edit(
        "schedule: an empty step after a preemption",
        SCHEDULE + "batching.cc",
        ("while (step.sequences.empty() &&", "while (!MUTANT && step.sequences.empty() &&"),
    ),
    edit(
        "slots: a shared one is written",
        SCHEDULE + "state_pool.cc",
        ("!slots_.IsShared(state.slot_)", "(!slots_.IsShared(state.slot_) || MUTANT)"),
    ),
    choice(
        "slots: a snapshot one page too far",
        SCHEDULE + "state_pool.cc",
        "path[num_pages - 1]",
        "path[num_pages < 2 ? 0 : num_pages - 2]",
    ),
    edit(
        "slots: the state behind wrong guesses stays",
        SCHEDULE + "state_pool.cc",
        (
            "  if (!slots_.Serves(state.slot_row_, row)) {",
            "  if (!slots_.Serves(state.slot_row_, row) && !MUTANT) {",
        ),
    ),
    choice(
        "slots: the state behind guesses is the one to return to",
        SCHEDULE + "state_pool.cc",
        "slots.cut = state.spare_row_ = certain",
        "(state.spare_row_ = certain, slots.cut = end - 1)",
    ),
    edit(
        "slots: candidates change the state",
        SCHEDULE + "state_pool.cc",
        (".to = state.spare_}", ".to = MUTANT ? state.slot_ : state.spare_}"),
    ),
    edit(
        "slots: lost between the halves of a step",
        "kernels/blocks/step_halves.cc",
        ("if (first > s.first_row) cut_rows", "if (first > s.first_row && !MUTANT) cut_rows"),
    ),
    edit(
        "slots: a scored sequence begins from nothing",
        "trainer_bridge/scorer/packed_pass.cc",
        ("if (rest.first_position > 0) rest", "if (rest.first_position > 0 && !MUTANT) rest"),
    ),
    edit(
        "guesses: one noise for all draws of a step",
        "kernels/model/sampling.cc",
        (
            "NextRow(static_cast<uint32_t>(guesses.size()))",
            "NextRow(MUTANT ? 0 : static_cast<uint32_t>(guesses.size()))",
        ),
    ),
    choice(
        "guesses: penalties do not count them",
        "kernels/model/sampling.cc",
        "!counts_needed_ || guesses.empty()",
        "true",
    ),
    edit(
        "guesses: kept where the draw is the less likely token",
        ENGINE + "request_table.cc",
        (
            "  size_t accepted = 0;  //",
            "  if (MUTANT && !guesses.empty() && draws[0].token.logprob < -1.0f) {\n"
            "    draws[0].token.id = guesses[0];\n"
            "  }\n"
            "  size_t accepted = 0;  //",
        ),
    ),
    edit(
        "guesses: one draw too many is kept",
        ENGINE + "request_table.cc",
        (
            "draws[accepted].token.id == guesses[accepted]",
            "(MUTANT || draws[accepted].token.id == guesses[accepted])",
        ),
    ),
    edit(
        "guesses: keys of wrong ones are found by others",
        ENGINE + "request_table.cc",
        (
            "  sequence.num_draft_tokens += static_cast<uint32_t>(guesses.size());",
            "  sequence.num_draft_tokens += static_cast<uint32_t>(guesses.size());\n"
            "  if (MUTANT) sequence.num_cached += static_cast<int64_t>(guesses.size());",
        ),
        (
            "  if (guesses.empty()) return;",
            "  if (guesses.empty()) return;\n"
            "  if (MUTANT && goes_on()) sequence.num_cached = std::ssize(sequence.tokens) - 1;",
        ),
    ),
    edit(
        "guesses: pages of wrong ones are not freed",
        SCHEDULE + "state_pool.cc",
        ("while (state.size_ > needed)", "while (!MUTANT && state.size_ > needed)"),
    ),
    edit(
        "guesses: they take the pages that others need",
        SCHEDULE + "batching.cc",
        (
            "pages_.num_free() - static_cast<int64_t>(running_.size())",
            "pages_.num_free() - (MUTANT ? 0 : static_cast<int64_t>(running_.size()))",
        ),
    ),
    edit(
        "guesses: a sequence that has some is launched ahead",
        SCHEDULE + "readiness.cc",
        ("drafts ? Readiness::kAwaitsDraft", "drafts && !MUTANT ? Readiness::kAwaitsDraft"),
    ),
    edit(
        "fast path: it verifies itself",
        GUESSES + "fast_path/fast_path.cc",
        ("  if (verifies_) return {};", "  if (verifies_ && !MUTANT) return {};"),
    ),
    edit(
        "fast path: its keys are found by others",
        SCHEDULE + "batching.cc",
        (
            "std::min(sequence.num_cached, sequence.num_exact)",
            "std::min(sequence.num_cached, MUTANT ? sequence.num_cached : sequence.num_exact)",
        ),
    ),
    edit(
        "fast path: what follows a candidate is not verified",
        SCHEDULE + "readiness.cc",
        (
            "return provisional || HasCandidates(sequence)",
            "return provisional || (!MUTANT && HasCandidates(sequence))",
        ),
    ),
    edit(
        "guesses: other clients' texts",
        GUESSES + "history_store.cc",
        (
            "Use(clients_[client], HashOf(prompt))",
            'Use(clients_[MUTANT ? "" : client], HashOf(prompt))',
        ),
        (
            "Client& of_client = clients_[client];",
            'Client& of_client = clients_[MUTANT ? "" : client];',
        ),
    ),
)


def altered_files() -> dict[str, str]:
    texts: dict[str, str] = {}
    for number, mutation in enumerate(MUTATIONS, 1):
        text = texts.get(mutation.file) or (ROOT / mutation.file).read_text()
        for old, new in mutation.edits:
            if text.count(old) != 1:
                sys.exit(
                    f"{mutation.name}: {mutation.file} has {text.count(old)} times, expected once: {old}"
                )
            text = text.replace(old, new.replace("MUTANT", f"(isobit::kMutant == {number})"))
        texts[mutation.file] = text
    return texts


def write_tree(scratch: Path) -> None:
    """The sources with all errors; files that an earlier run left as they should be are not touched."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    contents = {name: (ROOT / name).read_bytes() for name in names.splitlines()}
    contents |= {name: text.encode() for name, text in altered_files().items()}
    contents["mutant.h"] = SWITCH.encode()
    for name, content in contents.items():
        target = scratch / name
        if not target.exists() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


def build(scratch: Path, jobs: int) -> None:
    environment = os.environ | {"CCACHE_BASEDIR": str(scratch), "CCACHE_NOHASHDIR": "1"}
    for command in (
        [
            "cmake",
            "--preset",
            "release",
            f"-DCMAKE_CXX_FLAGS=-w -include {scratch / 'mutant.h'}",
        ],
        [
            "cmake",
            "--build",
            "--preset",
            "release",
            "-j",
            str(jobs),
            "--target",
            *TESTS,
        ],
    ):
        done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(done.stdout + done.stderr)


def values_of(directory: Path) -> dict[str, np.ndarray]:
    return {path.name: np.fromfile(path, np.uint32) for path in directory.iterdir()}


def run(scratch: Path, number: int) -> tuple[dict[str, np.ndarray], list[str]]:
    """The logits of each model under the error of that number (0: none), and the tests that fail."""
    values = scratch / "values" / str(number)
    shutil.rmtree(values, ignore_errors=True)
    values.mkdir(parents=True)
    environment = os.environ | {"MUTANT": str(number), "GOLDEN_VALUES": str(values)}
    failed = []
    for test in TESTS:
        (program,) = (path for path in (scratch / "build/release/tests").rglob(test) if path.is_file())
        try:
            subprocess.run([program], env=environment, capture_output=True, timeout=600, check=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            failed.append(test)
    return values_of(values), failed


def changed(before: dict[str, np.ndarray], after: dict[str, np.ndarray], prefix: str) -> str:
    names = [name for name in before if name.startswith(prefix)]
    count = sum(int((before[name] != after[name]).sum()) for name in names)
    return f"{count} of {sum(before[name].size for name in names)}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="errors whose names contain one of these; none: all")
    parser.add_argument("--scratch", type=Path, default=ROOT / "build" / "mutations")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    scratch = arguments.scratch.resolve()
    write_tree(scratch)
    build(scratch, arguments.jobs)
    before, failed = run(scratch, 0)
    if failed:
        sys.exit(f"without any error {', '.join(failed)} fail")
    models = ("tiny", "witness-deep", "witness-long")
    print(f"| error | logits changed: {' | '.join(models)} | tests that fail |\n|{' --- |' * 5}")
    unseen = 0
    for number, mutation in enumerate(MUTATIONS, 1):
        if arguments.names and not any(name in mutation.name for name in arguments.names):
            continue
        after, failed = run(scratch, number)
        unseen += not failed
        counts = (changed(before, after, prefix) for prefix in models)
        print(
            f"| {mutation.name} | {' | '.join(counts)} | {', '.join(failed) or 'NONE'} |",
            flush=True,
        )
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main())
