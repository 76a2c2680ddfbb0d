"""The services with access control, as child processes, for attacks on it."""

import hashlib
import json
import subprocess
from pathlib import Path

from isobit.launch import Service
from isobit_tools.testing import BIN_DIR, ServiceTest

ROLES = ("generate", "score", "compare", "watch", "admin")


class GuardedServicesTest(ServiceTest):
    """Services that must admit only the clients of an access file, or must refuse to start."""

    def refusal(self, kind: str, *flags: str) -> str:
        """The service's error when it refuses to start with `flags`."""
        model = [] if kind == "comparator" else [f"--model_root={self.scratch}", "--model=model"]
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
        path = self.log_dir / "access.json"
        path.write_text(json.dumps({"clients": [*clients, *extra]}))
        return f"--access_file={path}"


def token_hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def admin_target(service: Service) -> str:
    return f"127.0.0.1:{int(Path(f'{service.port_file}.admin').read_text())}"
