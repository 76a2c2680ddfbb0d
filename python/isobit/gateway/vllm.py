"""vLLM's own paths, as far as trainers call them: generation on tokens, pauses, sleep, weights.

docs/http.md, "vLLM's paths", lists the differences.
"""

from typing import Any

from starlette.routing import Route

from isobit.gateway import refused
from isobit.gateway.control import KV_CACHE, TAGS, WEIGHTS, control_of
from isobit.gateway.core import Core
from isobit.gateway.errors import BadRequest, not_offered
from isobit.gateway.fields import json_of, without_nulls
from isobit.gateway.http import Answer, AnyAnswer, Call
from isobit.gateway.server_info import server_info
from isobit.gateway.status import LOOK
from isobit.gateway.transfer import Transfer
from isobit.gateway.vllm_generate import generate

ADMIN = ("admin",)
_MODES = ("abort", "wait", "keep")
_ID_PREFIXES = ("generate-tokens-", "chatcmpl-", "cmpl-")


def routes(core: Core) -> list[Route]:
    return [
        *_requests(core),
        *_pauses(core),
        *_sleeping(core),
        *_weights(core),
        *_descriptions(core),
        *refused.routes(core, refused.VLLM, ADMIN),
    ]


def _requests(core: Core) -> list[Route]:
    async def tokens(call: Call) -> AnyAnswer:
        return await generate(core, call)

    async def abort_some(call: Call) -> Answer:
        return await _abort(core, _ids(call))

    async def abort(call: Call) -> Answer:
        return await _abort(core, _ids(call) or None)

    return [
        core.route("/inference/v1/generate", tokens, ("POST",), roles=("generate",)),
        core.route("/inference/v1/abort_requests", abort_some, ("POST",), roles=("generate", "admin")),
        core.route("/abort_requests", abort, ("POST",), roles=ADMIN),
    ]


async def _abort(core: Core, ids: list[str] | None) -> Answer:
    """Ends the requests with these ids; None: all."""
    ended = await (core.engine.rollout.abort_all() if ids is None else core.engine.rollout.abort(ids))
    return Answer({"status": "aborted", "aborted": len(ended)})


def _ids(call: Call) -> list[str]:
    ids = call.object().get("request_ids", [])
    if not isinstance(ids, list) or not all(isinstance(item, str) for item in ids):
        raise BadRequest("request_ids: expected a list of texts", "request_ids")
    found = list(ids)
    for name in ids:  # the ids of answers
        found += [name.removeprefix(prefix) for prefix in _ID_PREFIXES if name.startswith(prefix)]
    return found


def _pauses(core: Core) -> list[Route]:
    rollout = core.engine.rollout

    async def pause(call: Call) -> Answer:
        mode = call.query.get("mode") or "abort"
        if mode == "abort" and _flag(call, "wait_for_inflight_requests"):
            mode = "wait"
        await rollout.pause_generation(_mode(mode))
        return Answer({"status": "paused"})

    async def resume(call: Call) -> Answer:
        await control_of(core).resume()
        return Answer({"status": "resumed"})

    async def is_paused(call: Call) -> Answer:
        return Answer({"is_paused": (await rollout.get_load()).paused})

    return [
        core.route("/pause", pause, ("POST",), roles=ADMIN),
        core.route("/resume", resume, ("POST",), roles=ADMIN),
        core.route("/is_paused", is_paused, ("GET",), roles=LOOK),
    ]


def _mode(given: str) -> str:
    if given not in _MODES:
        raise BadRequest(f"mode is {given[:64]!r}, expected one of {', '.join(_MODES)}", "mode")
    return given


def _flag(call: Call, name: str) -> bool:
    value = call.query.get(name, "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise BadRequest(f"{name} is {value[:64]!r}, expected true or false", name)
    return value in ("true", "1")


def _sleeping(core: Core) -> list[Route]:
    control, rollout = control_of(core), core.engine.rollout

    async def sleep(call: Call) -> Answer:
        level, mode = call.query.get("level") or "1", _mode(call.query.get("mode") or "abort")
        if level not in ("0", "1", "2"):
            raise BadRequest(f"level is {level[:64]!r}, expected 0, 1 or 2", "level")
        if level == "0":
            await rollout.pause_generation(mode)
        else:
            await control.sleep(_tags(call) or TAGS, mode, keep_weights=level == "1")
        return Answer({"status": "sleeping", "level": int(level)})

    async def wake_up(call: Call) -> Answer:
        tags = _tags(call)
        load = await rollout.get_load()
        if load.paused and not load.asleep and not tags - {"scheduling"}:
            await rollout.continue_generation()  # ends a sleep of level 0
        left = await control.wake_up(tags & TAGS)
        return Answer({"status": "sleeping" if left else "awake", "tags": sorted(tags) or None})

    async def is_sleeping(call: Call) -> Answer:
        return Answer({"is_sleeping": (await rollout.get_load()).asleep})

    return [
        core.route("/sleep", sleep, ("POST",), roles=ADMIN),
        core.route("/wake_up", wake_up, ("POST",), roles=ADMIN),
        core.route("/is_sleeping", is_sleeping, ("GET",), roles=LOOK),
    ]


def _tags(call: Call) -> set[str]:
    tags = {tag for tag in call.query.getlist("tags") if tag}
    if unknown := tags - {WEIGHTS, KV_CACHE, "scheduling"}:
        raise BadRequest(f"tags: {sorted(unknown)[0][:64]!r} is none of weights, kv_cache", "tags")
    return tags


def _weights(core: Core) -> list[Route]:
    control = control_of(core)
    transfer = Transfer(core, control)

    async def update_weights(call: Call) -> Answer:
        body = json_of(call.body) if call.body.strip() else {}
        if isinstance(body, dict) and "weight_dir" in body:
            return await from_directory(body)
        body = without_nulls(body, "the request")
        if "update_info" not in body:
            raise BadRequest("expected update_info, or weight_dir", "update_info")
        return await transfer.receive(body)

    async def from_directory(body: dict[str, Any]) -> Answer:
        directory, label = body["weight_dir"], body.get("weight_version")
        if directory is None:
            raise BadRequest(
                "weight_dir is null, which is prime-rl's NCCL transport, expected a directory: set"
                " weight_broadcast.type = filesystem",
                "weight_dir",
            )
        _text(directory, "weight_dir")
        # The rollout's default would end requests that a pause has kept.
        current = await control.update_from_directory(
            directory, field="weight_dir", in_flight="recompute_kv",
            label=None if label is None else str(label),
        )  # fmt: skip
        return Answer({"status": "ok", "message": "Weights updated", "weight_version": _name(current.id)})

    async def weight_info(call: Call) -> Answer:
        return Answer({"weight_version": await control.label()})

    async def reset_prefix_cache(call: Call) -> Answer:
        return Answer(
            {"success": True}
        )  # keys are never used with other weights than those that computed them

    async def collective_rpc(call: Call) -> Answer:
        method = str(call.object().get("method"))[:128]
        raise not_offered("collective_rpc", f"isobit has no method {method!r} of workers")

    async def areal_update(call: Call) -> Answer:
        given = _text(call.object().get("model_path"), "model_path")
        await control.update_from_directory(given, field="model_path", in_flight="abort")
        return Answer({"success": True, "message": "Weights updated"})

    async def areal_pause(call: Call) -> Answer:
        await core.engine.rollout.pause_generation("abort")
        return Answer({"success": True, "message": "Generation paused"})

    async def areal_continue(call: Call) -> Answer:
        await control.resume()
        return Answer({"success": True, "message": "Generation continued"})

    def _name(version: int) -> str:
        return control.notes.read().label(version)

    handlers = {
        "/update_weights": update_weights,
        "/init_weight_transfer_engine": transfer.init,
        "/start_weight_update": transfer.start,
        "/finish_weight_update": transfer.finish,
        "/shutdown_weight_transfer_engine": transfer.shutdown,
        "/reset_prefix_cache": reset_prefix_cache,
        "/reset_mm_cache": reset_prefix_cache,
        "/reset_encoder_cache": reset_prefix_cache,
        "/collective_rpc": collective_rpc,
        "/areal_update_weights": areal_update,
        "/areal_pause_generation": areal_pause,
        "/areal_continue_generation": areal_continue,
    }
    return [
        *(core.route(path, handler, ("POST",), roles=ADMIN) for path, handler in handlers.items()),
        core.route("/weight_info", weight_info, ("GET",), roles=LOOK),
    ]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{name}: expected a text", name)
    return value


def _descriptions(core: Core) -> list[Route]:
    async def world_size(call: Call) -> Answer:
        return Answer(
            {"world_size": 1}
        )  # ranks in a trainer's group: the rollout distributes the weights itself

    async def describe(call: Call) -> Answer:
        return Answer(await server_info(core))

    async def liveness(call: Call) -> Answer:
        return Answer({"status": "ok"})

    return [
        core.route("/get_world_size", world_size, ("GET",), roles=LOOK),
        core.route("/server_info", describe, ("GET",), roles=LOOK),
        core.route("/get_server_info", describe, ("GET",), roles=LOOK),
        core.route("/liveness", liveness, ("GET",)),
    ]
