"""OpenAI's dialect, with vLLM's extensions."""

from starlette.routing import Route

from isobit.gateway import chat, completions, status, tokens
from isobit.gateway.core import Core


def routes(core: Core) -> list[Route]:
    return [*completions.routes(core), *chat.routes(core), *tokens.routes(core), *status.routes(core)]
