"""SGLang's own paths, as far as trainers call them: generation, pauses, weights from directories, memory.

docs/http.md, "SGLang's paths", lists the differences.
"""

from typing import Any

from starlette.routing import Route

from isobit.gateway import refused
from isobit.gateway.control import TAGS, control_of
from isobit.gateway.core import Core
from isobit.gateway.errors import BadRequest, HttpError, not_offered, openai_body
from isobit.gateway.http import Answer, AnyAnswer, Call
from isobit.gateway.server_info import model_info
from isobit.gateway.sglang_generate import generate
from isobit.gateway.status import ANYBODY, LOOK

ADMIN = ("admin",)
_TEXT = b"text/plain; charset=utf-8"
_TAGS = TAGS | {"cuda_graph"}  # graphs stay valid, and hold no memory that could be freed
_LOAD_FORMATS = ("auto", "safetensors")
# These fields change nothing here: no cache outlives its weights, and the answer comes after the switch.
_OF_UPDATE = (
    "flush_cache", "is_async", "keep_pause", "manifest", "recapture_cuda_graph", "selector", "token_step",
    "torch_empty_cache",
)  # fmt: skip


def control_body(error: HttpError) -> dict[str, Any]:
    """SGLang's form of a control call's error, with the field `error` that all other clients look for."""
    return {"success": False, "message": error.message, **openai_body(error)}


def routes(core: Core) -> list[Route]:
    return [
        *_requests(core),
        *_pauses(core),
        *_weights(core),
        *_memory(core),
        *_descriptions(core),
        *refused.routes(core, refused.SGLANG, ADMIN, control_body),
    ]


def _requests(core: Core) -> list[Route]:
    rollout = core.engine.rollout

    async def tokens(call: Call) -> AnyAnswer:
        return await generate(core, call)

    async def abort(call: Call) -> Answer:
        body = call.object()
        if body.get("abort_all") is True:
            await rollout.abort_all()
        elif isinstance(rid := body.get("rid", ""), str):
            if rid:
                await rollout.abort(rid)
        else:
            raise BadRequest("rid: expected a text", "rid")
        return Answer(b"")

    async def loads(call: Call) -> Answer:
        load = await rollout.get_load()
        return Answer({
            "loads": [{
                "dp_rank": 0,
                "num_running_reqs": load.num_running_requests,
                "num_waiting_reqs": load.num_waiting_requests,
                "num_waiting_uncached_tokens": load.num_queued_tokens,
            }],
        })  # fmt: skip

    return [
        core.route("/generate", tokens, ("POST", "PUT"), roles=("generate",)),
        core.route("/abort_request", abort, ("POST",), roles=("generate", "admin")),
        core.route("/v1/loads", loads, ("GET",), roles=ANYBODY),
    ]


def _pauses(core: Core) -> list[Route]:
    rollout = core.engine.rollout

    async def pause(call: Call) -> Answer:
        mode = call.object().get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise BadRequest(f"mode is {str(mode)[:64]!r}, expected abort, retract or in_place", "mode")
        # In both other modes requests are kept, and recomputed if the weights change before they go on.
        await rollout.pause_generation("abort" if mode == "abort" else "keep")
        return Answer({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(call: Call) -> Answer:
        await control_of(core).resume()
        return Answer({"message": "Generation continued successfully.", "status": "ok"})

    async def flush(call: Call) -> Answer:
        return Answer(b"Cache flushed.\n", media_type=_TEXT)

    return [
        core.route("/pause_generation", pause, ("POST",), roles=ADMIN, errors=control_body),
        core.route("/continue_generation", resume, ("POST",), roles=ADMIN, errors=control_body),
        core.route("/flush_cache", flush, ("GET", "POST"), roles=ADMIN, errors=control_body),
    ]


def _weights(core: Core) -> list[Route]:
    control, rollout = control_of(core), core.engine.rollout

    async def from_disk(call: Call) -> Answer:
        body = call.object()
        path = body.pop("model_path", None)
        if not isinstance(path, str) or not path:
            raise BadRequest("model_path: expected the path of a directory", "model_path")
        if (way := body.pop("load_format", "auto")) not in _LOAD_FORMATS:
            raise not_offered("load_format", f"{str(way)[:64]!r}, expected one of {', '.join(_LOAD_FORMATS)}")
        label, ends = body.pop("weight_version", None), body.pop("abort_all_requests", False)
        if label is not None and not isinstance(label, str | int):
            raise BadRequest("weight_version: expected a text", "weight_version")
        if not isinstance(ends, bool):
            raise BadRequest("abort_all_requests: expected true or false", "abort_all_requests")
        for name in body:
            if name not in _OF_UPDATE:
                raise BadRequest(f"{name[:64]}: isobit knows no such field", name[:64])
        current = await control.update_from_directory(
            path,
            field="model_path",
            in_flight="abort" if ends else None,
            label=None if label is None else str(label),
        )
        return Answer({
            "success": True,
            "message": f"Succeeded to update model weights: version {current.id}, digest {current.digest}",
            "num_paused_requests": 0,
        })  # fmt: skip

    async def set_version(call: Call) -> Answer:
        body = call.object()
        label = body.get("new_version")
        if not isinstance(label, str) or not label:
            raise BadRequest("new_version: expected a text", "new_version")
        if body.get("abort_all_requests") is True:
            await rollout.abort_all()
        control.set_label((await control.version()).id, label)
        return Answer(
            {"success": True, "message": f"Weight version updated to {label}", "new_version": label}
        )

    async def version(call: Call) -> Answer:
        return Answer({"weight_version": await control.label()})

    return [
        core.route("/update_weights_from_disk", from_disk, ("POST",), roles=ADMIN, errors=control_body),
        core.route("/update_weight_version", set_version, ("POST",), roles=ADMIN, errors=control_body),
        core.route("/get_weight_version", version, ("GET",), roles=LOOK, errors=control_body),
        core.route("/weight_version", version, ("GET",), roles=LOOK, errors=control_body),
    ]


def _memory(core: Core) -> list[Route]:
    control = control_of(core)

    async def release(call: Call) -> Answer:
        await control.sleep(_tags(call) or TAGS, "keep")
        return Answer(b"null")

    async def resume(call: Call) -> Answer:
        tags = _tags(call)
        if not tags or tags & TAGS:
            await control.wake_up(tags & TAGS)
        return Answer(b"null")

    return [
        core.route("/release_memory_occupation", release, ("GET", "POST"), roles=ADMIN, errors=control_body),
        core.route("/resume_memory_occupation", resume, ("GET", "POST"), roles=ADMIN, errors=control_body),
    ]


def _tags(call: Call) -> set[str]:
    tags = call.object().get("tags", [])
    if not isinstance(tags, list) or any(tag not in _TAGS for tag in tags):
        raise BadRequest(f"tags: expected a list of {', '.join(sorted(_TAGS))}", "tags")
    return set(tags)


def _descriptions(core: Core) -> list[Route]:
    async def describe(call: Call) -> Answer:
        return Answer(await model_info(core))

    async def health(call: Call) -> Answer:
        # A paused or sleeping rollout counts as healthy, since slime ends an engine after one other answer.
        return Answer(b"", 200 if await core.engine.is_serving() else 503)

    return [
        core.route("/model_info", describe, ("GET",), roles=LOOK),
        core.route("/get_model_info", describe, ("GET",), roles=LOOK),
        core.route("/health_generate", health, ("GET",)),
    ]
