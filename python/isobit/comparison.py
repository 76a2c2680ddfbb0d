"""Compares prompts through a comparator, shows the progress, and reports the result to people and to
scripts."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isobit.comparator_client import ComparatorClient
from isobit.prompts import Prompt, Text, default_prompts, read_prompts
from isobit.results import CompareSummary, Divergence, SequenceReport
from isobit.screen import Screen

# Lengths of the built-in prompts of token ids, used if there is no tokenizer.
_LENGTHS = (1, 2, 5, 8, 13, 16, 21, 34)
_SHOWN = 10  # unequal sequences that are listed


@dataclass(frozen=True)
class Found:
    """The result of a comparison."""

    summary: CompareSummary
    sequences: Sequence[SequenceReport] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Whether at least one token was compared, and no bit differs."""
        return self.summary.verdict == "equal"

    def line(self) -> str:
        """The result in one line, such as "0 of 640 tokens differ"."""
        statistics = self.summary.statistics
        text = f"{statistics.num_unequal} of {statistics.num_tokens} tokens differ"
        if statistics.num_impossible:
            text += f", {statistics.num_impossible} have a logprob that no token is drawn with"
        return text if statistics.num_tokens else "no token was compared, which proves nothing"

    def json(self) -> str:
        """The result as JSON, for scripts; docs/operations.md describes the fields."""
        summary, statistics = self.summary, self.summary.statistics
        sides = {"rollout": summary.rollout, "scorer": summary.scorer}
        return json.dumps(
            {
                "verdict": summary.verdict,
                "tokens": statistics.num_tokens,
                "unequal": statistics.num_unequal,
                "impossible": statistics.num_impossible,
                "max_abs_dp": statistics.max_abs_dp,
                "max_abs_dlogp": _number(statistics.max_abs_dlogp),
                "kl_k3": _number(statistics.kl_k3),
                "weights": {name: side and side.weight_version.digest for name, side in sides.items()},
                "fingerprints": {name: side and side.fingerprint for name, side in sides.items()},
                "sequences": [
                    {
                        "prompt": report.prompt_index,
                        "sample": report.sample_index,
                        "tokens": report.statistics.num_tokens,
                        "unequal": report.statistics.num_unequal,
                        "first_unequal": _position(report.first_divergence),
                    }
                    for report in self.sequences
                ],
            }
        )


def prompts_of(texts: Sequence[str], file: Path | None, model: Path | None, vocab_size: int) -> list[Prompt]:
    """Returns `texts` and the lines of `file`, or a few built-in prompts if there are none.

    Args:
      model: a directory whose tokenizer reads the prompts as text; None: they are token ids.

    Raises:
      ValueError: a prompt cannot be read.
    """
    given = [*texts, *(read_prompts(file) if file else ())]
    if model is not None:
        text = Text(model)
        return [text.prompt(one) for one in given or default_prompts(model)]
    if not given:
        generator = random.Random(1)
        rows = [[generator.randrange(vocab_size) for _ in range(length)] for length in _LENGTHS]
        return [Prompt(" ".join(map(str, row)), row) for row in rows]
    try:
        return [Prompt(one, [int(word) for word in one.split()]) for one in given]
    except ValueError as error:
        raise ValueError(f"{error}: expected token ids, or --model, whose tokenizer reads text") from error


def compare(client: ComparatorClient, prompts: Sequence[Prompt], screen: Screen, **call: Any) -> Found:
    """Generates, scores and compares; `screen` shows the progress.

    Raises:
      IsobitError: as ComparatorClient.compare.
    """
    total = len(prompts) * int(call.get("n") or 1)
    rows = [prompt.token_ids for prompt in prompts]
    summary: CompareSummary | None = None
    sequences: list[SequenceReport] = []
    tokens = unequal = 0
    with screen.progress(f"comparing {total} completions", total) as progress:
        for event in client.compare(rows, stream=True, gap_detail="none", **call):
            if isinstance(event, SequenceReport):
                sequences.append(event)
                tokens += event.statistics.num_tokens
                unequal += event.statistics.num_unequal
                progress.done += 1
                progress.note = f"{unequal} of {tokens} tokens differ"
            elif isinstance(event, CompareSummary):
                summary = event
    assert summary is not None  # the client raises if a stream has no end
    return Found(summary, sorted(sequences, key=lambda one: (one.prompt_index, one.sample_index)))


def show(found: Found, prompts: Sequence[Prompt], screen: Screen) -> None:
    """Lists the sequences that differ, if any."""
    unequal = [report for report in found.sequences if report.statistics.num_unequal]
    if not unequal:
        return
    rows = [
        (
            prompts[report.prompt_index].title[:50],
            str(report.sample_index),
            str(report.statistics.num_tokens),
            str(report.statistics.num_unequal),
            str(_position(report.first_divergence)),
            f"{report.statistics.max_abs_dp:.2e}",
        )
        for report in unequal[:_SHOWN]
    ]
    screen.table(("prompt", "sample", "tokens", "unequal", "first", "max |dp|"), rows)
    if len(unequal) > _SHOWN:
        screen.line(f"  and {len(unequal) - _SHOWN} more")


def _position(divergence: Divergence | None) -> int | None:
    return None if divergence is None else divergence.position


def _number(value: float) -> float | None:
    """None for an infinity or a NaN, which JSON does not have."""
    return value if abs(value) < float("inf") else None
