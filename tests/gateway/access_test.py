"""Tests of who may call a gateway: tokens and roles, the port without tokens, TLS, browsers.

python tests/gateway/access_test.py
"""

import asyncio
import http.client
import json
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path

from scripted_rollout import ScriptedRollout

from isobit.errors import PermissionDeniedError
from isobit.gateway.caller import as_caller
from isobit.gateway.engine import Engine
from isobit.gateway.settings import Settings
from isobit_tools.gateway_testing import Gateway, GatewayTest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/attack"))
from certificates import Authority  # noqa: E402
from guarded_services import ROLES, token_hash  # noqa: E402

PROMPT = {"prompt": [1, 2], "max_tokens": 2}


class AccessTest(GatewayTest):
    def write_access(self, roles=ROLES) -> str:
        clients = [
            {"name": f"the-{role}", "roles": [role], "token_sha256": [token_hash(f"token-{role}")]}
            for role in roles
        ]
        self.access = self.log_dir / "access.json"
        part = self.log_dir / "access.json.part"
        part.write_text(json.dumps({"clients": clients}))
        part.replace(self.access)
        return f"--access_file={self.access}"

    def write_own_token(self) -> str:
        path = self.log_dir / "own.token"
        path.write_text("token-watch\n")
        return f"--upstream_token_file={path}"

    def status(self, gateway: Gateway, path: str, role: str | None, body=None, method: str = "POST") -> int:
        headers = {} if role is None else {"authorization": f"Bearer token-{role}"}
        return gateway.request(method, path, body, **headers)[0]

    def test_roles_are_those_of_the_services(self):
        access = self.write_access()
        rollout = self.start("rollout", access, token="token-watch")
        gateway = self.start_gateway(rollout, None, access, self.write_own_token())
        for role in ROLES:
            expected = 200 if role == "generate" else 403
            self.assertEqual(self.status(gateway, "/v1/completions", role, PROMPT), expected, role)
            self.assertEqual(self.status(gateway, "/v1/models", role, method="GET"), 200, role)
            expected = 200 if role in ("watch", "admin") else 403
            self.assertEqual(self.status(gateway, "/metrics", role, method="GET"), expected, role)
        for role in (None, "nobody"):
            self.assertEqual(self.status(gateway, "/v1/completions", role, PROMPT), 401)
            self.assertEqual(self.status(gateway, "/tokenize", role, {"prompt": "x"}), 401)
        self.assertEqual(self.status(gateway, "/health", None, method="GET"), 200)
        _, headers, body = gateway.request("POST", "/v1/completions", PROMPT)
        self.assertEqual(headers["www-authenticate"], "Bearer")
        self.assertEqual(json.loads(body)["error"]["type"], "AuthenticationError")

    def test_the_service_judges_too(self):
        """The gateway's file says more than the service's: the caller's own token is what counts there."""
        rollout = self.start("rollout", self.write_access(("watch", "admin")), token="token-watch")
        own = self.write_own_token()
        gateway = self.start_gateway(rollout, None, self.write_access(), own)
        # The service has read its file again since, or has not; either way it does not take this caller.
        self.write_access(("watch", "admin"))
        open_gateway = self.start_gateway(rollout, None, own)
        self.assertIn(self.status(gateway, "/v1/completions", "generate", PROMPT), (401, 403))
        # Control: with the gateway's own token, which may only watch.
        self.assertEqual(self.status(open_gateway, "/v1/completions", "generate", PROMPT), 403)

    def test_the_file_is_read_again(self):
        rollout = self.enterContext(ScriptedRollout(lambda request: [[1]]))
        gateway = self.start_gateway(rollout.target, None, self.write_access())
        self.assertEqual(self.status(gateway, "/v1/completions", "generate", PROMPT), 200)
        self.assertEqual(rollout.metadata[-1]["authorization"], "Bearer token-generate")
        self.write_access(("watch",))
        self.assertEqual(self.status(gateway, "/v1/completions", "generate", PROMPT), 401)
        self.access.write_text("{broken")
        self.assertEqual(self.status(gateway, "/v1/models", "watch", method="GET"), 200)
        self.write_access()
        self.assertEqual(self.status(gateway, "/v1/completions", "generate", PROMPT), 200)

    def test_the_open_port(self):
        rollout = self.enterContext(ScriptedRollout(lambda request: [[1]]))
        gateway = self.start_gateway(
            rollout.target, None, self.write_access(), "--open_port=0", self.write_own_token()
        )
        opened = Gateway(gateway.process, gateway.log, gateway.open_port, None)
        self.assertEqual(self.status(gateway, "/v1/completions", None, PROMPT), 401)
        self.assertEqual(self.status(opened, "/v1/completions", None, PROMPT), 200)
        self.assertEqual(rollout.metadata[-1]["authorization"], "Bearer token-watch")  # the gateway's own
        # A client that has to send some token sends any.
        self.assertEqual(self.status(opened, "/v1/completions", "anything", PROMPT), 200)
        self.assertEqual(rollout.metadata[-1]["authorization"], "Bearer token-watch")

    def test_the_services_admin_port(self):
        rollout = self.start("rollout", self.write_access(), "--admin_port=0", token="token-admin")
        admin = f"127.0.0.1:{int(Path(f'{rollout.port_file}.admin').read_text())}"

        async def pause(**options: str) -> None:
            engine = Engine(Settings(rollout=rollout.target, model=self.model, **options))
            try:
                with as_caller("token-admin"):
                    await engine.rollout.pause_generation("keep")
                    await engine.rollout.continue_generation()
                with as_caller("token-generate"):
                    await engine.rollout.generate([1, 2], max_tokens=1)  # at the main port, as before
            finally:
                await engine.close()

        asyncio.run(pause(rollout_admin=admin))
        with self.assertRaises(PermissionDeniedError):
            asyncio.run(pause())

    def test_tls(self):
        authority = Authority(self.log_dir, "ca")
        server, client = authority.sign_server(), authority.sign("client")
        rollout = self.enterContext(ScriptedRollout(lambda request: [[1]]))
        gateway = self.start_gateway(
            rollout.target, None, f"--tls_cert={server.cert}", f"--tls_key={server.key}",
            f"--tls_client_ca={authority.cert}", "--open_port=0",
        )  # fmt: skip
        context = ssl.create_default_context(cafile=authority.cert)
        context.load_cert_chain(client.cert, client.key)
        url = f"https://127.0.0.1:{gateway.port}/v1/models"
        with urllib.request.urlopen(url, context=context, timeout=30) as answer:
            self.assertEqual(answer.status, 200)
        with self.assertRaises(OSError):  # no certificate
            urllib.request.urlopen(url, context=ssl.create_default_context(cafile=authority.cert), timeout=30)
        with self.assertRaises((OSError, http.client.HTTPException)):  # no TLS
            gateway.request("GET", "/v1/models")
        opened = Gateway(gateway.process, gateway.log, gateway.open_port, None)
        self.assertEqual(self.status(opened, "/v1/models", None, method="GET"), 200)

    def test_pages_of_other_sites_are_refused(self):
        rollout = self.enterContext(ScriptedRollout(lambda request: [[1]]))
        gateway = self.start_gateway(rollout.target)
        for headers in ({"origin": "http://evil.example"}, {"host": f"evil.example:{gateway.port}"}):
            self.assertEqual(gateway.request("POST", "/v1/completions", PROMPT, **headers)[0], 403)
        self.assertEqual(rollout.requests, [])
        own = {"origin": gateway.url, "host": f"127.0.0.1:{gateway.port}"}
        self.assertEqual(gateway.request("POST", "/v1/completions", PROMPT, **own)[0], 200)

    def test_what_is_not_safe_is_refused_at_the_start(self):
        def refusal(*flags: str) -> str:
            command = [sys.executable, "-m", "isobit.gateway", f"--model={self.model}", "--port=0", *flags]
            result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            self.assertEqual(result.returncode, 2, result.stderr)
            return result.stderr

        local = "--rollout=127.0.0.1:1"
        self.assertIn("--insecure", refusal(local, "--host=0.0.0.0"))
        self.assertIn("--tls_key", refusal(local, "--tls_cert=x"))
        self.assertIn("another host", refusal("--rollout=10.1.2.3:1", self.write_own_token()))
        self.assertIn("others could read", refusal("--rollout=10.1.2.3:1", self.write_access()))
        self.assertIn("access file", refusal(local, f"--access_file={self.model / 'config.json'}"))
        self.assertIn("host:port", refusal("--rollout=nowhere"))
        self.assertIn("tokenizer.json", refusal(local, f"--model={self.scratch}"))


if __name__ == "__main__":
    import unittest

    unittest.main()
