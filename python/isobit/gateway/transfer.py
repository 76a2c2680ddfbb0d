"""Weights that a trainer broadcasts, as vLLM's NCCL engine expects: from HTTP to the rollout's RPCs.

The rollout joins the trainer's group as one rank, whatever its tensor-parallel size. Each call is answered
when the rollout has answered; the trainer joins, or broadcasts, while it waits.

A call that fails gets a 4xx. Trainers repeat calls that were answered with 5xx, some for minutes. But a lost
group or update does not come back: the trainer has to begin again.
"""

import base64
import binascii
import logging
import re
from collections.abc import Awaitable
from typing import Annotated, Any, TypeVar

import msgspec

from isobit.errors import (
    CancelledError,
    DeadlineExceededError,
    IsobitError,
    UnavailableError,
    UnimplementedError,
)
from isobit.gateway.control import Control
from isobit.gateway.core import Core
from isobit.gateway.errors import NO_RETRY, BadRequest, HttpError, as_http, not_offered
from isobit.gateway.fields import checked, without_nulls
from isobit.gateway.http import Answer, Call
from isobit.weights import WeightSpec

_LOG = logging.getLogger("isobit.gateway")
_Result = TypeVar("_Result")

_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_Rank = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_Bytes = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
# vLLM's names of dtypes; they may have torch's prefix.
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "half": "F16", "float32": "F32", "float": "F32"}
_INIT = "/init_weight_transfer_engine"
# The paths for the RPCs that the rollout's messages name.
_PATHS = {
    "InitWeightTransfer": _INIT,
    "StartWeightTransfer": "/start_weight_update",
    "ReceiveWeights": "/update_weights",
    "FinishWeightTransfer": "/finish_weight_update",
}
_RPC = re.compile("|".join(_PATHS))


class InitInfo(msgspec.Struct, kw_only=True):
    master_address: str | None = None
    master_port: _Port | str | None = None
    rank_offset: _Rank = 1
    world_size: _Rank = 0
    packed: bool = False
    packed_buffer_size_bytes: _Bytes | None = None
    packed_num_buffers: int | None = None  # concerns the sender only: it changes no byte
    nccl_unique_id_b64: str | None = None


class UpdateInfo(msgspec.Struct, kw_only=True):
    names: list[str] = []
    dtype_names: list[str] = []
    shapes: list[list[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]]] = []
    packed: bool | None = None
    packed_buffer_size_bytes: _Bytes | None = None
    packed_num_buffers: int | None = None


class Transfer:
    """The handlers of the calls."""

    def __init__(self, core: Core, control: Control):
        self._engine = core.engine
        self._rollout = core.engine.rollout
        self._control = control
        self._timeout_s = core.settings.trainer_timeout_s

    async def init(self, call: Call) -> Answer:
        body = call.object()
        info = checked(_object(body, "init_info"), InitInfo, "init_info.")
        _only(body, "init_info")
        if info.nccl_unique_id_b64 is not None:
            place, trainer = {"nccl_unique_id": _decoded(info.nccl_unique_id_b64)}, "the trainer"
        else:
            host, port = info.master_address or "", _port(info.master_port)
            place, trainer = {"master_address": host, "master_port": port}, f"the trainer at {host}:{port}"
        joins = self._rollout.init_weight_transfer(
            **place,
            rank_offset=info.rank_offset,
            world_size=info.world_size,
            packed=info.packed,
            packed_buffer_size_bytes=info.packed_buffer_size_bytes,
            timeout=self._timeout_s,
        )
        await self._joined(trainer, joins)
        return Answer({"message": "Weight transfer initialized"})

    async def start(self, call: Call) -> Answer:
        body = call.object()
        if body.pop("is_checkpoint_format", True) is not True:
            raise not_offered("is_checkpoint_format", "expected tensors as in a checkpoint of Hugging Face")
        _only(body)
        # In vLLM requests go on with the new weights; here their keys and values are recomputed first.
        await self._in_group(self._rollout.start_weight_transfer(in_flight="recompute_kv"))
        return Answer({"message": "Weight update started"})

    async def receive(self, body: dict[str, Any]) -> Answer:
        """Handles the body of /update_weights if it has update_info."""
        _only(body, "update_info")
        given = body["update_info"]
        if isinstance(given, list):
            if len(given) != 1:
                raise BadRequest(
                    f"update_info: expected an object, or a list of one, got {len(given)}", "update_info"
                )
            (given,) = given
        if isinstance(given, dict) and (way := {"ipc_handles", "ipc_handles_pickled"} & given.keys()):
            raise not_offered(f"update_info.{way.pop()}", "memory of CUDA IPC comes by gRPC, without pickles")
        info = checked(without_nulls(given, "update_info"), UpdateInfo, "update_info.")
        await self._in_group(
            self._rollout.receive_weights(
                _specs(info),
                packed=info.packed,
                packed_buffer_size_bytes=info.packed_buffer_size_bytes,
            )
        )
        return Answer({"message": "Weights updated"})

    async def finish(self, call: Call) -> Answer:
        body = call.object()
        label = body.pop("weight_version", None)
        if label is not None and not isinstance(label, str | int):
            raise BadRequest("weight_version: expected a text", "weight_version")
        _only(body)
        answer = await self._in_group(self._rollout.finish_weight_transfer())
        if label is not None:
            self._control.set_label(answer.current.id, str(label))
        return Answer({"message": "Weight update finished"})

    async def shutdown(self, call: Call) -> Answer:
        await self._in_group(self._rollout.shutdown_weight_transfer())
        return Answer({"message": "Weight transfer shut down"})

    async def _joined(self, trainer: str, joins: Awaitable[Any]) -> None:
        """Waits until the group is joined.

        Raises:
          HttpError: 409: the trainer does not come.
          IsobitError: the rollout cannot be reached, so nothing has begun.
        """
        _LOG.info("waits for %s, at most %g s", trainer, self._timeout_s)
        try:
            await _asked(joins)
        except DeadlineExceededError as error:
            what = f"{trainer} has formed no group with the rollout within {self._timeout_s:g} s"
            raise _conflict(f"{what}: {error.details}") from error
        except (UnavailableError, CancelledError) as error:
            if not await self._engine.is_serving():
                raise
            raise _conflict(f"{trainer} has formed no group with the rollout: {error.details}") from error
        except IsobitError as error:
            raise _conflict(f"no group with {trainer}: {error.details}") from error

    async def _in_group(self, call: Awaitable[_Result]) -> _Result:
        """Returns the answer of a call that needs the group.

        Raises:
          HttpError: 409: the group is lost, and so is what was received.
        """
        try:
            return await _asked(call)
        except IsobitError as error:
            what = f"the weight transfer is lost: {_by_path(error.details)}; begin again with {_INIT}"
            raise _conflict(what) from error


async def _asked(call: Awaitable[_Result]) -> _Result:
    """Returns the answer of a call.

    Raises:
      HttpError: 4xx: the rollout refuses the call.
      IsobitError: any other error, unchanged.
    """
    try:
        return await call
    except UnimplementedError as error:
        raise not_offered(
            "weight transfer by NCCL", error.details or "the rollout is of a release that has none"
        ) from error
    except IsobitError as error:
        refused = as_http(error)
        if refused.status >= 500:
            raise
        raise HttpError(refused.status, _by_path(refused.message), refused.param, refused.headers) from error


def _conflict(message: str) -> HttpError:
    _LOG.warning("%s", message)
    return HttpError(409, message, headers=NO_RETRY)


def _by_path(message: str) -> str:
    """Returns the rollout's `message` with paths in place of RPCs."""
    return _RPC.sub(lambda found: _PATHS[found[0]], message)


def _specs(info: UpdateInfo) -> list[WeightSpec]:
    if not len(info.names) == len(info.dtype_names) == len(info.shapes):
        raise BadRequest(
            f"update_info: expected as many names as dtype_names and shapes, got {len(info.names)},"
            f" {len(info.dtype_names)} and {len(info.shapes)}",
            "update_info",
        )
    found = []
    for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
        known = _DTYPES.get(dtype.removeprefix("torch."))
        if known is None:
            raise BadRequest(
                f"update_info.dtype_names: {name[:256]} is {dtype[:64]},"
                " expected bfloat16, float16 or float32",
                "update_info.dtype_names",
            )
        found.append(WeightSpec(name, known, tuple(shape)))
    return found


def _object(body: dict[str, Any], name: str) -> dict[str, Any]:
    if name not in body:
        raise BadRequest(f"{name}: expected an object", name)
    return without_nulls(body[name], name)


def _only(body: dict[str, Any], *names: str) -> None:
    for name in body:
        if name not in names:
            raise BadRequest(f"{name[:64]}: isobit knows no such field", name[:64])


def _port(given: int | str | None) -> int:
    name = "init_info.master_port"
    if isinstance(given, str) and given.isascii() and given.isdecimal() and 0 < int(given) < 65536:
        return int(given)
    if not isinstance(given, int):
        raise BadRequest(f"{name}: expected a port, got {str(given)[:64]}", name)
    return given


def _decoded(text: str) -> bytes:
    name = "init_info.nccl_unique_id_b64"
    try:
        found = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest(f"{name}: expected base64", name) from None
    if len(found) != 128:
        raise BadRequest(f"{name}: expected 128 bytes, got {len(found)}", name)
    return found
