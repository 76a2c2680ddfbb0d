"""Paths that describe the gateway and its rollout: health, models, version, metrics."""

import asyncio
import ssl
import time
import urllib.request
from importlib.metadata import PackageNotFoundError, version

from starlette.routing import Route

from isobit.gateway.caller import token_to_forward
from isobit.gateway.core import Core
from isobit.gateway.http import Answer, Call
from isobit.targets import is_loopback

ANYBODY = ("generate", "score", "compare", "watch", "admin")
LOOK = ("watch", "admin")
_METRICS_TIMEOUT_S = 10.0
_MAX_METRICS_BYTES = 16 << 20
_TEXT = b"text/plain; version=0.0.4; charset=utf-8"


def routes(core: Core) -> list[Route]:
    created = int(time.time())

    async def health(call: Call) -> Answer:
        return Answer(b"", 200 if await core.engine.is_serving() else 503)

    async def models(call: Call) -> Answer:
        facts = await core.facts()
        cards = [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "isobit",
                "root": name,  # not the directory, which not every caller may see
                "parent": None,
                "max_model_len": facts.context_length,
            }
            for name in core.names
        ]
        return Answer({"object": "list", "data": cards})

    async def model(call: Call) -> Answer:
        name = core.check_model(call.path_params["name"])
        facts = await core.facts()
        card = {"id": name, "object": "model", "created": created, "owned_by": "isobit"}
        return Answer(card | {"max_model_len": facts.context_length})

    async def show_version(call: Call) -> Answer:
        return Answer({"version": _version()})

    async def metrics(call: Call) -> Answer:
        load = await core.engine.rollout.get_load()
        pages = load.num_used_pages + load.num_free_pages
        name = core.names[0].replace("\\", "\\\\").replace('"', '\\"')
        lines = []
        for metric, value in (
            ("num_requests_running", load.num_running_requests),
            ("num_requests_waiting", load.num_waiting_requests),
            ("kv_cache_usage_perc", load.num_used_pages / pages if pages else 0.0),
        ):
            lines += [f"# TYPE vllm:{metric} gauge", f'vllm:{metric}{{model_name="{name}"}} {value}']
        text = "\n".join(lines) + "\n" + core.counters.page(core.connections(), core.bodies.used)
        if core.settings.rollout_metrics:
            text = await asyncio.to_thread(_rollout_metrics, core) + text
        return Answer(text.encode(), media_type=_TEXT)

    return [
        core.route("/health", health, ("GET", "POST")),
        core.route("/ping", health, ("GET", "POST")),
        core.route("/v1/models", models, ("GET",), roles=ANYBODY),
        core.route("/v1/models/{name:path}", model, ("GET",), roles=ANYBODY),
        core.route("/version", show_version, ("GET",)),
        core.route("/metrics", metrics, ("GET",), roles=LOOK),
    ]


def _version() -> str:
    try:
        return version("isobit")
    except PackageNotFoundError:
        return "unknown"


def _rollout_metrics(core: Core) -> str:
    """The rollout's own metrics page, requested with the caller's token."""
    url = core.settings.rollout_metrics
    request = urllib.request.Request(url)
    secure = url.startswith("https:")
    token = token_to_forward() or core.engine.own_token()
    place = url.partition("://")[2].partition("/")[0]
    if token is not None and (secure or is_loopback(place)):
        request.add_header("authorization", f"Bearer {token}")
    context = None
    if secure:
        context = ssl.create_default_context(cafile=core.settings.upstream.get("tls_ca"))
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    with opener.open(request, timeout=_METRICS_TIMEOUT_S) as answer:
        return answer.read(_MAX_METRICS_BYTES).decode("utf-8", "replace")
