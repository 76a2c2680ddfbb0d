"""`isobit doctor` on configs: of families that are supported and not, and broken ones.

doctor_command_test.py has the command itself.
"""

import copy
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

from doctor_cases import BIN_DIR, CONFIGS, a_machine, config, examine, verdict_of, write

from isobit import doctor, models

# By config: whether the model is taken, and what its first verdict must say. 500 GB of memory, no GPU.
EXPECTED = {
    "qwen3-0.6b": (True, r"Qwen3 \(Qwen3ForCausalLM\), 596 million parameters"),
    "qwen2.5-7b-instruct": (True, r"Qwen2 .* 7\.62 billion"),
    "llama-3.1-8b-instruct": (True, r"Llama .* 8\.03 billion"),
    "mistral-7b-v0.1": (True, r"Mistral .* 7\.24 billion"),
    "smollm2-135m-float16": (True, r"Llama .* 135 million"),
    "qwen3-8b-yarn": (True, r"Qwen3 .* 8\.19 billion"),
    "qwen3-8b-awq": (False, "Qwen3 .* would run if its weights were not quantised"),
    "llama-3.1-8b-fp8": (False, "Llama .* would run if its weights were not quantised"),
    "qwen3-reward": (False, "Qwen3ForSequenceClassification does not have a language model"),
    "llama-dynamic-rope": (False, 'rope_type is "dynamic", supported: default, linear, llama3, yarn'),
    "mixtral-8x7b": (False, "Mixtral.*: mixture of experts"),
    "qwen3-30b-a3b": (False, "Qwen3MoeForCausalLM .*: mixture of experts"),
    "qwen3-next-80b-a3b": (False, "Qwen3-Next.*: gated delta net layers"),
    "qwen3.5-4b": (False, "Qwen3_5ForConditionalGeneration .*: gated delta net layers"),
    "deepseek-v3": (False, "DeepseekV3ForCausalLM .*: multi-head latent attention"),
    "gemma-3-4b-it": (False, "Gemma.*: GELU"),
    "gpt-oss-20b": (False, "GPT-OSS.*: mixture of experts, attention sinks"),
    "phi-4-mini": (False, "Phi3ForCausalLM .*: q, k and v"),
    "mamba-2.8b": (False, "Mamba.*: state space layers"),
    "falcon-7b": (False, "Falcon.*: LayerNorm"),
    "internvl-unknown": (False, "SomeVision.* is unknown; its text part is Qwen2"),
    "bert-base": (False, "Encoders"),
    "unknown": (False, r"UnheardOfForCausalLM is unknown; supported: Llama \(LlamaForCausalLM\), "),
    "empty": (False, "names no architecture; supported: Llama"),
}


class ConfigsTest(unittest.TestCase):
    def test_every_config_has_its_verdict(self):
        self.assertEqual(set(EXPECTED), {path.stem for path in CONFIGS.glob("*.json")})
        for name, (runs, text) in EXPECTED.items():
            with self.subTest(name):
                report = examine(name)
                self.assertEqual(report.runs, runs, report.verdicts)
                self.assertRegex(report.verdicts[0].text, text)
                names = [verdict.name for verdict in report.verdicts]
                self.assertEqual(names, ["model", "context", "dtype", "gpu", "driver", "memory"])

    def test_the_parser_takes_the_same_configs(self):
        # Whatever doctor says without the parser, and the parser's count of parameters.
        for name in EXPECTED:
            with self.subTest(name):
                path = CONFIGS / f"{name}.json"
                checked = subprocess.run(
                    [BIN_DIR / "isobit-model", "check", path], capture_output=True, text=True, check=False
                )
                self.assertEqual(checked.returncode == 0, EXPECTED[name][0], checked.stderr)
                if EXPECTED[name][0]:
                    count = int(re.search(r"(\d+) parameters", checked.stdout)[1])
                    self.assertEqual(models.shape_of(config(name)).parameters, count)
                    length = int(re.search(r"context (\d+)", checked.stdout)[1])
                    self.assertEqual(models.context_of(config(name)), length)

    def test_without_the_parser_it_says_so(self):
        with tempfile.TemporaryDirectory() as empty, mock.patch.dict(os.environ, ISOBIT_BIN_DIR=empty):
            for name, (runs, _) in EXPECTED.items():
                report = examine(name)
                if name == "llama-dynamic-rope":  # the parser alone knows
                    self.assertTrue(report.runs)
                    continue
                self.assertEqual(report.runs, runs, name)
                if runs:
                    self.assertEqual(report.verdicts[0].verdict, doctor.NOTE)
                    self.assertIn("isobit-model is not installed", report.verdicts[0].text)

    def test_a_field_that_isobit_does_not_honour(self):
        with tempfile.TemporaryDirectory() as directory:
            path = write(directory, "config.json", json.dumps(config("qwen3-0.6b") | {"odd_field": 1}))
            with a_machine():
                self.assertIn('"odd_field" is not supported', doctor.examine(str(path)).verdicts[0].text)
                self.assertTrue(doctor.examine(str(path), ignored_fields=["odd_field"]).runs)
                self.assertTrue(doctor.examine(str(CONFIGS / "qwen3-0.6b.json")).runs)
                # Of a directory, adapters count as well.
                write(directory, "adapter_config.json", "{}")
                report = doctor.examine(directory, ignored_fields=["odd_field"])
                self.assertIn("isobit applies no adapters", report.verdicts[0].text)

    def test_dtypes(self):
        for dtype, verdict, text in (
            ("bfloat16", doctor.YES, "bfloat16"),
            ("float16", doctor.NOTE, "--round_fp16_weights"),
            ("float32", doctor.NOTE, "round it to bf16"),
            (None, doctor.NOTE, "names none"),
            ("int8", doctor.NO, "int8: expected"),
        ):
            report = doctor.Report("")
            doctor._judge_dtype({"torch_dtype": dtype}, report)
            self.assertEqual(
                (report.verdicts[0].verdict, text in report.verdicts[0].text), (verdict, True), dtype
            )
        self.assertRegex(verdict_of(examine("qwen3-8b-awq"), "dtype").text, r"quantised \(awq, 4 bits\)")
        self.assertEqual(verdict_of(examine("gpt-oss-20b"), "dtype").verdict, doctor.NO)

    def test_contexts(self):
        self.assertRegex(
            verdict_of(examine("qwen3-8b-yarn"), "context").text, r"^131,072 tokens; .* 144 KiB a token"
        )
        self.assertIn("a token sees 4,096", verdict_of(examine("mistral-7b-v0.1"), "context").text)
        self.assertEqual(examine("qwen3.5-4b").context, 262144)  # in its text_config
        self.assertNotIn("sees", verdict_of(examine("qwen2.5-7b-instruct"), "context").text)


class BrokenConfigTest(unittest.TestCase):
    BROKEN = (
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        (b"[]", "has a JSON list"),
        (b"null", "has a JSON NoneType"),
        (b"[" * 200_000, "is not JSON"),
        (b"9" * 5000, "is not JSON|has a JSON int"),
        (b" " * (5 << 20), "has more than 4 MiB"),
        (b'{"architectures": "Qwen3ForCausalLM"}', "expected one name"),
        (b'{"architectures": ["Qwen3ForCausalLM"]}', "num_attention_heads is missing"),
        (b'{"architectures": [5, null]}', "expected one name"),
        (b'{"model_type": {"a": []}}', "names no architecture"),
    )

    def test_broken_files(self):
        with tempfile.TemporaryDirectory() as directory, a_machine():
            for text, reason in self.BROKEN:
                report = doctor.examine(str(write(directory, "config.json", text)))
                self.assertFalse(report.runs)
                self.assertRegex(report.verdicts[0].text, reason, text[:50])
            report = doctor.examine(tempfile.mkdtemp(dir=directory))
            self.assertRegex(report.verdicts[0].text, "config.json: No such file")

    def test_no_value_crashes_it(self):
        values = [
            None,
            True,
            -1,
            0,
            1,
            2**70,
            1.5,
            float("nan"),
            "",
            "x" * 300,
            [],
            [1],
            {},
            {"a": {}},
            [[]],
            "auto",
        ]
        rng = random.Random(47)
        with (
            tempfile.TemporaryDirectory() as empty,
            mock.patch.dict(os.environ, ISOBIT_BIN_DIR=empty),
            a_machine(),
        ):
            for _ in range(3000):
                changed = config(rng.choice(list(EXPECTED)))
                for _ in range(rng.randint(1, 4)):
                    target = changed
                    inner = [value for value in changed.values() if isinstance(value, dict)]
                    if inner and rng.random() < 0.3:
                        target = rng.choice(inner)
                    name = rng.choice(
                        [*target, "quantization_config", "text_config", "dtype", "rope_scaling"]
                    )
                    target[name] = copy.deepcopy(rng.choice(values))
                    if rng.random() < 0.2:
                        del target[name]
                path = write(empty, "config.json", json.dumps(changed))
                report = doctor.examine(str(path), tp_size=rng.choice(models.TP_SIZES))
                self.assertEqual(len(report.verdicts), 6)
                json.dumps(report.verdicts[0].text)


class TableTest(unittest.TestCase):
    def test_rows_are_whole(self):
        names = [name for row in models.families() for name in (*row.architectures, *row.model_types)]
        self.assertEqual(len(names), len(set(names)))
        for row in models.families():
            self.assertTrue(row.architectures and row.model_types, row.family)
            self.assertEqual(bool(row.since and row.models and row.refused), row.supported, row.family)
            self.assertEqual(bool(row.why), not row.supported, row.family)

    def test_modules_are_light(self):
        program = (
            "import sys; import isobit.hub, isobit.doctor; print([m for m in {names} if m in sys.modules])"
        )
        names = ["huggingface_hub", "rich", "typer", "grpc", "numpy"]
        found = subprocess.run(
            [sys.executable, "-c", program.format(names=names)], capture_output=True, text=True, check=True
        )
        self.assertEqual(found.stdout.strip(), "[]")


if __name__ == "__main__":
    unittest.main()
