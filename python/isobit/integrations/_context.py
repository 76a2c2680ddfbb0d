"""Requests within the context of a rollout. The engines of frameworks end a completion where the context
ends, and so do the seams; the service itself refuses what does not fit."""

from collections.abc import Sequence

from isobit import aio
from isobit.client import RolloutClient
from isobit.errors import InvalidArgumentError
from isobit.results import Sample

# As max_tokens: as many as the context has room for.
NO_LIMIT = 2**31 - 1
# What the service names first if a request is refused for its prompt.
_PROMPT = "prompt_token_ids"


def is_of_prompt(error: InvalidArgumentError) -> bool:
    """Whether a rollout refuses a request for its prompt, so that it may take others."""
    return error.details.startswith(_PROMPT)


def generate(
    client: RolloutClient, prompt_token_ids: Sequence[int], *, max_tokens: int, **options
) -> list[Sample]:
    """What client.generate returns, with at most as many tokens as the context has room for.

    Raises:
      InvalidArgumentError: it has room for none; or whatever the client raises.
    """
    try:
        return client.generate(prompt_token_ids, max_tokens=max_tokens, **options)
    except InvalidArgumentError as error:
        if not is_of_prompt(error):
            raise
        context = client.get_server_info().server.model.context_length
        room = _room(error, context, len(prompt_token_ids), max_tokens)
    return client.generate(prompt_token_ids, max_tokens=room, **options)


async def agenerate(
    client: aio.RolloutClient, prompt_token_ids: Sequence[int], *, max_tokens: int, **options
) -> list[Sample]:
    """As generate, for asyncio."""
    try:
        return await client.generate(prompt_token_ids, max_tokens=max_tokens, **options)
    except InvalidArgumentError as error:
        if not is_of_prompt(error):
            raise
        context = (await client.get_server_info()).server.model.context_length
        room = _room(error, context, len(prompt_token_ids), max_tokens)
    return await client.generate(prompt_token_ids, max_tokens=room, **options)


def _room(error: InvalidArgumentError, context: int, prompt: int, max_tokens: int) -> int:
    """How many tokens fit behind the prompt, if `error` refuses a request for more than these.

    Raises:
      InvalidArgumentError: none do; or `error`, if it is about something else.
    """
    room = context - prompt
    if room < 1:
        raise InvalidArgumentError(
            error.code,
            f"{_PROMPT}: expected at most {context - 1} tokens, which leave one of the context's {context} to"
            f" the completion, got {prompt}",
        ) from error
    if room >= max_tokens:
        raise error
    return room
