"""OpenAI's dialect, with vLLM's extensions, and the paths that belong to no dialect."""

from starlette.routing import Route

from isobit.gateway.core import Core
from isobit.gateway.http import Answer, Call


def routes(core: Core) -> list[Route]:
    async def health(call: Call) -> Answer:
        return Answer(b"", 200 if await core.engine.is_serving() else 503)

    return [core.route("/health", health, ("GET", "POST"))]
