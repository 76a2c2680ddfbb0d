"""Localise: faults that are planted are found at the op, token and element where they begin, and blamed on
what they are. Rollout at TP 4, scorer on 2 shards."""

import contextlib
import io
import json
import unittest
from dataclasses import dataclass

from isobit import RolloutClient, ScorerClient
from isobit.errors import InvalidArgumentError
from isobit.v1 import types_pb2
from isobit_tools import localise
from isobit_tools.services import Setting, run_model_tool
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

    def start_pair(self, model=None, *scorer_flags: str) -> None:
        self.model = model or type(self).model
        rollout, scorer = self.start("rollout"), self.start("scorer", *scorer_flags)
        self.rollout = self.enterContext(RolloutClient(rollout.target))
        self.scorer = self.enterContext(ScorerClient(scorer.target))

    def find(self, tokens=TOKENS) -> localise.Finding:
        return localise.localise(self.rollout, self.scorer, tokens)

    def check_faults(self, shape: str) -> None:
        self.start_pair(self.scratch / shape)
        finding = self.find()
        self.assertTrue(finding.equal, finding.text())
        config = json.loads((self.scratch / shape / "config.json").read_text())
        self.assertEqual(finding.num_ops, 3 + 12 * config["num_hidden_layers"])
        for version, fault in enumerate(FAULTS[shape], start=2):
            with self.subTest(fault.tensor):
                index = fault.index if fault.index >= 0 else 9 * config["hidden_size"] + 3
                faulty = self.scratch / f"{shape}-{version}"
                run_model_tool(
                    BIN_DIR, "flip-bit", str(self.scratch / shape), fault.tensor, str(index), str(BIT),
                    str(faulty),
                )  # fmt: skip
                self.scorer.update_weights(faulty.name, weight_version=version)
                finding = self.find()
                print(f"{fault.tensor}: layer {finding.layer}, {finding.op}, {finding.element}")
                self.assertEqual((finding.layer, finding.op), (fault.layer, fault.op), finding.text())
                self.assertEqual(finding.cause, "weights")
                self.assertIn(fault.tensor, " ".join(finding.suspects))
                self.check_element(fault, finding, config)

    def check_element(self, fault: Fault, finding: localise.Finding, config: dict) -> None:
        """The element lies where the flipped weight makes a difference first."""
        element = finding.element
        self.assertIsNotNone(element)
        self.assertNotEqual(element.rollout_bits, element.scorer_bits)
        self.assertGreater(element.ulp_distance, 0)
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        head_dim = config.get("head_dim", config["hidden_size"] // heads)
        first = {"q": 0, "k": heads * head_dim, "v": (heads + kv_heads) * head_dim}
        if fault.op == "EMBEDDING":
            self.assertEqual((element.row, element.column, element.num_different), (TOKENS.index(9), 3, 1))
        elif fault.tensor.endswith("_proj.bias"):
            self.assertEqual((element.row, element.column), (0, first[fault.tensor[-11]] + fault.index))
            self.assertEqual(element.num_different, 1)
        elif fault.op == "QKV":
            # The weight is in the first row of its matrix.
            self.assertEqual((element.column, element.num_different), (first[fault.tensor[-13]], 1))
        elif fault.op in ("ATTENTION_SUM", "MLP_SUM", "GATE", "UP"):
            self.assertEqual((element.column, element.num_different), (0, 1))
        elif fault.op == "LOGITS":
            self.assertEqual((element.row, element.column, element.num_different), (len(TOKENS) - 1, 0, 1))
        elif fault.op in ("INPUT_NORM", "POST_NORM", "FINAL_NORM"):
            self.assertEqual((element.row, element.column, element.num_different), (0, fault.index, 1))

    def test_every_kind_of_weight(self):
        self.check_faults("tiny-qwen3")

    def test_biases(self):
        self.check_faults("tiny-qwen2")

    def test_other_arithmetic(self):
        self.start_pair(None, "--numerics=vanilla")
        finding = self.find()
        self.assertEqual((finding.equal, finding.cause), (False, "arithmetic"), finding.text())
        self.assertIn("fingerprints are not", finding.explanation)
        print(f"vanilla beside tree: layer {finding.layer}, {finding.op}")

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
                (([10**6],), r"token_ids\[0\]: 1000000"),
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
        targets = [f"--rollout={self.rollout.target}", f"--scorer={self.scorer.target}"]
        tokens = "--tokens=" + ",".join(map(str, TOKENS))
        self.assertEqual(self.run_main(*targets, tokens)[0], 0)
        faulty = self.scratch / "for-the-command"
        run_model_tool(
            BIN_DIR, "flip-bit", str(self.model), "model.layers.1.self_attn.o_proj.weight", "11", str(BIT),
            str(faulty),
        )  # fmt: skip
        self.scorer.update_weights(faulty.name, weight_version=2)
        status, text = self.run_main(*targets, tokens)
        self.assertEqual(status, 1)
        self.assertIn("layer 1, ATTENTION_SUM", text)
        self.assertIn("model.layers.1.self_attn.o_proj.weight", text)
        status, text = self.run_main(*targets, tokens, "--json")
        self.assertEqual((status, json.loads(text)["cause"]), (1, "weights"))
        self.assertEqual(self.run_main(*targets, "--tokens=1,x")[0], 2)

    def run_main(self, *arguments: str) -> tuple[int, str]:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            status = localise.main(list(arguments))
        return status, output.getvalue()


if __name__ == "__main__":
    unittest.main()
