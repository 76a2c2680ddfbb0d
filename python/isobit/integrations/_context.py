"""Requests that fit the context of a rollout. The engines of frameworks end a completion where the context
ends, and so do the integrations. The service itself refuses a request that does not fit."""

from collections.abc import Sequence

from isobit import aio
from isobit.client import RolloutClient
from isobit.errors import InvalidArgumentError
from isobit.results import Sample

# A value for max_tokens: as many tokens as the context has room for.
NO_LIMIT = 2**31 - 1
# The beginning of the service's message if it refuses a request because of its prompt.
_PROMPT = "prompt_token_ids"


def is_of_prompt(error: InvalidArgumentError) -> bool:
    """Whether a rollout refused a request because of its prompt. It may accept other prompts then."""
    return error.details.startswith(_PROMPT)


def generate(
    client: RolloutClient, prompt_token_ids: Sequence[int], *, max_tokens: int, **options
) -> list[Sample]:
    """Returns the result of client.generate, with at most as many tokens as the context has room for.

    Raises:
      InvalidArgumentError: there is no room for a single token.
      IsobitError: whatever the client raises.
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
    """Like generate, for asyncio."""
    try:
        return await client.generate(prompt_token_ids, max_tokens=max_tokens, **options)
    except InvalidArgumentError as error:
        if not is_of_prompt(error):
            raise
        context = (await client.get_server_info()).server.model.context_length
        room = _room(error, context, len(prompt_token_ids), max_tokens)
    return await client.generate(prompt_token_ids, max_tokens=room, **options)


def _room(error: InvalidArgumentError, context: int, prompt: int, max_tokens: int) -> int:
    """Returns how many tokens fit after the prompt, if `error` is the refusal of a request for more.

    Raises:
      InvalidArgumentError: no token fits; or `error` itself, if its reason is another one.
    """
    room = context - prompt
    if room < 1:
        raise InvalidArgumentError(
            error.code,
            f"{_PROMPT}: expected at most {context - 1} tokens, which leave one of the context's {context}"
            f" for the completion, got {prompt}",
        ) from error
    if room >= max_tokens:
        raise error
    return room
