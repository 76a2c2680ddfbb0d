"""`isobit serve`: starts, serves, and leaves nothing behind, whatever ends it."""

import importlib.util
import json
import os
import signal
import ssl
import subprocess
import sys
import unittest
import urllib.error
import urllib.request
from pathlib import Path

from cli_case import CliTest, Command, is_alive

from isobit import RolloutClient
from isobit.errors import UnauthenticatedError
from isobit_tools.testing import http_get

HAS_GATEWAY = importlib.util.find_spec("isobit.gateway") is not None


def place(lines: list[str], text: str) -> int:
    """The number of the first line with `text`."""
    return next(index for index, line in enumerate(lines) if text in line)


class GrpcTest(CliTest):
    """Without HTTP."""

    def serve(self, *words: str, **environment: str) -> Command:
        return self.isobit("serve", str(self.model), "--no_http", "--grpc_port=0", *words, **environment)

    def test_it_serves_what_the_flags_say(self):
        command = self.serve("--json", "--max-model-len", "128", "--gpu-memory-utilization=0.5", "-tp", "1")
        addresses = json.loads(command.first_line())
        self.assertEqual(addresses.keys(), {"model", "grpc"})
        self.assertEqual(addresses["model"], str(self.model))
        with RolloutClient(addresses["grpc"]) as client:
            self.assertEqual(client.get_server_info().server.model.context_length, 128)
            (sample,) = client.generate([1, 2, 3], max_tokens=4)
            self.assertEqual(len(sample.tokens.token_ids), 4)
        for text in ("note: --gpu-memory-utilization is taken as --gpu_memory_fraction", "rollout | "):
            self.wait_until(lambda text=text: text in command.text, f"{text!r} is not shown")
        pids = command.children().values()
        self.assertEqual(command.end(signal.SIGTERM), 0, command.text)
        self.assertFalse(any(map(is_alive, pids)))
        self.assertIn("stopped", command.text)

    @unittest.skipUnless(importlib.util.find_spec("isobit.hub"), "isobit.hub is not there")
    def test_a_model_of_the_hub_s_cache(self):
        """Its files are links out of the folder that is served."""
        cache = self.log_dir / "hub" / "models--somebody--tiny"
        for folder in ("refs", "blobs", "snapshots/c0ffee"):
            (cache / folder).mkdir(parents=True)
        (cache / "refs" / "main").write_text("c0ffee")
        for number, file in enumerate(self.model.iterdir()):
            (cache / "blobs" / str(number)).write_bytes(file.read_bytes())
            (cache / "snapshots" / "c0ffee" / file.name).symlink_to(f"../../blobs/{number}")
        hub = {"HF_HUB_CACHE": str(cache.parent), "HF_HUB_OFFLINE": "1"}
        command = self.isobit("serve", "somebody/tiny", "--no_http", "--grpc_port=0", "--json", **hub)
        addresses = json.loads(command.first_line())
        self.assertEqual(addresses["model"], str(cache / "snapshots" / "c0ffee"))
        with RolloutClient(addresses["grpc"]) as client:
            self.assertEqual(len(client.generate([1], max_tokens=1)), 1)
        missing = self.isobit("serve", "somebody/else", "--no_http", "--grpc_port=0", **hub)
        self.assertEqual(missing.end(), 3, missing.text)
        self.assertIn("somebody/else is not in the cache", missing.text)

    def test_another_address(self):
        command = self.serve("--grpc_host=127.0.0.2", "--json")
        target = json.loads(command.first_line())["grpc"]
        self.assertTrue(target.startswith("127.0.0.2:"), target)
        with RolloutClient(target) as client:
            self.assertEqual(len(client.generate([1], max_tokens=1)), 1)

    def test_a_flag_that_the_service_refuses_is_bad_usage(self):
        command = self.serve("--numerics=wood")
        self.assertEqual(command.end(), 2, command.text)
        self.assertIn("wood", command.text)

    def test_a_model_that_cannot_be_loaded(self):
        broken = self.log_dir / "broken"
        broken.mkdir()
        (broken / "config.json").write_text((self.model / "config.json").read_text())
        command = self.isobit("serve", str(broken), "--no_http", "--grpc_port=0")
        self.assertEqual(command.end(), 3, command.text)
        self.assertRegex(command.text, r"error: rollout ended with status 1(.|\n)*safetensors")

    def test_what_is_no_model(self):
        command = self.isobit("serve", str(self.log_dir), "--no_http", "--grpc_port=0")
        self.assertEqual(command.end(), 2, command.text)
        self.assertIn("expected a model directory or the id of a model", command.text)

    def test_a_taken_port_is_named_before_anything_is_loaded(self):
        port = self.taken_port()
        command = self.isobit("serve", str(self.model), "--no_http", f"--grpc_port={port}")
        self.assertEqual(command.end(), 3, command.text)
        self.assertIn(f"--grpc_port: cannot listen on 127.0.0.1:{port}", command.text)
        self.assertNotIn("rollout | ", command.text)

    def test_a_service_that_dies_ends_all_with_its_last_lines(self):
        command = self.serve()
        command.first_line()
        os.kill(command.children()["rollout"], signal.SIGKILL)
        self.assertEqual(command.end(), 3, command.text)
        self.assertRegex(command.text, r"error: rollout ended with status -9(.|\n)*serving, backend")

    def test_nothing_is_left_when_it_is_killed(self):
        command = self.serve()
        command.first_line()
        pids = list(command.children().values())
        self.assertEqual(len(pids), 1)
        command.end(signal.SIGKILL)
        self.wait_gone(pids)

    def test_a_second_signal_ends_all_at_once(self):
        command = self.serve("--drain_timeout_ms=600000")
        grpc = command.first_line() and command.out[1].split()[1]
        pids = list(command.children().values())
        with RolloutClient(grpc) as client:
            events = client.generate([1, 2], stream=True, max_tokens=1900, ignore_eos=True, n=128)
            next(events)  # a call that keeps the rollout from ending
            command.process.send_signal(signal.SIGINT)
            command.wait_for(lambda: "draining" in command.text, "the rollout was not told")
            self.assertEqual(command.end(signal.SIGINT), 130, command.text)
            self.assertFalse(any(map(is_alive, pids)))
            self.assertNotIn("stopped", command.text)
            events.close()

    def test_a_signal_while_it_starts(self):
        command = self.serve()
        command.wait_for(lambda: "rollout | " in command.text, "nothing started")
        pids = list(command.children().values())
        self.assertIn(command.end(signal.SIGTERM), (0, 143), command.text)
        self.wait_gone(pids)


@unittest.skipUnless(HAS_GATEWAY, "isobit.gateway is not there")
class HttpTest(CliTest):
    def serve(self, *words: str) -> Command:
        return self.isobit("serve", str(self.model), "--port=0", "--grpc_port=0", "--json", *words)

    def test_it_serves_by_both(self):
        command = self.serve("--served-model-name", "one", "two", "--host=127.0.0.3", "--grpc_host=127.0.0.2")
        addresses = json.loads(command.first_line())
        self.assertTrue(addresses["http"].startswith("http://127.0.0.3:"), addresses)
        self.assertEqual(addresses.keys(), {"model", "grpc", "http"})
        models = json.loads(http_get(f"{addresses['http']}/v1/models"))
        self.assertEqual([model["id"] for model in models["data"]], ["one", "two"])
        body = json.dumps({"model": "one", "prompt": [5, 6], "max_tokens": 3}).encode()
        request = urllib.request.Request(
            f"{addresses['http']}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            self.assertEqual(json.load(answer)["usage"]["prompt_tokens"], 2)
        self.assertIn("isobit_tokens_generated_total", http_get(f"{addresses['http']}/metrics"))

    def test_tls_and_who_may_call(self):
        cert, key, token_file, access = (
            str(self.log_dir / name) for name in ("c.pem", "c.key", "t", "access")
        )
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert,
             "-days", "2", "-subj", "/CN=x", "-addext", "subjectAltName=IP:127.0.0.1"],
            check=True, capture_output=True,
        )  # fmt: skip
        made = subprocess.run(
            [sys.executable, "-m", "isobit.token", "all", "generate", "watch", f"--token_file={token_file}"],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        Path(access).write_text(f'{{"clients": [{made.stdout}]}}')
        tls = (f"--ssl-certfile={cert}", "--ssl-keyfile", key)
        refused = self.serve(*tls, f"--access_file={access}")
        self.assertEqual(refused.end(), 2, refused.text)
        self.assertIn("--access_file: also give --upstream_token_file", refused.text)
        command = self.serve(*tls, f"--access_file={access}", f"--upstream_token_file={token_file}")
        addresses = json.loads(command.first_line())
        self.assertTrue(addresses["http"].startswith("https://127.0.0.1:"), addresses)
        trusted = ssl.create_default_context(cafile=cert)
        url = f"{addresses['http']}/v1/models"
        with self.assertRaisesRegex(urllib.error.HTTPError, "401"):
            http_get(url, trusted)
        token = Path(token_file).read_text().strip()
        self.assertIn(str(self.model), http_get(url, trusted, Authorization=f"Bearer {token}"))
        with RolloutClient(addresses["grpc"]) as client, self.assertRaises(UnauthenticatedError):
            client.generate([1], max_tokens=1)  # the rollout has the access file as well
        self.assertEqual(command.end(signal.SIGTERM), 0, command.text)

    def test_one_ctrl_c_ends_the_gateway_first(self):
        command = self.serve()
        command.first_line()
        pids = command.children()
        self.assertEqual(pids.keys(), {"rollout", "gateway"})
        self.assertEqual(command.end(signal.SIGINT), 0, command.text)
        self.assertFalse(any(map(is_alive, pids.values())))
        self.assertLess(place(command.said, "Finished server process"), place(command.said, "draining"))
        self.assertNotIn("note:", command.text)

    def test_either_that_dies_ends_the_other(self):
        for kind, other in (("rollout", "gateway"), ("gateway", "rollout")):
            with self.subTest(kind):
                command = self.serve()
                command.first_line()
                pids = command.children()
                os.kill(pids[kind], signal.SIGKILL)
                self.assertEqual(command.end(), 3, command.text)
                self.assertIn(f"error: {kind} ended with status -9", command.text)
                self.assertFalse(is_alive(pids[other]))

    def test_nothing_is_left_when_it_is_killed(self):
        command = self.serve("--workers=2")
        command.first_line()
        pids = list(command.children().values())
        self.assertEqual(len(pids), 2)
        command.end(signal.SIGKILL)
        self.wait_gone(pids)

    def test_a_taken_port(self):
        port = self.taken_port()
        command = self.isobit("serve", str(self.model), f"--port={port}", "--grpc_port=0")
        self.assertEqual(command.end(), 3, command.text)
        self.assertIn(f"--port: cannot listen on 127.0.0.1:{port}", command.text)

    def test_a_model_without_a_tokenizer(self):
        bare = self.log_dir / "bare"
        bare.mkdir()
        for name in ("config.json", "model.safetensors"):
            (bare / name).symlink_to(self.model / name)
        command = self.isobit("serve", str(bare), "--port=0", "--grpc_port=0")
        self.assertEqual(command.end(), 3, command.text)
        self.assertIn("has no tokenizer.json, which HTTP needs; --no_http", command.text)


if __name__ == "__main__":
    unittest.main()
