"""Checks whether a token can have been drawn at all. Equal logprobs alone do not show that, since any tokens
can be scored. This check does not show that a token was drawn at random: whoever has the weights can choose
likely tokens."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from isobit.audit.records import Record
from isobit.results import TokenLogprobs

# The noise numbers added to the logits (NUMERICS.md, C8) differ by at most 25.7, so a token is drawn only if
# its logprob is at most that far below the best. The rest covers the rounding of fp32 for logits of millions.
MAX_BEHIND = 32.0

# Parameters that can leave only one possible token, each with the values that switch it off. At temperature 0
# the first four have no effect.
_NEUTRAL = {
    "temperature": (1,), "top_k": (0, -1), "top_p": (1,), "min_p": (0,), "logit_bias": (), "min_tokens": (0,),
    "min_new_tokens": (0,), "repetition_penalty": (1,), "presence_penalty": (0,), "frequency_penalty": (0,),
}  # fmt: skip
_NOT_GREEDY = ("temperature", "top_k", "top_p", "min_p")


def why_undrawable(record: Record, processed: TokenLogprobs) -> str | None:
    """Says why one of the tokens cannot have been drawn; None if each is possible.

    Args:
      processed: the logprobs of the tokens in the distribution they were drawn from, with the most likely
        token at each position.
    """
    where = f"line {record.line}, request {record.request_id}, sample {record.index}"
    for at, token in enumerate(record.tokens):
        if (why := _why(record, at, token, processed)) is not None:
            return f"{where}, token {at} (id {token}): {why}"
    return None


def _why(record: Record, at: int, token: int, processed: TokenLogprobs) -> str | None:
    said, logprob = record.logprobs[at], processed.logprobs[at]
    if not _can_be_drawn(said):
        return f"no token is drawn with the recorded logprob {said}"
    if not _can_be_drawn(logprob):
        return "its probability is 0 under the sampling parameters"
    best = processed.top[at]
    if record.sampling.get("temperature") == 0:
        if best.token_ids[0] != token:
            return f"at temperature 0 only the most likely token, {best.token_ids[0]}, can be drawn"
    elif float(best.logprobs[0]) - float(logprob) > MAX_BEHIND:
        return (
            f"it cannot be drawn: its logprob {logprob:.6g} is more than {MAX_BEHIND:g} below the most likely"
            f" token's, {best.logprobs[0]:.6g}"
        )
    if at + 1 < len(record.tokens) and token in (record.sampling.get("stop_token_ids") or ()):
        return "a sample ends at its first stop token"
    return None


def _can_be_drawn(logprob: np.float32) -> bool:
    return bool(np.isfinite(logprob)) and logprob <= 0


def dictated(record: Record, processed: TokenLogprobs) -> tuple[int, list[str]]:
    """Returns how many tokens were certain because of parameters that can leave only one possible token, and
    the names of these parameters. A logit_bias is named even if no token was certain, since it can say which
    tokens to take."""
    used = parameters_in_use(record.sampling)
    certain = int((processed.logprobs == 0).sum()) if used else 0
    return certain, used if certain else [name for name in used if name == "logit_bias"]


def parameters_in_use(sampling: Mapping[str, Any]) -> list[str]:
    """The parameters that change the distribution a token is drawn from."""

    def is_used(name: str, neutral: tuple[int, ...]) -> bool:
        value = sampling.get(name)
        if name == "logit_bias":
            return any((value or {}).values())
        if value is None or value in neutral:
            return False
        return not (name in _NOT_GREEDY and sampling.get("temperature") == 0)

    return [name for name, neutral in _NEUTRAL.items() if is_used(name, neutral)]
