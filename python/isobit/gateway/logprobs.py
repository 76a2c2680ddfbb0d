"""Logprobs in JSON: never NaN or infinite, which JSON cannot express, and never null.

msgspec writes a float as the shortest decimal of its double, with a point or an exponent. So a float32 that
was converted to a double is read back with the same bits, by readers of doubles and by readers of float32.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from isobit.errors import InternalError
from isobit.gateway.text import TokenTexts
from isobit.v1 import types_pb2

Ranked = tuple[int, float, int | None]  # a token id, its logprob and its rank


def token_name(token: int) -> str:
    """A text that identifies a token, in vLLM's form."""
    return f"token_id:{token}"


def ranked(token: int, logprob: float, top: types_pb2.TopLogprobs | None) -> list[Ranked]:
    """Returns the token itself first, then the most likely tokens, each with its rank from 1.

    Alternatives with probability 0 (because of a filter) are left out. The token's own rank is its place
    among the k most likely ones. It is None if the token is not among them, since the services do not count
    the tokens before it.
    """
    rest, own = [], None
    if top is not None:
        for rank, (other, value) in enumerate(zip(top.token_ids, top.logprobs, strict=True), 1):
            if other == token:
                own = rank
            elif math.isfinite(value):
                rest.append((other, value, rank))
    return [(token, logprob, own), *rest]


def checked(logprobs: Sequence[float]) -> Sequence[float]:
    """Returns `logprobs`.

    Raises:
      InternalError: one is not finite; logprobs of drawn tokens must be.
    """
    if not all(map(math.isfinite, logprobs)):
        import grpc

        raise InternalError(grpc.StatusCode.INTERNAL, "the logprob of a drawn token is not finite")
    return logprobs


def rows(piece: Any) -> Iterator[list[Ranked]]:
    """Yields `ranked` for each token of a Piece or a Completion."""
    top = piece.top or [None] * len(piece.token_ids)
    for token, logprob, alternatives in zip(piece.token_ids, checked(piece.logprobs), top, strict=True):
        yield ranked(token, logprob, alternatives)


def content(piece: Any, texts: TokenTexts | None, limit: int | None) -> list[dict[str, Any]]:
    """Chat's `logprobs.content`, one entry for each token.

    Args:
      texts: the texts of tokens; None: tokens are named "token_id:N".
      limit: the largest number of entries in top_logprobs, the token itself first; None: all, the token
        included.
    """
    return [_entry(row, texts, limit) for row in rows(piece)]


def _entry(row: list[Ranked], texts: TokenTexts | None, limit: int | None) -> dict[str, Any]:
    entry = _named(*row[0], texts)
    entry["top_logprobs"] = [_named(*other, texts) for other in row[:limit]]
    return entry


def _named(token: int, logprob: float, rank: int | None, texts: TokenTexts | None) -> dict[str, Any]:
    if texts is None:
        name = token_name(token)
        return {
            "token": name, "token_id": token, "logprob": logprob, "rank": rank, "bytes": list(name.encode()),
        }  # fmt: skip
    return {
        "token": texts.text_of(token),
        "token_id": token,
        "logprob": logprob,
        "rank": rank,
        "bytes": list(texts.bytes_of(token)),
    }


def prompt_rows(
    prompt: Sequence[int], scored: types_pb2.TokenLogprobs, texts: TokenTexts | None
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: null for the first token, then for each token an object by token id, the
    token itself first.

    Clients sort by rank. So a token that is not among the k most likely has the rank k + 1, which puts it
    after them; without alternatives its rank is None.
    """
    found: list[dict[str, Any] | None] = [None]
    top = scored.top or [None] * len(scored.token_ids)
    for token, logprob, alternatives in zip(scored.token_ids, checked(scored.logprobs), top, strict=True):
        last = len(alternatives.token_ids) + 1 if alternatives and alternatives.token_ids else None
        found.append(
            {
                str(other): {
                    "logprob": value,
                    "rank": rank or last,
                    "decoded_token": texts.text_of(other) if texts is not None else token_name(other),
                }
                for other, value, rank in ranked(token, logprob, alternatives)
            }
        )
    return found[: len(prompt)]
