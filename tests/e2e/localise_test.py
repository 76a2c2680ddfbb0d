"""Localise: faults that are planted are found at the op, token and element where they begin, and blamed on
what they are. Rollout at TP 4, scorer on 2 shards, and the comparator that asks both."""

import contextlib
import io
import json
import unittest
from dataclasses import dataclass

from isobit import ComparatorClient, RolloutClient, ScorerClient, localise
from isobit.calls import LocaliseSide
from isobit.cli import main as isobit
from isobit.errors import InvalidArgumentError
from isobit.launch import Setting, run_model_tool, start_comparator
from isobit.recording import Recorder
from isobit.v1 import comparator_pb2, types_pb2
from isobit_tools.testing import BIN_DIR, ServiceTest

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


@dataclass(frozen=True)
class Fault:
    tensor: str
    index: int  # of the value whose bit is flipped
    layer: int
    op: str


# Every kind of weight, with the op that must be named. Of the embedding the row of token 9, value 3.
FAULTS = {
    "tiny-qwen2": [
        Fault("model.layers.1.self_attn.q_proj.bias", 5, 1, "QKV"),
        Fault("model.layers.1.self_attn.v_proj.bias", 2, 1, "QKV"),
        Fault("lm_head.weight", 5, 3, "LOGITS"),
    ],
    "tiny-qwen3": [
        Fault("model.embed_tokens.weight", -9, 0, "EMBEDDING"),
        Fault("model.layers.0.input_layernorm.weight", 4, 0, "INPUT_NORM"),
        Fault("model.layers.1.self_attn.q_proj.weight", 7, 1, "QKV"),
        Fault("model.layers.1.self_attn.k_proj.weight", 7, 1, "QKV"),
        Fault("model.layers.0.self_attn.v_proj.weight", 7, 0, "QKV"),
        Fault("model.layers.1.self_attn.q_norm.weight", 3, 1, "Q"),
        Fault("model.layers.0.self_attn.k_norm.weight", 3, 0, "K"),
        Fault("model.layers.1.self_attn.o_proj.weight", 11, 1, "ATTENTION_SUM"),
        Fault("model.layers.1.post_attention_layernorm.weight", 6, 1, "POST_NORM"),
        Fault("model.layers.0.mlp.gate_proj.weight", 9, 0, "GATE"),
        Fault("model.layers.1.mlp.up_proj.weight", 9, 1, "UP"),
        Fault("model.layers.1.mlp.down_proj.weight", 13, 1, "MLP_SUM"),
        Fault("model.norm.weight", 2, 3, "FINAL_NORM"),
    ],
}
# High enough in the exponent that no rounding hides it.
BIT = 13


class LocaliseTest(ServiceTest):
    setting = Setting("tree", tp_size=4, shards=2)

    @classmethod
    def make_model(cls):
        for shape in FAULTS:
            run_model_tool(BIN_DIR, "make", shape, str(cls.scratch / shape), "--seed", "3")
        cls.model = cls.scratch / "tiny-qwen3"

    def start_pair(self, model=None, *scorer_flags: str, rollout_flags: tuple[str, ...] = ()) -> None:
        self.model = model or type(self).model
        rollout, scorer = self.start("rollout", *rollout_flags), self.start("scorer", *scorer_flags)
        self.rollout = self.enterContext(RolloutClient(rollout.target))
        self.scorer = self.enterContext(ScorerClient(scorer.target))
        comparator = start_comparator(self.services, rollout, scorer, "comparator")
        self.services.wait_serving(comparator)
        self.comparator = self.enterContext(ComparatorClient(comparator.target))

    def find(self, tokens=TOKENS, completion=(), **sides) -> comparator_pb2.LocaliseResponse:
        found = self.comparator.localise(tokens, completion, **sides)
        self.assertEqual(list(found.tensors) != [], found.cause == comparator_pb2.DIFFERENCE_CAUSE_WEIGHTS)
        return found

    def check_faults(self, shape: str) -> None:
        self.start_pair(self.scratch / shape)
        found = self.find()
        self.assertEqual(localise.cause_of(found), "none", found)
        config = json.loads((self.scratch / shape / "config.json").read_text())
        self.assertEqual(found.num_ops, 3 + 12 * config["num_hidden_layers"])
        for version, fault in enumerate(FAULTS[shape], start=2):
            with self.subTest(fault.tensor):
                index = fault.index if fault.index >= 0 else 9 * config["hidden_size"] + 3
                faulty = self.scratch / f"{shape}-{version}"
                run_model_tool(
                    BIN_DIR, "flip-bit", str(self.scratch / shape), fault.tensor, str(index), str(BIT),
                    str(faulty),
                )  # fmt: skip
                self.scorer.update_weights(faulty.name, weight_version=version)
                found = self.find()
                print(f"{fault.tensor}:", localise.text_of(found).replace("\n", "; "))
                place = (found.site.layer, localise.op_of(found.site))
                self.assertEqual(place, (fault.layer, fault.op))
                self.assertEqual(localise.cause_of(found), "weights")
                self.assertEqual(list(found.tensors), [fault.tensor])
                self.check_element(fault, found.element, config)

    def check_element(self, fault: Fault, element: comparator_pb2.DifferentElement, config: dict) -> None:
        """The element lies where the flipped weight makes a difference first."""
        self.assertNotEqual(element.rollout_bits, element.scorer_bits)
        self.assertGreater(element.ulp_distance, 0)
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        head_dim = config.get("head_dim", config["hidden_size"] // heads)
        first = {"q": 0, "k": heads * head_dim, "v": (heads + kv_heads) * head_dim}
        if fault.op == "EMBEDDING":
            self.assertEqual((element.token, element.column, element.num_different), (TOKENS.index(9), 3, 1))
        elif fault.tensor.endswith("_proj.bias"):
            self.assertEqual((element.token, element.column), (0, first[fault.tensor[-11]] + fault.index))
            self.assertEqual(element.num_different, 1)
        elif fault.op == "QKV":
            # The weight is in the first row of its matrix.
            self.assertEqual((element.column, element.num_different), (first[fault.tensor[-13]], 1))
        elif fault.op in ("ATTENTION_SUM", "MLP_SUM", "GATE", "UP"):
            self.assertEqual((element.column, element.num_different), (0, 1))
        elif fault.op == "LOGITS":
            self.assertEqual((element.token, element.column, element.num_different), (len(TOKENS) - 1, 0, 1))
        elif fault.op in ("INPUT_NORM", "POST_NORM", "FINAL_NORM"):
            self.assertEqual((element.token, element.column, element.num_different), (0, fault.index, 1))

    def test_every_kind_of_weight(self):
        self.check_faults("tiny-qwen3")

    def test_biases(self):
        self.check_faults("tiny-qwen2")

    def test_a_tied_head(self):
        """The bit is in the row of a token that the sequence does not have: only the logits read it."""
        self.start_pair()
        config = json.loads((self.model / "config.json").read_text())
        self.assertTrue(config["tie_word_embeddings"])
        faulty = self.flip("model.embed_tokens.weight", 50 * config["hidden_size"] + 3)
        self.scorer.update_weights(faulty, weight_version=2)
        found = self.find()
        self.assertEqual((localise.op_of(found.site), localise.cause_of(found)), ("LOGITS", "weights"))
        self.assertEqual(list(found.tensors), ["model.embed_tokens.weight"])
        self.assertEqual((found.element.column, found.element.num_different), (50, 1))

    def test_weights_that_the_sequence_does_not_read(self):
        """A row of the embedding alone: every op is equal."""
        self.start_pair(self.scratch / "tiny-qwen2")
        config = json.loads((self.model / "config.json").read_text())
        self.scorer.update_weights(
            self.flip("model.embed_tokens.weight", 50 * config["hidden_size"]), weight_version=2
        )
        self.assertEqual(localise.cause_of(self.find()), "none")

    def flip(self, tensor: str, index: int) -> str:
        """The name of a copy of the model with one flipped bit."""
        to = self.scratch / f"flipped-{len(list(self.scratch.glob('flipped-*')))}"
        run_model_tool(BIN_DIR, "flip-bit", str(self.model), tensor, str(index), str(BIT), str(to))
        return to.name

    def test_other_arithmetic(self):
        modes = {
            "vanilla": {"rollout_flags": ("--numerics=vanilla",)},
            "batch_invariant": {"rollout_flags": ("--numerics=batch_invariant",)},
        }
        for mode, flags in modes.items():
            with self.subTest(mode):
                self.start_pair(**flags)
                found = self.find()
                self.assertEqual(localise.cause_of(found), "arithmetic", found)
                self.assertIn("fingerprints must be equal", found.explanation)
                self.assertTrue(found.HasField("element"))
                print(f"{mode} beside tree:", localise.text_of(found).replace("\n", "; "))

    def test_logprobs_of_equal_ops(self):
        """What each side said is explained by exactly one cause."""
        self.start_pair()
        hot = {"temperature": 0.7, "top_k": 20}
        (sample,) = self.rollout.generate(TOKENS, seed=5, max_tokens=12, ignore_eos=True, **hot)
        tokens, said = sample.tokens.token_ids, sample.tokens.logprobs

        def score(prompt=TOKENS, mode="processed", **sampling):
            (score,) = self.scorer.score([(prompt, tokens)], logprob_mode=mode, **sampling)
            return score.tokens.logprobs

        # The first page of the cache holds another sequence's keys and values, the rest is its own.
        others = [7] * 16 + TOKENS[16:]
        asked = {"sampling": {**hot, "ignore_eos": True}}
        rollout = LocaliseSide(**asked, logprobs=said)
        stale = score(prompt=others, **asked["sampling"])
        self.assertNotEqual(stale.tobytes(), said.tobytes())
        plain = score(ignore_eos=True)
        cases = {
            "none": {"rollout": rollout, "scorer": LocaliseSide(**asked, logprobs=said)},
            "rollout_state": {"rollout": LocaliseSide(**asked, logprobs=stale)},
            "input": {"rollout": rollout, "scorer": LocaliseSide(**asked, logprobs=stale)},
        }
        for cause, sides in cases.items():
            with self.subTest(cause):
                found = self.find(TOKENS, tokens, **sides)
                self.assertEqual(localise.cause_of(found), cause, found)
                self.assertEqual(found.HasField("position"), cause != "none")
                self.assertFalse(found.HasField("site"))
        parameters = {
            "the scorer was asked for another temperature": {
                "rollout": rollout,
                "scorer": LocaliseSide({"temperature": 1.0}, logprobs=plain),
            },
            "nobody knows what the scorer said": {"rollout": rollout, "scorer": LocaliseSide({"top_p": 0.5})},
            "the rollout dropped its parameters": {"rollout": LocaliseSide(**asked, logprobs=plain)},
            "the scorer dropped its parameters": {
                "rollout": rollout,
                "scorer": LocaliseSide(**asked, logprobs=plain),
            },
            "the rollout said raw logprobs": {
                "rollout": LocaliseSide(**asked, logprobs=score(mode="raw")),
            },
        }
        for what, sides in parameters.items():
            with self.subTest(what):
                found = self.find(TOKENS, tokens, **sides)
                self.assertEqual(localise.cause_of(found), "sampling_parameters", found)
        # One token late: the position is named.
        late = said.copy()
        late[7] = stale[7]
        self.assertEqual(self.find(TOKENS, tokens, rollout=LocaliseSide(**asked, logprobs=late)).position, 7)
        with self.assertRaisesRegex(
            InvalidArgumentError, "rollout.logprobs: 11 entries, expected none or 12"
        ):
            self.find(TOKENS, tokens, rollout=LocaliseSide(**asked, logprobs=said[:11]))

    def test_probes_disturb_nobody(self):
        """Requests in flight, and those after, give the same bits with probes between their steps."""
        self.start_pair()
        draw = {"seed": 4, "n": 2, "max_tokens": 150, "ignore_eos": True, "temperature": 0.8}

        def bits(samples):
            return [(s.tokens.token_ids.tolist(), s.tokens.logprobs.tobytes()) for s in samples]

        alone = bits(self.rollout.generate([1, 2, 3], **draw))
        stream = self.rollout.generate([1, 2, 3], stream=True, **draw)
        next(stream)
        probed = [self.rollout.probe(TOKENS).digests for _ in range(5)]
        self.assertTrue(all(list(p) == list(probed[0]) for p in probed))
        for _ in stream:
            pass
        self.assertEqual(bits(self.rollout.generate([1, 2, 3], **draw)), alone)
        # Paused before, paused after.
        self.rollout.pause_generation("keep")
        self.rollout.probe(TOKENS)
        self.assertTrue(self.rollout.get_load().paused)
        self.rollout.continue_generation()

    def test_bad_probes(self):
        self.start_pair()
        site = (0, types_pb2.PROBE_OP_QKV)
        for client in (self.rollout, self.scorer):
            for arguments, expected in (
                (([],), "token_ids: 0 entries"),
                (([1, 10**6],), r"token_ids\[1\]: expected a token id in \[0, \d+\), got 1000000"),
                (([2**32 - 1],), r"token_ids\[0\]: expected .*, got 4294967295"),
                (([1] * 100_000,), "token_ids: 100000 entries"),
            ):
                with self.assertRaisesRegex(InvalidArgumentError, expected):
                    client.probe(*arguments)
            with self.assertRaisesRegex(InvalidArgumentError, "row: expected a site"):
                client.probe([1], row=0)
            with self.assertRaisesRegex(InvalidArgumentError, "row: 1, expected less than 1"):
                client.probe([1], site=site, row=1)
            with self.assertRaisesRegex(InvalidArgumentError, "site.op: 0"):
                client.probe([1], site=(0, 0))
            self.assertEqual(list(client.probe([1], site=(99, 3)).row_digests), [], "no such layer")

    def test_command_line(self):
        self.start_pair()
        target = f"--comparator={self.comparator.target}"
        tokens = "--tokens=" + ",".join(map(str, TOKENS))
        self.assertEqual(self.run_main(target, tokens)[0], 0)
        recording = self.log_dir / "run.jsonl"
        with Recorder(recording) as recorder:
            for seed in (1, 2):
                samples = self.rollout.generate(TOKENS, seed=seed, max_tokens=5, temperature=0.5)
                recorder.add(TOKENS, samples, temperature=0.5)
        line = [target, f"--recording={recording}", "--line=2"]
        self.assertEqual(self.run_main(*line)[0], 0)
        status, text = self.run_main(*line, '--scorer_sampling={"temperature": 1}')
        self.assertEqual((status, text.split(":")[1]), (1, " sampling_parameters"), text)
        recording.write_text(recording.read_text().replace("bf", "be").replace("c0", "bf"))
        status, text = self.run_main(*line)
        self.assertEqual((status, text.split(":")[1]), (1, " rollout_state"), text)
        self.scorer.update_weights(self.flip("model.layers.1.self_attn.o_proj.weight", 11), weight_version=2)
        status, text = self.run_main(target, tokens)
        self.assertEqual(status, 1)
        self.assertIn("layer 1, ATTENTION_SUM", text)
        self.assertIn("model.layers.1.self_attn.o_proj.weight", text)
        status, text = self.run_main(target, tokens, "--json")
        self.assertEqual((status, json.loads(text)["cause"]), (1, "DIFFERENCE_CAUSE_WEIGHTS"))
        self.assertEqual(self.run_main(target, "--tokens=1,x")[0], 2)

    def run_main(self, *arguments: str) -> tuple[int, str]:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            status = isobit(["localise", *arguments])
        return status, output.getvalue()


if __name__ == "__main__":
    unittest.main()
