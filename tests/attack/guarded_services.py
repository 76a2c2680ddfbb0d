"""The services behind their guards, as child processes, for attacks on access."""

import hashlib
import json
import os
import subprocess
import tempfile
import unittest
from pathlib import Path

from isobit import ComparatorClient, RolloutClient, ScorerClient
from isobit_tools.services import Service, Services, run_model_tool

BIN_DIR = Path(os.environ["ISOBIT_BIN_DIR"])
ROLES = ("generate", "score", "compare", "watch", "admin")
CLIENTS = {"rollout": RolloutClient, "scorer": ScorerClient, "comparator": ComparatorClient}


class GuardedServicesTest(unittest.TestCase):
    """Starts services with the flags of a test, on a tiny model."""

    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.scratch = Path(scratch.name).resolve()
        run_model_tool(BIN_DIR, "make", "tiny-llama", str(cls.scratch / "model"), "--seed", "3")
        cls.model_flags = [f"--model_root={cls.scratch}", "--model=model"]

    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(dir=self.scratch))
        self.services = self.enterContext(Services(BIN_DIR, self.folder))

    def start_rollout(self, *flags: str, **security) -> Service:
        return self._start(
            "rollout", [*self.model_flags, "--tp_size=1", "--kv_cache_mb=64", *flags], security
        )

    def start_scorer(self, *flags: str, **security) -> Service:
        return self._start("scorer", [*self.model_flags, "--shards=1", *flags], security)

    def start_comparator(self, *flags: str, **security) -> Service:
        return self._start("comparator", list(flags), security)

    def _start(self, kind: str, flags: list[str], security: dict) -> Service:
        name = f"{kind}-{len(list(self.folder.glob('*.log')))}"
        service = self.services.start(f"isobit-{kind}", name, flags)
        self.services.wait_listening(service)
        with CLIENTS[kind](service.target, **security) as client:
            client.wait_until_serving(30)
        return service

    def refusal(self, kind: str, *flags: str) -> str:
        """What the service says as it refuses to start with `flags`."""
        model = [] if kind == "comparator" else self.model_flags
        command = [str(BIN_DIR / f"isobit-{kind}"), *model, *flags]
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        self.assertNotEqual(result.returncode, 0, result.stderr)
        return result.stderr

    def write_access(self, *extra: dict) -> str:
        """An access file with a client the-ROLE for each role, whose token is token-ROLE; gives its flag."""
        clients = [
            {"name": f"the-{role}", "roles": [role], "token_sha256": [token_hash(f"token-{role}")]}
            for role in ROLES
        ]
        path = self.folder / "access.json"
        path.write_text(json.dumps({"clients": [*clients, *extra]}))
        return f"--access_file={path}"


def token_hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def admin_target(service: Service) -> str:
    return f"127.0.0.1:{int(Path(f'{service.port_file}.admin').read_text())}"
