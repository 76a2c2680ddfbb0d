"""A test case with a gateway: real services on a random tiny model with a tokenizer and a chat template."""

import http.client
import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from isobit_tools.services import Service
from isobit_tools.testing import ServiceTest

EOS = 257  # <|im_end|>
# The template of a model that calls tools in Hermes' form.
TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""


def write_tokenizer(directory: Path, merges: int = 200) -> None:
    """Writes a byte-level tokenizer: bytes, two special tokens, and `merges` pairs of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)}
    pairs = [(a, b) for a in "etaoinsrhldcum" for b in "etaoinsrhldcum"][:merges]
    vocab |= {a + b: 258 + i for i, (a, b) in enumerate(pairs)}
    raw = Tokenizer(models.BPE(vocab=vocab | {"<|im_start|>": 256, "<|im_end|>": EOS}, merges=pairs))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    raw.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(fields | {"eos_token_id": EOS, "bos_token_id": 256}))


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
