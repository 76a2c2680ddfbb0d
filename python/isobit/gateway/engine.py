"""The services behind a gateway: isobit's asyncio clients, whose calls carry the caller's token."""

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import grpc

from isobit import aio
from isobit.errors import IsobitError
from isobit.gateway.caller import as_caller, token_to_forward
from isobit.gateway.settings import Settings
from isobit.health import HealthCheckRequest, ServingStatus
from isobit.targets import is_loopback
from isobit.v1 import rollout_pb2, scorer_pb2

_HEALTH_TIMEOUT_S = 5.0


# The methods that a service with --admin_port serves at its main port.
_AT_MAIN_PORT = frozenset(("Generate", "Abort", "Score", "Tap", "GetServerInfo", "GetLoad"))


class _Forwarding:
    """A client whose calls carry the caller's token, or its own if there is none."""

    admin: "_Forwarding | None" = None  # a client for the service's admin port, if it has one

    async def _start(self, method: str, request: Any, timeout: float | None) -> grpc.aio.Call:
        if self.admin is not None and method not in _AT_MAIN_PORT:
            return await self.admin._start(method, request, timeout)
        return await super()._start(method, request, timeout)

    async def close(self) -> None:
        if self.admin is not None:
            await self.admin.close()
        await super().close()

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        token = token_to_forward()
        if token is None:
            return super()._metadata()
        return (("authorization", f"Bearer {token}"),) if self.may_forward else ()

    def own_metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of the gateway's own calls."""
        return super()._metadata()

    @property
    def may_forward(self) -> bool:
        """Whether no one on the network can read a forwarded token."""
        return self._endpoint.credentials is not None or is_loopback(self.target)

    async def is_serving(self) -> bool:
        """Whether the service reports that it serves."""
        self._open()
        call = self._health.Check(HealthCheckRequest(), timeout=_HEALTH_TIMEOUT_S)
        with self._reachability.of_call(), self._in_flight(call):
            return (await call).status == ServingStatus.SERVING


class RolloutClient(_Forwarding, aio.RolloutClient):
    """Like isobit.aio.RolloutClient, with forwarded tokens."""

    def events(self, request: rollout_pb2.GenerateRequest, waits: bool) -> AsyncGenerator[Any, None]:
        """Yields the messages of a Generate call as they come. Closing the iterator ends the call. waits:
        wait while the queue is full; False raises ResourceExhaustedError."""
        return self._stream("Generate", request, None, lambda response: (response,), waits)


class ScorerClient(_Forwarding, aio.ScorerClient):
    """Like isobit.aio.ScorerClient, with forwarded tokens."""

    def results(self, request: scorer_pb2.ScoreRequest) -> AsyncGenerator[Any, None]:
        """Yields the messages of a Score call as they come, in any order."""
        return self._stream("Score", request, None, lambda response: (response,), waits=False)


class Engine:
    """The rollout and, if there is one, the scorer. It belongs to the event loop of its first call."""

    def __init__(self, settings: Settings):
        """Makes the clients.

        Raises:
          ValueError: a token would go to another host in plain text.
        """
        self.rollout = RolloutClient(settings.rollout, **settings.upstream)
        self.has_token = bool({"token", "token_file"} & settings.upstream.keys())
        self.scorer = None
        if settings.rollout_admin:
            self.rollout.admin = RolloutClient(settings.rollout_admin, **settings.upstream)
        if settings.scorer:
            self.scorer = ScorerClient(settings.scorer, **settings.upstream)
            if settings.scorer_admin:
                self.scorer.admin = ScorerClient(settings.scorer_admin, **settings.upstream)
        for service in (self.rollout, self.rollout.admin, self.scorer, self.scorer and self.scorer.admin):
            if settings.access_file and service is not None and not service.may_forward:
                raise ValueError(
                    f"{service.target} is another host: with --access_file it needs --upstream_tls_ca, since"
                    " others could read the callers' tokens in plain text"
                )

    async def info(self) -> rollout_pb2.RolloutServerInfo:
        """Returns the rollout's description of itself, asked with the gateway's own token."""
        with as_caller(None):
            return await self.rollout.get_server_info()

    def own_token(self) -> str | None:
        """The gateway's own token, or None."""
        metadata = dict(self.rollout.own_metadata())
        return metadata["authorization"].partition(" ")[2] if metadata else None

    async def is_serving(self) -> bool:
        """Whether the rollout can be reached and serves. A paused rollout serves, too."""
        with contextlib.suppress(IsobitError):
            return await self.rollout.is_serving()
        return False

    async def close(self) -> None:
        await self.rollout.close()
        if self.scorer is not None:
            await self.scorer.close()
