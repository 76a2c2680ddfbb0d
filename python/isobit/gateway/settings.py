"""The settings of a gateway."""

import dataclasses
from pathlib import Path

from isobit.credentials import Security

MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The flags of `python -m isobit.gateway`; their help describes each."""

    rollout: str  # host:port
    model: Path  # the model directory: tokenizer, chat template, config.json
    scorer: str | None = None  # host:port; for prompt_logprobs and echo
    rollout_admin: str | None = None  # host:port of the rollout's --admin_port, if it has one
    scorer_admin: str | None = None
    served_model_names: tuple[str, ...] = ()  # answers use the first; empty: the directory's name
    model_root: Path | None = None  # the services' --model_root, for weights from directories
    rollout_metrics: str | None = None  # URL of the rollout's /metrics
    upstream: Security = dataclasses.field(default_factory=Security)  # how to connect to the services
    access_file: Path | None = None
    chat_template: str | None = None  # Jinja text that replaces the model's
    tool_call_parser: str = "auto"
    max_body_bytes: int = 64 * MIB  # of one request
    max_bodies_bytes: int = 512 * MIB  # of all requests that a worker holds
    max_header_bytes: int = 64 * 1024  # of one request
    max_connections: int = 16384
    header_timeout_s: float = 30.0  # for the head of a request
    body_timeout_s: float = 120.0  # for its body
    write_timeout_s: float = 60.0  # for a client that does not read
    keep_alive_s: float = 75.0  # of an idle connection
    drain_timeout_s: float = 30.0  # for requests to finish when the gateway ends
    trainer_timeout_s: float = 300.0  # for a trainer to form a group; its own store waits as long

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model, at least one."""
        return self.served_model_names or (self.model.resolve().name,)
