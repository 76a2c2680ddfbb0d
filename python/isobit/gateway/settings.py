"""What a gateway is told when it starts."""

import dataclasses
from pathlib import Path

from isobit.credentials import Security

MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """As the flags of `python -m isobit.gateway`, which document each."""

    rollout: str  # host:port of its gRPC
    model: Path  # a directory: tokenizer, chat template, config.json
    scorer: str | None = None  # for prompt_logprobs
    rollout_admin: str | None = None  # host:port of the rollout's --admin_port, if it has one
    scorer_admin: str | None = None
    served_model_names: tuple[str, ...] = ()  # the first is the one that answers name; none: the directory's
    model_root: Path | None = None  # as the services' --model_root, for weights in directories
    rollout_metrics: str | None = None  # address of the rollout's /metrics
    upstream: Security = dataclasses.field(default_factory=Security)  # how the services are reached
    access_file: Path | None = None
    chat_template: str | None = None  # Jinja text in place of the model's
    tool_call_parser: str = "auto"
    max_body_bytes: int = 64 * MIB  # of one request
    max_bodies_bytes: int = 512 * MIB  # of all requests in hand together
    max_header_bytes: int = 64 * 1024  # of one request
    max_connections: int = 16384
    header_timeout_s: float = 30.0  # for the head of a request
    body_timeout_s: float = 120.0  # for its body
    write_timeout_s: float = 60.0  # for a client that reads nothing
    keep_alive_s: float = 75.0  # of an idle connection
    drain_timeout_s: float = 30.0  # for requests in hand when the gateway ends
    trainer_timeout_s: float = 300.0  # for a trainer to form a group: as long as its own store waits

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model, at least one."""
        return self.served_model_names or (self.model.resolve().name,)
