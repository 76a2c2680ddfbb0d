"""The ASGI application: the routes of all dialects, over one core."""

import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from isobit.gateway import openai, sglang, vllm
from isobit.gateway.core import Core
from isobit.gateway.errors import HttpError, openai_body
from isobit.gateway.http import error_answer
from isobit.gateway.settings import Settings

# Modules with routes(core). A request goes to the first one that has its path and method.
DIALECTS = (openai, vllm, sglang)


def make_app(settings: Settings, core: Core | None = None) -> Starlette:
    """Makes the application.

    Args:
      core: another application's core in the same event loop; that application closes it. None: a new core.

    Raises:
      ValueError, OSError: something that `settings` names does not exist, or is malformed.
    """
    own = core is None
    core = core or Core(settings)
    routes: list[Route] = [route for dialect in DIALECTS for route in dialect.routes(core)]

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            if own:
                await core.close()

    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={404: _unknown, 405: _unknown})
    app.router.redirect_slashes = False
    app.state.core = core
    return app


async def _unknown(request, error):
    return _Refusal(
        HttpError(
            error.status_code,
            f"{request.method} {request.url.path[:256]} is not served by isobit's gateway",
            headers=error.headers,
        )
    )


class _Refusal:
    """An error as an ASGI application."""

    def __init__(self, error: HttpError):
        self._answer = error_answer(error, openai_body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send)
