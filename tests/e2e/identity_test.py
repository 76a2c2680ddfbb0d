"""One model has one identity: whatever a checkpoint holds beside the weights, its digest is one by every way;
what a directory says that changes a token is compared before logprobs are; weights that are not finite and
adapters are refused, and the old weights serve on."""

import contextlib
import io
import json
import shutil
import unittest
from pathlib import Path

import numpy as np

from isobit import ComparatorClient, RolloutClient, ScorerClient
from isobit.audit import run as audit
from isobit.cli import main as isobit
from isobit.errors import FailedPreconditionError, InvalidArgumentError
from isobit.launch import Setting, run_model_tool
from isobit.recording import Recorder
from isobit.weights import digest_of
from isobit_tools.testing import BIN_DIR, ServiceTest

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PROMPT = [3, 17, 42, 99, 7, 250]


def read(model: Path) -> dict[str, np.ndarray]:
    """The tensors, bits of bfloat16 as uint16."""
    data = (model / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    tensors = {}
    for name, spec in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            begin, end = spec["data_offsets"]
            bits = np.frombuffer(data[8 + size + begin : 8 + size + end], np.uint16)
            tensors[name] = bits.reshape(spec["shape"])
    return tensors


class IdentityTest(ServiceTest):
    setting = Setting("tree", tp_size=2, shards=1)

    @classmethod
    def make_model(cls):
        run_model_tool(BIN_DIR, "make", "tiny-qwen3", str(cls.scratch / "model"))
        cls.tensors = read(cls.scratch / "model")
        inverse = (1e6 ** (-np.arange(0, 16, 2) / 16)).astype(np.float32)
        cls.variants = {
            "copied_head": {HEAD: cls.tensors[EMBEDDING]},
            "old_buffers": {
                "model.layers.0.self_attn.rotary_emb.inv_freq": inverse,
                "model.rotary_emb.inv_freq": inverse,
                "model.layers.1.self_attn.rotary_emb.cos_cached": np.full((1, 1, 4, 16), np.nan, np.float32),
            },
        }
        for name, more in cls.variants.items():
            cls.write(name, {**cls.tensors, **more})

    @classmethod
    def write(cls, name: str, tensors: dict[str, np.ndarray], **generation) -> Path:
        path = cls.scratch / name
        path.mkdir()
        shutil.copy(cls.scratch / "model" / "config.json", path)
        said = json.loads((cls.scratch / "model" / "generation_config.json").read_text())
        (path / "generation_config.json").write_text(json.dumps({**said, **generation}))
        header, data = {}, b""
        for tensor, array in tensors.items():
            dtype = "F32" if array.dtype == np.float32 else "BF16"
            offsets = [len(data), len(data) + array.nbytes]
            header[tensor] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
            data += array.tobytes()
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
        return path

    def test_one_digest_by_every_way(self):
        digest = digest_of(self.tensors)
        rollout, scorer = self.start("rollout"), self.start("scorer", "--model=old_buffers")
        comparator = self.start("comparator", f"--rollout={rollout.target}", f"--scorer={scorer.target}")
        with (
            RolloutClient(rollout.target) as sampler,
            ScorerClient(scorer.target) as judge,
            ComparatorClient(comparator.target) as compared,
        ):
            self.assertEqual(sampler.get_server_info().server.weight_version.digest, digest)
            self.assertEqual(judge.get_server_info().server.weight_version.digest, digest)
            self.assertEqual(compared.compare([PROMPT], max_tokens=4).summary.verdict, "equal")
            for name, more in self.variants.items():
                with self.subTest(name):
                    tensors = {**self.tensors, **more}
                    self.assertEqual(digest_of(tensors), digest)
                    tool = run_model_tool(BIN_DIR, "verify", str(self.scratch / name))
                    self.assertEqual(tool.split()[0], digest)
                    for client in (sampler, judge):
                        by_directory = client.update_weights(name, expected_digest=digest)
                        self.assertEqual(by_directory.current.digest, digest)
                        by_stream = client.update_weights_from_stream(tensors)
                        self.assertEqual(by_stream.current.digest, digest)
            self.assertEqual(compared.compare([PROMPT], max_tokens=4).summary.verdict, "equal")
            other = self.tensors[EMBEDDING].copy()
            other.flat[3] ^= 1
            for client in (sampler, judge):
                with self.assertRaisesRegex(InvalidArgumentError, f"{HEAD} differs from {EMBEDDING}"):
                    client.update_weights_from_stream({**self.tensors, HEAD: other})

    def test_settings_of_the_directory_are_compared(self):
        """min_tokens bans the end-of-sequence ids, so that logprobs depend on them."""
        other = self.write("other_eos", self.tensors, eos_token_id=[468, 1], top_k=20)
        rollout, scorer = self.start("rollout"), self.start("scorer", f"--model={other.name}")
        comparator = self.start("comparator", f"--rollout={rollout.target}", f"--scorer={scorer.target}")
        file = self.log_dir / "run.jsonl"
        with (
            RolloutClient(rollout.target) as sampler,
            ScorerClient(scorer.target) as judge,
            ComparatorClient(comparator.target) as compared,
        ):
            info = judge.get_server_info().server
            self.assertRegex(info.fingerprint.settings, "^eos_token_ids=1,468 max_position_embeddings=")
            self.assertEqual(info.fingerprint.hex, sampler.get_server_info().server.fingerprint.hex)
            self.assertEqual(list(info.not_applied), ['generation_config.json: "top_k" (value "20")'])
            with self.assertRaisesRegex(FailedPreconditionError, "scorer has eos_token_ids=1,468"):
                compared.compare([PROMPT], max_tokens=32, min_tokens=16, seed=1)
            for client, name in ((sampler, other.name), (judge, "model")):
                with self.assertRaisesRegex(InvalidArgumentError, "state eos_token_ids=.*, expected eos"):
                    client.update_weights(name)
            samples = sampler.generate(PROMPT, max_tokens=32, min_tokens=16, seed=1)
            score = judge.score([(PROMPT, samples[0].tokens.token_ids)], min_tokens=16)[0]
            self.assertNotEqual(samples[0].settings, score.settings)
            unequal = samples[0].tokens.logprobs != score.tokens.logprobs
            self.assertTrue(unequal.any(), "control: the ids change logprobs")
            with self.assertRaisesRegex(FailedPreconditionError, "settings of the model directories"):
                compared.record([(samples[0], score)])
            with Recorder(file) as recorder:
                recorder.add(PROMPT, samples, min_tokens=16)
        said = self.audit(file, other)
        self.assertIn(
            "1 samples not computed: another model directory: recorded settings eos_token_ids=1 ", said
        )
        self.assertIn("0 of 0 tokens unequal", said)
        self.assertIn("0 of 32 tokens unequal", self.audit(file, self.scratch / "model"))

    def audit(self, file: Path, model: Path) -> str:
        report = self.log_dir / "report.json"
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            isobit(["audit", str(file), f"--bin_dir={BIN_DIR}", f"--model={model}", f"--json={report}"])
        found = json.loads(report.read_text())
        del found["passed"], found["verdict"]
        return audit.text_of(audit.Report(**found))

    def test_weights_that_are_not_finite_are_refused(self):
        where = "model.layers.1.mlp.down_proj.weight"
        bad = {**self.tensors, where: self.tensors[where].copy()}
        bad[where][2, 5] = 0x7FC0
        self.write("bad", bad)
        expected = rf'"{where}": the value at \[2, 5\]'
        for kind, connect in (("rollout", RolloutClient), ("scorer", ScorerClient)):
            with self.subTest(kind):
                service = self.start(kind)
                with connect(service.target) as client:
                    before = client.get_server_info().server.weight_version
                    with self.assertRaisesRegex(InvalidArgumentError, expected):
                        client.update_weights("bad")
                    with self.assertRaisesRegex(InvalidArgumentError, expected):
                        client.update_weights_from_stream(bad)
                    self.assertEqual(client.get_server_info().server.weight_version, before)
                    if kind == "rollout":
                        client.generate(PROMPT, max_tokens=2)
                    else:
                        client.score([(PROMPT, [1, 2])])
                allowed = self.start(kind, "--allow_nonfinite_weights")
                with connect(allowed.target) as client:
                    client.update_weights("bad")
                    client.update_weights_from_stream(bad)

    def test_nobody_starts_on_them(self):
        bad = {**self.tensors, "model.norm.weight": np.full_like(self.tensors["model.norm.weight"], 0x7F80)}
        self.write("bad_norm", bad)
        adapted = self.write("adapted", self.tensors)
        (adapted / "adapter_config.json").write_text("{}")
        for kind in ("rollout", "scorer"):
            for name, message in (("bad_norm", "model.norm.weight"), ("adapted", "adapter_config.json")):
                with self.subTest(f"{kind} {name}"):
                    service = self.launch(kind, f"--model={name}")
                    self.assertNotEqual(service.process.wait(60), 0)
                    self.assertIn(message, service.log.read_text())


if __name__ == "__main__":
    unittest.main()
