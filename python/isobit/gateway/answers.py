"""Parts of answers that completions and chats share: usage, weight versions, and the digest for scoring."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from isobit.gateway.control import control_of
from isobit.gateway.core import Core
from isobit.gateway.errors import not_offered
from isobit.gateway.generation import Ending
from isobit.gateway.prompts import StreamOptions


@dataclasses.dataclass
class Usage:
    """The number of tokens of an answer. A prompt counts once, whatever n is."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def prompt(self, tokens: int, ending: Ending) -> None:
        self.prompt_tokens += tokens
        self.cached_tokens += ending.cached_tokens

    def json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def usage_wanted(options: StreamOptions | None) -> bool:
    """Whether the last event must contain the usage."""
    if options is None:
        return False
    if options.continuous_usage_stats:
        raise not_offered("stream_options.continuous_usage_stats")
    return options.include_usage


def version_spans(core: Core, versions: Sequence[int], first: int = 0) -> list[dict[str, Any]]:
    """vLLM's `weight_versions`: the half-open range of tokens that each version drew, with versions as
    labels. first: the index in the sample of the first token."""
    label = control_of(core).notes.read().label
    spans: list[dict[str, Any]] = []
    last = None
    for position, version in enumerate(versions, first):
        if version == last:
            spans[-1]["end"] = position + 1
        else:
            spans.append({"version": label(version), "start": position, "end": position + 1})
            last = version
    return spans


async def digest_of(core: Core, ending: Ending | None) -> str:
    """The digest of the weights that drew a sample. A scorer must have weights of the same digest."""
    if ending is not None and ending.complete is not None:
        return ending.complete.weight_version.digest
    return (await core.server_info()).server.weight_version.digest
