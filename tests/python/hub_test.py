"""isobit.hub against a hub on loopback: what is downloaded, the cache, offline mode, and every refusal."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from fake_hub import FakeHub, Repository

# huggingface_hub reads its environment when it is imported.
HOME = tempfile.TemporaryDirectory()
HUB = FakeHub({}).__enter__()
os.environ.update(HUB.environment(Path(HOME.name)))
for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
    os.environ.pop(name, None)

import httpx  # noqa: E402  as huggingface_hub 1.x does
import huggingface_hub  # noqa: E402

from isobit import hub  # noqa: E402

TOOL = Path(os.environ["ISOBIT_BIN_DIR"], "isobit-model")
CONFIG = {"config.json": b"{}", "tokenizer.json": b"{}"}
WEIGHTS = bytes(range(256)) * 4096


def index_of(*shards: str) -> bytes:
    return json.dumps({"weight_map": {f"tensor{i}": shard for i, shard in enumerate(shards)}}).encode()


def names_in(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


class HubTest(unittest.TestCase):
    def setUp(self):
        self.addCleanup(HUB.models.clear)
        self.addCleanup(setattr, HUB, "status", None)
        self.model = f"org/{self._testMethodName.replace('_', '-')}"  # a place of its own in the cache
        HUB.requests.clear()

    def serve(self, files: dict[str, bytes], **options) -> Repository:
        HUB.models[self.model] = Repository({**CONFIG, **files}, **options)
        return HUB.models[self.model]

    def refusal(self, **options) -> str:
        with self.assertRaises(hub.HubError) as raised:
            hub.resolve(options.pop("model", self.model), **options)
        return str(raised.exception)

    def offline(self):
        return mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def test_takes_what_it_reads_and_nothing_else(self):
        self.serve(
            {
                "model.safetensors": WEIGHTS,
                "chat_template.jinja": b"x",
                "additional_chat_templates/tool.jinja": b"x",
                "pytorch_model.bin": b"no",
                "consolidated.safetensors": b"no",
                "original/consolidated.00.pth": b"no",
                "modeling_other.py": b"raise SystemExit",
                "README.md": b"no",
            }
        )
        path = hub.resolve(self.model)
        wanted = {"model.safetensors", "chat_template.jinja", "additional_chat_templates/tool.jinja", *CONFIG}
        self.assertEqual(names_in(path), wanted)
        self.assertEqual((path / "model.safetensors").read_bytes(), WEIGHTS)
        # Services are given the folder of the snapshot, whose files are links into the model's blobs.
        self.assertEqual(path.name, HUB.models[self.model].commit)
        self.assertEqual(path.parent.name, "snapshots")
        self.assertEqual((path / "config.json").resolve().parent, path.parents[1] / "blobs")

    def test_services_read_what_the_cache_holds(self):
        with tempfile.TemporaryDirectory() as name:
            model = Path(name, "tiny")
            subprocess.run([TOOL, "make", "tiny-qwen3", model], check=True, capture_output=True)
            self.serve({path.name: path.read_bytes() for path in model.iterdir()})
        path = hub.resolve(self.model)
        verified = subprocess.run([TOOL, "verify", path], check=True, capture_output=True).stdout
        # As huggingface_hub 1.x stores what comes by Xet: once for all models of the cache.
        blob = (path / "model.safetensors").resolve()
        digest = hashlib.sha256(blob.read_bytes()).hexdigest()
        shared = path.parents[2] / "blobs" / digest[:2] / digest
        shared.parent.mkdir(parents=True)
        blob.rename(shared)
        blob.symlink_to(Path("../..", shared.relative_to(path.parents[2])))
        again = subprocess.run([TOOL, "verify", path], check=False, capture_output=True)
        self.assertEqual(again.stdout, verified, again.stderr)

    def test_takes_the_shards_that_the_index_names(self):
        shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
        self.serve(
            {**dict.fromkeys(shards, WEIGHTS), "extra.safetensors": b"no", hub.INDEX_FILE: index_of(*shards)}
        )
        self.assertEqual(names_in(hub.resolve(self.model)), {hub.INDEX_FILE, *shards, *CONFIG})

    def test_a_second_time_fetches_no_file(self):
        self.serve({"model.safetensors": WEIGHTS})
        first = hub.resolve(self.model)
        HUB.requests.clear()
        self.assertEqual(hub.resolve(self.model), first)
        self.assertEqual(
            [line for line in HUB.requests if line.startswith("GET") and "/resolve/" in line], []
        )

    def test_offline_it_takes_what_the_cache_has(self):
        self.serve({"model.safetensors": WEIGHTS})
        first = hub.resolve(self.model)
        HUB.requests.clear()
        with self.offline():
            self.assertEqual(hub.resolve(self.model), first)
        self.assertEqual(dict(HUB.requests), {})

    def test_offline_and_not_cached(self):
        with self.offline():
            self.assertRegex(
                self.refusal(), f"{self.model} is not in the cache, .*, and HF_HUB_OFFLINE forbids"
            )

    def test_offline_with_a_config_alone_is_not_enough(self):
        # What `isobit doctor` leaves behind.
        self.serve({"model.safetensors": WEIGHTS})
        self.assertEqual(names_in(hub.config_directory(self.model)), {"config.json"})
        with self.offline():
            self.assertRegex(
                self.refusal(), "cannot be downloaded now, and the cache lacks model.safetensors"
            )

    def test_offline_with_a_shard_missing(self):
        self.serve(
            {
                "a.safetensors": b"a",
                "b.safetensors": b"b",
                hub.INDEX_FILE: index_of("a.safetensors", "b.safetensors"),
            }
        )
        (hub.resolve(self.model) / "b.safetensors").unlink()
        with self.offline():
            self.assertRegex(self.refusal(), "the cache lacks b.safetensors: ")

    def test_a_hub_that_is_down_leaves_the_cache(self):
        self.serve({"model.safetensors": WEIGHTS})
        first = hub.resolve(self.model)
        HUB.status = 501  # which huggingface_hub does not try again
        self.assertEqual(hub.resolve(self.model), first)

    def test_a_hub_out_of_reach_leaves_the_cache(self):
        self.serve({"model.safetensors": WEIGHTS})
        first = hub.resolve(self.model)
        unreachable = mock.Mock(side_effect=httpx.ConnectError("refused"))
        with mock.patch.object(huggingface_hub.HfApi, "model_info", unreachable):
            self.assertEqual(hub.resolve(self.model), first)
            (first / "model.safetensors").unlink()
            self.assertRegex(
                self.refusal(), "cannot be downloaded now, and the cache lacks model.safetensors"
            )

    def test_revisions(self):
        commit = "f" * 40
        self.serve({"model.safetensors": WEIGHTS}, commit=commit, branches=("main", "v2"))
        self.assertEqual(hub.resolve(self.model, "v2").name, commit)
        self.assertEqual(hub.resolve(self.model, commit).name, commit)
        self.assertEqual(self.refusal(revision="v3"), f"{self.model} has no revision v3 on the hub")

    def test_progress_counts_bytes_up_to_all_of_them(self):
        self.serve({"model.safetensors": WEIGHTS})
        seen = []
        hub.resolve(self.model, progress=lambda done, total: seen.append((done, total)))
        total = len(WEIGHTS) + sum(map(len, CONFIG.values()))
        self.assertEqual({wanted for _, wanted in seen}, {total})
        self.assertEqual(seen, sorted(seen))
        self.assertEqual(seen[-1], (total, total))

    def test_a_connection_that_breaks_is_resumed(self):
        self.serve({"model.safetensors": WEIGHTS}, break_off={"model.safetensors"})
        seen = []
        with self.assertLogs("huggingface_hub", "WARNING"):
            path = hub.resolve(self.model, progress=lambda done, _: seen.append(done))
        self.assertEqual((path / "model.safetensors").read_bytes(), WEIGHTS)
        self.assertLessEqual(max(seen), len(WEIGHTS) + sum(map(len, CONFIG.values())))

    def test_no_such_model(self):
        self.assertRegex(
            self.refusal(), f"^{self.model} is not a directory here, and the hub has no such model"
        )

    def test_gated(self):
        self.serve({"model.safetensors": WEIGHTS}, gated=True)
        self.assertRegex(self.refusal(), "is gated: accept its terms on the hub, and log in")
        with mock.patch.dict(os.environ, HF_TOKEN="secret"):
            hub.resolve(self.model)

    def test_private(self):
        self.serve({"model.safetensors": WEIGHTS}, token="secret")
        self.assertRegex(self.refusal(), "needs a token")
        with mock.patch.dict(os.environ, HF_TOKEN="secret"):
            hub.resolve(self.model)

    def test_no_safetensors(self):
        self.serve({"pytorch_model.bin": WEIGHTS, "model.gguf": WEIGHTS})
        self.assertRegex(self.refusal(), "no safetensors .* it has pytorch_model.bin, model.gguf$")

    def test_adapters(self):
        self.serve({"adapter_config.json": b"{}", "adapter_model.safetensors": WEIGHTS})
        self.assertRegex(
            self.refusal(), r"is an adapter \(adapter_config.json\), which isobit does not apply"
        )
        # Most adapters have no config.json.
        del HUB.models[self.model].files["config.json"]
        self.assertRegex(self.refusal(), "is an adapter")

    def test_no_config(self):
        self.serve({"model.safetensors": WEIGHTS})
        del HUB.models[self.model].files["config.json"]
        self.assertRegex(self.refusal(), "has no config.json on the hub")

    def test_an_index_that_is_none(self):
        for text in (b"{", b"[]", b'{"weight_map": {"a": "../../etc/passwd"}}', b'{"weight_map": {"a": 5}}'):
            self.model = f"org/index{hash(text)}".replace("-", "n")
            self.serve({hub.INDEX_FILE: text})
            self.assertRegex(
                self.refusal(), "is not an index of safetensors|expected names of safetensors", text
            )
        self.model = "org/index-short"
        self.serve({hub.INDEX_FILE: index_of("gone.safetensors")})
        self.assertRegex(self.refusal(), "names gone.safetensors, which the repository does not have")

    def test_directories(self):
        with tempfile.TemporaryDirectory() as name:
            self.assertEqual(hub.resolve(name), Path(name))
            self.assertRegex(
                self.refusal(model=name, revision="main"), "is a directory, which has no revisions"
            )
            file = Path(name, "model.gguf")
            file.touch()
            self.assertRegex(self.refusal(model=str(file)), "expected a model directory or an id .* a file$")
        for wrong in ("", "a/b/c", "/nowhere", "./nowhere", "-x", "org/../x", "a--b"):
            with self.assertRaises(hub.NotAModelError, msg=wrong):
                hub.resolve(wrong)
        self.assertEqual(dict(HUB.requests), {})

    def test_no_bar_away_from_a_terminal(self):
        with mock.patch.object(sys.stderr, "isatty", lambda: False), hub.terminal_bar("x") as progress:
            self.assertIsNone(progress)

    def test_a_bar_on_a_terminal(self):
        with mock.patch.object(sys, "stderr") as stderr, mock.patch.dict(os.environ, TERM="xterm"):
            stderr.isatty.return_value = True
            with hub.terminal_bar("downloading org/tiny") as progress:
                progress(1_000_000, 4_000_000)
                written = ""
                while "1.0/4.0 MB" not in written:  # drawn by a thread, now and then
                    written = "".join(call.args[0] for call in stderr.write.call_args_list)
        self.assertIn("downloading org/tiny", written)


if __name__ == "__main__":
    unittest.main()
