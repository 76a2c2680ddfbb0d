"""Runs every experiment of bench/services with little work on real services, and tests their arithmetic."""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from argparse import Namespace
from collections import Counter
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench" / "services"))
import acceptance
import http_load
import machine
import one_prompt
import rl_step
import soak
import unique_outputs
from divergence import Divergence, distinct, first_difference, measure
from experiment import Source
from null_tokens import logprob_at, token_at
from rl_loads import Prompts, unequal_tokens

from isobit.results import TokenLogprobs, TopLogprobs

FOLDER = Path(acceptance.__file__).parent


class ExperimentsTest(unittest.TestCase):
    def run_quick(self, name: str, *flags: str, exit_status: int = 0) -> dict:
        """The content of the experiment's --json file."""
        with tempfile.TemporaryDirectory() as scratch:
            output = Path(scratch) / "result.json"
            command = [sys.executable, str(FOLDER / f"{name}.py"), "--quick", f"--json={output}", *flags]
            result = subprocess.run(
                [*command, f"--bin_dir={os.environ['ISOBIT_BIN_DIR']}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            self.assertEqual(result.returncode, exit_status, result.stdout)
            return json.loads(output.read_text("utf-8"))["result"]

    def modes(self, result: dict) -> dict[str, dict]:
        return {row["mode"]: row for row in result["modes"]}

    def test_unique_outputs(self):
        modes = self.modes(self.run_quick("unique_outputs"))
        self.assertEqual(set(modes["tree"]["distinct"]), {1})
        self.assertEqual(modes["tree"]["divergence"]["unequal_positions"], 0)
        self.assertGreater(modes["tree"]["divergence"]["positions"], 0)
        self.assertGreater(modes["vanilla"]["mean_distinct"], 1)
        self.assertGreater(modes["vanilla"]["divergence"]["maximum"], 0)

    def test_gateway_throughput(self):
        rounds = self.run_quick("gateway_throughput")["rounds"]
        self.assertEqual(set(rounds), {"grpc whole", "http whole", "grpc stream", "http stream"})
        self.assertTrue(all(one["tokens_per_s"] > 0 for way in rounds.values() for one in way))

    def test_http_servers(self):
        rounds = self.run_quick("http_servers")["rounds"]
        self.assertEqual(
            set(rounds),
            {"isobit, whole", "isobit, stream", "isobit steps, whole", "isobit steps, stream"},
        )
        self.assertTrue(all(one["tokens_per_s"] > 0 for way in rounds.values() for one in way))
        events = {way: {one["events_per_token"] for one in of} for way, of in rounds.items()}
        # One for each of 8 tokens, then the end of the sample, the usage and [DONE].
        self.assertEqual((events["isobit, whole"], events["isobit, stream"]), ({0}, {11 / 8}))

    def test_tls_overhead(self):
        rounds = self.run_quick("tls_overhead")
        self.assertEqual(len(rounds), 2)
        self.assertEqual(set(rounds[0]), {"plain", "tls", "plain again"})

    def test_weight_sync(self):
        ways = {row["way"]: row["rounds"] for row in self.run_quick("weight_sync")["ways"]}
        self.assertEqual(list(ways), ["stream", "stream, no digest", "directory"])
        self.assertTrue(all(0 < r["update"] < r["first token"] for rounds in ways.values() for r in rounds))

    def test_speculation(self):
        loads = {row["load"]: row for row in self.run_quick("speculation")["loads"]}
        self.assertEqual(list(loads), ["wrong", "all_wrong", "replay", "tail", "step", "step_other"])
        for name in ("replay", "step"):
            self.assertGreater(loads[name]["accepted_tokens"], 0)
        self.assertEqual(loads["step_other"]["accepted_tokens"], 0)
        for load in loads.values():
            self.assertGreater(load["engine_ratio"], 0)
            self.assertGreaterEqual(min(one["engine_s"] for one in load["rounds"]["plain"]), 0.001)
            drafted = sum(v for name, v in load["counters"].items() if "num_draft_tokens" in name)
            self.assertEqual(drafted, load["draft_tokens"])

    def test_llm42(self):
        result = self.run_quick("llm42")
        for lengths in ("sharegpt", "64x160"):
            rows = [row for row in result["shares"] if row["lengths"] == lengths]
            self.assertEqual(
                [(row["system"], row["share"]) for row in rows],
                [("tree", None), ("vanilla", None), ("llm42", 50), ("llm42", 100)],
            )
            self.assertLess(0, rows[2]["windows"])
            self.assertLess(rows[2]["windows"], rows[3]["windows"])
        grid = {(row["window"], row["group"]): row["windows"] for row in result["windows"]}
        self.assertEqual(sorted(grid), [(4, 1), (4, 4), (16, 1), (16, 4)])
        self.assertGreater(grid[4, 1], grid[16, 1])

    def test_acceptance(self):
        result = self.run_quick("acceptance")
        self.assertEqual(result["versions"], ["tiny-llama-2", "tiny-llama-1", "tiny-llama-1"])
        rows = {(row["seeds"], row["distance"]): row for row in result["outcomes"]}
        for distance in (0, 1):  # the same weights
            row, control = rows["same seeds", distance], rows["other seeds", distance]
            self.assertEqual((row["share"], row["mean_same"]), (1.0, 24))
            self.assertEqual(row["accepted"], sum(row["by_position"]))
            self.assertGreater(row["tokens_a_step"], 2)
            self.assertLess(control["mean_same"], 2)
            self.assertLess(control["tokens_a_step"], row["tokens_a_step"])
        self.assertLess(rows["same seeds", 2]["mean_same"], 2)
        self.assertEqual([result["weights_moved"][d] for d in ("0", "1")], [0, 0])
        self.assertGreater(result["weights_moved"]["2"], 1)

    def test_one_prompt(self):
        modes = self.modes(self.run_quick("one_prompt"))
        self.assertEqual(modes["tree"]["distinct_with_logprobs"], 1)
        self.assertGreater(modes["vanilla"]["distinct_with_logprobs"], 1)
        self.assertEqual(modes["tree"]["completions"], modes["vanilla"]["completions"])

    def test_probability_gap(self):
        modes = self.modes(self.run_quick("probability_gap"))
        for mode, row in modes.items():
            with self.subTest(mode=mode):
                self.assertEqual(sum(row["histogram"]), row["tokens"])
                self.assertEqual(row["histogram"][0], row["tokens"] - row["unequal"])
                self.assertEqual(row["unequal"] == 0, mode == "tree")
                self.assertEqual(row["unequal"], row["statistics"]["num_unequal"])

    def test_overhead(self):
        loads = self.run_quick("overhead")
        self.assertEqual(set(loads), {"latency 16:8", "throughput", "calls", "streams"})
        for name, timings in loads.items():
            with self.subTest(load=name):
                self.assertEqual(set(timings), {"tree", "vanilla"})
                for timing in timings["tree"]:
                    self.assertLess(0, timing["first_tokens_s"])
                    self.assertLessEqual(timing["first_tokens_s"], timing["total_s"])

    def test_rl_step(self):
        for groups in ("one_request", "n_requests"):
            with self.subTest(groups=groups):
                rollouts = self.run_quick("rl_step", f"--groups={groups}")["rollouts"]
                cached = {
                    rollout["variant"]: {
                        load: outcome["num_cached_tokens"]
                        for load, outcome in rollout["steps"][-1]["loads"].items()
                    }
                    for rollout in rollouts
                }
                self.assertEqual(set(cached["not shared"].values()), {0})
                # Whole pages of 16 tokens: of 40 in the first turn, of 51 in the second. Half of the prompts
                # are those of the step before. Of 3 samples in one request, 2 find what the first computes.
                found = cached["shared"]
                new = 2 if groups == "one_request" else 0
                self.assertGreaterEqual(found["turn 1"], 2 * 3 * 32 + 2 * new * 32)
                self.assertGreaterEqual(found["turn 2"], 4 * 3 * 48)
                self.assertGreaterEqual(found["second turn"], 48)
                self.assertEqual(found["new prompt"], 0)

    def test_soak(self):
        result = self.run_quick("soak", "--dummy_weights")
        self.assertEqual(len(result["rests"]), 3)
        self.assertEqual([rest["left_taken"] for rest in result["rests"]], [{}, {}, {}])
        for name in ("comparisons", "requests taken whole", "requests cancelled", "requests aborted"):
            self.assertGreater(result["counts"][name], 0, name)

    def test_one_setting_proves_nothing(self):
        self.run_quick("unique_outputs", "--modes=tree", "--tp_sizes=1", "--batch_sizes=2", exit_status=1)


def tokens(ids: list[int], tops: list[dict[int, float]]) -> TokenLogprobs:
    """Tokens whose probability is that of their top list."""
    lists = [
        TopLogprobs(np.array([*top], np.int32), np.log(np.array([*top.values()], np.float32))) for top in tops
    ]
    logprobs = [np.log(np.float32(top.get(token, 0.01))) for token, top in zip(ids, tops, strict=True)]
    return TokenLogprobs(
        np.array(ids, np.int32), np.array(logprobs, np.float32), np.ones(len(ids), np.uint64), tuple(lists)
    )


def guessed(drawn: TokenLogprobs, guesses: int, accepted: int, reason: str) -> Namespace:
    """What acceptance reads of a sample."""
    return Namespace(
        tokens=drawn, num_draft_tokens=guesses, num_accepted_tokens=accepted, finish_reason=reason
    )


EVEN = {1: 0.5, 2: 0.25}
TILTED = {1: 0.375, 2: 0.25}


class DivergenceTest(unittest.TestCase):
    def test_equal_outputs(self):
        outputs = [tokens([1, 2], [EVEN, EVEN])] * 3
        self.assertEqual(distinct(outputs), 1)
        self.assertEqual(measure(outputs), Divergence(2, 0, 0.0, 0.0, None))

    def test_largest_gap_of_the_common_tokens_up_to_the_first_difference(self):
        outputs = [
            tokens([1, 1, 2, 1], [EVEN, EVEN, EVEN, EVEN]),
            tokens([1, 1, 1, 1], [EVEN, TILTED, {1: 0.375, 3: 0.5}, EVEN]),
        ]
        self.assertEqual(distinct(outputs), 2)
        found = measure(outputs)
        self.assertEqual((found.positions, found.unequal_positions, found.first_difference), (3, 2, 2))
        self.assertAlmostEqual(found.maximum, 0.125, places=6)
        self.assertAlmostEqual(found.mean, 0.25 / 3, places=6)

    def test_one_bit_of_one_logprob_is_unequal(self):
        other = tokens([1], [EVEN])
        other.top[0].logprobs.view(np.uint32)[1] ^= 1
        found = measure([tokens([1], [EVEN]), other])
        self.assertEqual((found.unequal_positions, found.first_difference), (1, None))
        self.assertGreater(found.maximum, 0)

    def test_an_output_that_ends_earlier_differs_there(self):
        outputs = [tokens([1], [EVEN]), tokens([1, 2], [EVEN, EVEN])]
        self.assertEqual(first_difference(outputs), 1)
        self.assertEqual(measure(outputs).positions, 1)

    def test_merge_weighs_by_positions(self):
        merged = Divergence.merge([Divergence(3, 1, 0.2, 0.5, 7), Divergence(1, 0, 0.0, 0.0, None)])
        self.assertEqual((merged.positions, merged.unequal_positions, merged.first_difference), (4, 1, 7))
        self.assertAlmostEqual(merged.mean, 0.15)
        self.assertEqual(merged.maximum, 0.5)


class AcceptanceTest(unittest.TestCase):
    def test_samples_that_stay_the_same(self):
        outcome = acceptance.Outcome("load", 1, acceptance.SAME)
        plain = tokens([1, 2, 1], [EVEN] * 3)
        drafts = ([1, 2, 1], [1, 1, 1], [1, 2])
        for ids in drafts:
            draft = tokens(ids, [EVEN] * len(ids))
            outcome.add(plain, draft, guessed(plain, 2, 1, "length"))
        self.assertEqual(outcome.same, [3, 1, 2])
        self.assertEqual([round(3 * outcome.still_same(k)) for k in range(5)], [3, 3, 2, 1, 1])
        self.assertEqual((outcome.share, outcome.tokens_a_step, outcome.unequal), (0.5, 1.5, 0))
        self.assertEqual(outcome.tokens_a_difference, 3)  # 3, 1 and 2 tokens, two differences

    def test_counters_are_those_between(self):
        name = "isobit_spec_decode_num_accepted_tokens_per_pos_total"
        place = [f'{name}{{drafter="history",position="{i}"}}' for i in range(2)]
        drafts = 'isobit_spec_decode_num_drafts_total{drafter="history"}'
        outcome = acceptance.Outcome("load", 1, acceptance.SAME)
        for _ in range(2):
            before, after = {drafts: 1.0, place[0]: 1.0}, {drafts: 3.0, place[0]: 2.0, place[1]: 1.0}
            outcome.count(before, after)
        self.assertEqual((outcome.drafts, outcome.by_position), (4, [2, 2]))


class HttpLoadTest(unittest.TestCase):
    def check(self, ids: list[int], logprobs: list[float]) -> None:
        """Of an answer with these tokens, where three were asked for."""
        names = [f"token_id:{token}" for token in ids]
        choice = {"token_ids": ids, "logprobs": {"tokens": names, "token_logprobs": logprobs}}
        answer = b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps({"choices": [choice]}).encode()
        http_load.check_answers(http_load.Load([answer], 1.0, 1.0), 3, stream=False)

    def test_answers_are_compared_bit_for_bit(self):
        ids, logprobs = [token_at(i) for i in range(3)], [logprob_at(i) for i in range(3)]
        self.check(ids, logprobs)
        for wrong in (ids[:2], [*ids[:2], ids[2] + 1]):
            with self.assertRaisesRegex(RuntimeError, "expected the tokens"):
                self.check(wrong, logprobs)
        other = float(np.nextafter(np.float32(logprobs[2]), np.float32(0)))
        for wrong in (logprobs[:2], [*logprobs[:2], None], [*logprobs[:2], other]):
            with self.assertRaisesRegex(RuntimeError, "logprobs differ"):
                self.check(ids, wrong)


class RlLoadsTest(unittest.TestCase):
    def test_unequal_tokens(self):
        whole = tokens([1, 2, 1], [EVEN, EVEN, EVEN])
        flipped = tokens([1, 2, 1], [EVEN, EVEN, EVEN])
        flipped.logprobs.view(np.uint32)[1] ^= 1
        for other, unequal in (
            (tokens([1, 2, 1], [EVEN, EVEN, EVEN]), 0),
            (tokens([1, 2, 2], [EVEN, EVEN, EVEN]), 1),
            (tokens([1], [EVEN]), 2),
            (flipped, 1),
        ):
            self.assertEqual(unequal_tokens(whole, other), unequal)
            self.assertEqual(unequal_tokens(other, whole), unequal)

    def test_prompts(self):
        arguments = Namespace(prompts=4, repeated=0.5, input=8, user_tokens=3, seed=1)
        prompts = Prompts(arguments, 1 << 16)
        first, second = (prompts.first("step", step) for step in (0, 1))
        self.assertEqual([a == b for a, b in zip(first, second, strict=True)], [True, True, False, False])
        self.assertEqual(
            len({tuple(prompt) for prompt in [*first, *second, *prompts.first("prompts", 0)]}), 10
        )
        (third,) = prompts.next(first[:1], [tokens([1, 2], [EVEN, EVEN])], "step", 0, 1)
        self.assertEqual((third[:10], len(third)), ([*first[0], 1, 2], 13))


class MachineTest(unittest.TestCase):
    def device_memory(self, processes: str, uses_gpu: bool = True) -> float | None:
        """MiB of processes 17 and 18, on two GPUs with 300 MiB in use together."""
        with tempfile.TemporaryDirectory() as scratch:
            program = Path(scratch) / "nvidia-smi"
            program.write_text(
                f"#!/bin/sh\ncase $1 in *memory.used) echo 100; echo 200;; *) {processes};; esac\n"
            )
            program.chmod(0o755)
            with (
                patch.dict(os.environ, PATH=f"{scratch}:{os.environ['PATH']}"),
                patch.object(machine, "_has_gpu_open", return_value=uses_gpu),
            ):
                return machine.device_memory_mib([17, 18])

    def test_device_memory(self):
        self.assertEqual(self.device_memory("echo 17, 40; echo 18, 50; echo 19, 60"), 90)
        self.assertEqual(self.device_memory("echo 17, [N/A]"), 300)
        self.assertEqual(self.device_memory(":"), 300)
        self.assertIsNone(self.device_memory(":", uses_gpu=False))

    def test_host_memory_of_this_process(self):
        before = machine.host_memory_mib(os.getpid())["own"]
        held = np.ones(64 << 20, np.uint8)
        grown = machine.host_memory_mib(os.getpid())["own"] - before
        self.assertAlmostEqual(grown, held.nbytes / (1 << 20), delta=8)
        self.assertFalse(machine._has_gpu_open(os.getpid()))


class ContractTest(unittest.TestCase):
    """An experiment fails if `tree` breaks the contract."""

    def setUp(self):
        self.experiment = Mock()

    def verdicts(self) -> list[bool]:
        return [call.args[0] for call in self.experiment.check.call_args_list]

    def test_unique_outputs(self):
        whole = tokens([1, 2], [EVEN, EVEN])
        for other, verdicts in (
            (whole, [True, True]),
            (tokens([1, 1], [EVEN, EVEN]), [False, False]),
            (tokens([1, 2], [EVEN, TILTED]), [True, False]),
        ):
            self.experiment.reset_mock()
            runs = [unique_outputs.Run(1, 8, [whole]), unique_outputs.Run(2, 8, [other])]
            unique_outputs.check_contract(self.experiment, unique_outputs.summarise("tree", runs))
            self.assertEqual(self.verdicts(), verdicts)

    def test_one_prompt(self):
        source = Source("tree", 4)
        whole, other = tokens([1, 2], [EVEN, EVEN]), tokens([1, 2], [EVEN, TILTED])
        other.logprobs[1:] = np.float32(-0.5)
        for completions, distinct_ones, with_bits in (
            ([whole, whole], 1, 1),
            ([whole, other], 1, 2),
            ([whole, tokens([1, 1], [EVEN, EVEN])], 2, 2),
        ):
            row = one_prompt.summarise(source, completions)
            self.assertEqual((row["distinct"], row["distinct_with_logprobs"]), (distinct_ones, with_bits))

    def test_rl_step(self):
        self.experiment.arguments = Namespace(prompts=1, turns=1, samples=1, output=2)
        base, other = (rl_step.Steps(Source("tree", 4), variant, False) for variant in ("base", "other"))
        base.completions["turn 1"] = [tokens([1, 2], [EVEN, EVEN])]
        flipped = tokens([1, 2], [EVEN, EVEN])
        flipped.logprobs.view(np.uint32)[1] ^= 1
        for completion, alone, verdicts in (
            (tokens([1, 2], [EVEN, EVEN]), 0, [True, True, True]),
            (tokens([1, 2], [EVEN, EVEN]), 1, [True, False, True]),
            (tokens([1, 1], [EVEN, EVEN]), 0, [True, True, False]),
            (flipped, 0, [True, True, False]),
        ):
            self.experiment.reset_mock()
            other.completions["turn 1"], other.unequal_alone = [completion], alone
            rl_step.check(self.experiment, base, [other])
            self.assertEqual(self.verdicts()[-3:], verdicts)

    def test_acceptance(self):
        plain, flipped = tokens([1, 2], [EVEN, EVEN]), tokens([1, 2], [EVEN, EVEN])
        flipped.logprobs.view(np.uint32)[1] ^= 1
        other = tokens([1, 1], [EVEN, EVEN])
        for drawn, draft, accepted, reason, verdicts in (
            (plain, plain, 2, "length", [True, True]),
            (plain, plain, 1, "stop", [True, True]),
            (flipped, plain, 2, "length", [False, True]),
            (other, plain, 2, "length", [False, True]),
            (plain, plain, 1, "length", [True, False]),
            (plain, other, 2, "length", [True, False]),
        ):
            self.experiment.reset_mock()
            outcome = acceptance.Outcome("load", 0, acceptance.SAME)
            outcome.add(plain, draft, guessed(drawn, 2, accepted, reason))
            acceptance.check(self.experiment, [outcome])
            self.assertEqual(self.verdicts(), verdicts)

    def test_soak(self):
        memory = {"total": 90.0, "own": 50.0}
        rest = {
            "left_taken": {},
            "obstacle": "",
            "host_mib": dict.fromkeys(soak.SERVICES, memory),
            "device_mib": 1000.0,
        }
        more_memory = {"total": 190.0, "own": 150.0}
        grown = {**rest, "host_mib": dict.fromkeys(soak.SERVICES, more_memory)}
        self.experiment.arguments = Namespace(host_growth_mib=64, device_growth_mib=4, tp_size=1, shards=1)
        for last, num_unequal, updates, failed in (
            (rest, 0, 2, 0),
            (rest, 1, 2, 1),
            (rest, 0, 0, 1),
            ({**rest, "left_taken": {"pages": 3}}, 0, 2, 1),
            ({**rest, "obstacle": "weights differ"}, 0, 2, 1),
            (grown, 0, 2, 3),
            ({**rest, "device_mib": 1006.0}, 0, 2, 1),
        ):
            self.experiment.reset_mock()
            total = Namespace(statistics=Namespace(num_tokens=9, num_unequal=num_unequal))
            soak.check(self.experiment, [rest, last], Counter({"updates, in flight: wait": updates}), total)
            self.assertEqual(self.verdicts().count(False), failed)


if __name__ == "__main__":
    unittest.main()
