"""A test case with a gateway: real services on a random tiny model with a tokenizer and a chat template."""

import http.client
import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobit_tools.byte_tokenizer import write_tokenizer
from isobit_tools.services import Service
from isobit_tools.testing import ServiceTest


@dataclass
class Gateway:
    """One running gateway."""

    process: subprocess.Popen
    log: Path
    port: int
    open_port: int | None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self, method: str, path: str, body: Any = None, timeout: float = 60.0, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Returns status, headers and body of the answer. `body`: bytes, or a value that becomes JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            headers = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, data, {"content-type": "application/json"} | headers)
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any = None, **headers: str) -> Any:
        """Returns the JSON in the answer to a POST. Raises AssertionError if the status is not 200."""
        status, _, text = self.request("POST", path, body, **headers)
        if status != 200:
            raise AssertionError(f"{path} answered {status}: {text[:2000]!r}")
        return json.loads(text)

    def get(self, path: str, **headers: str) -> Any:
        """Like post, for GET."""
        status, _, text = self.request("GET", path, **headers)
        if status != 200:
            raise AssertionError(f"{path} answered {status}: {text[:2000]!r}")
        return json.loads(text)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Sends the signal and returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(60)


class GatewayTest(ServiceTest):
    """Like ServiceTest; the model has a tokenizer and a chat template."""

    @classmethod
    def make_model(cls) -> None:
        super().make_model()
        write_tokenizer(cls.model)

    def start_gateway(
        self,
        rollout: Service | str,
        scorer: Service | str | None = None,
        *flags: str,
        model: Path | None = None,
    ) -> Gateway:
        """Starts a gateway and waits until it listens; the services behind it need not serve yet. It ends
        with the test."""
        number = len(list(self.log_dir.glob("gateway-*.log")))
        log, port_file = self.log_dir / f"gateway-{number}.log", self.log_dir / f"gateway-{number}.port"
        target = rollout if isinstance(rollout, str) else rollout.target
        command = [
            sys.executable,
            "-m",
            "isobit.gateway",
            f"--rollout={target}",
            f"--model={model or self.model}",
        ]
        command += ["--port=0", f"--port_file={port_file}", "--served_model_name=tiny"]
        if scorer is not None:
            command.append(f"--scorer={scorer if isinstance(scorer, str) else scorer.target}")
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, *flags], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self.addCleanup(self._end, process)

        def listens() -> bool:
            self.assertIsNone(process.poll(), log.read_text)
            return port_file.is_file()

        self.wait_until(listens, f"the gateway does not listen; {log} says why", timeout=60.0)
        opened = port_file.with_name(f"{port_file.name}.open")
        return Gateway(
            process, log, int(port_file.read_text()), int(opened.read_text()) if opened.is_file() else None
        )

    def _end(self, process: subprocess.Popen) -> None:
        if process.poll() is None:
            process.kill()
        process.wait()
