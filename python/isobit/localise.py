"""`isobit localise`: says where and why a rollout and a scorer first compute different bits for a sequence.

The comparator between the two asks both to compute the sequence once more, op by op (its call Localise, role
admin). For a line of a recording it explains the logprobs, too: by the sampling parameters of the two sides,
or by the state of the rollout when it sampled. Generation pauses while the rollout computes.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from google.protobuf import json_format

from isobit import ComparatorClient
from isobit.calls import LocaliseSide
from isobit.credentials import Security
from isobit.recording import SEAL_FIELDS, logprobs_of, parse_line
from isobit.v1 import comparator_pb2, types_pb2


@dataclass(frozen=True)
class Options:
    """The flags of `isobit localise`; their help describes them."""

    comparator: str
    tokens: str | None = None
    recording: Path | None = None
    line: int = 1
    scorer_sampling: str | None = None
    scorer_mode: str | None = None
    security: Security = field(default_factory=Security)
    timeout_s: float | None = None


def cause_of(found: comparator_pb2.LocaliseResponse) -> str:
    """The cause as a word, such as "weights"; "none": nothing differs."""
    name = comparator_pb2.DifferenceCause.Name(found.cause)
    return name.removeprefix("DIFFERENCE_CAUSE_").lower()


def op_of(site: types_pb2.ProbeSite) -> str:
    """The name of an op, such as "ATTENTION_SUM"."""
    return types_pb2.ProbeOp.Name(site.op).removeprefix("PROBE_OP_")


def text_of(found: comparator_pb2.LocaliseResponse) -> str:
    """The finding as lines of text for people."""
    lines = [f"cause: {cause_of(found)}: {found.explanation}"]
    if found.HasField("site"):
        lines.append(f"first difference: layer {found.site.layer}, {op_of(found.site)}")
    else:
        lines.append(f"{found.num_ops} ops have the same bits")
    if found.HasField("element"):
        e = found.element
        lines.append(
            f"token {e.token}, column {e.column}: rollout {_float(e.rollout_bits):.9g} "
            f"(0x{e.rollout_bits:08x}), scorer {_float(e.scorer_bits):.9g} (0x{e.scorer_bits:08x}), "
            f"{e.ulp_distance} fp32 numbers apart; {e.num_different} columns of this token differ"
        )
    if found.HasField("position"):
        lines.append(f"first completion token concerned: {found.position}")
    return "\n".join(lines)


def _float(bits: int) -> float:
    return float(np.array([bits], np.uint32).view(np.float32)[0])


def _scorer(options: Options) -> LocaliseSide | None:
    if options.scorer_sampling is None and options.scorer_mode is None:
        return None
    sampling = json.loads(options.scorer_sampling or "{}")
    return LocaliseSide(sampling=sampling, logprob_mode=options.scorer_mode or "processed")


def _localise(client: ComparatorClient, options: Options) -> comparator_pb2.LocaliseResponse:
    if options.tokens is not None:
        tokens = [int(token) for token in options.tokens.split(",")]
        return client.localise(tokens, timeout=options.timeout_s)
    line = parse_line(options.recording.read_bytes().splitlines()[options.line - 1])
    if set(line) == set(SEAL_FIELDS):
        raise ValueError(f"--line {options.line}: expected a sample, got the recording's seal")
    rollout = LocaliseSide(
        sampling=line["sampling"], logprob_mode=line["logprob_mode"], logprobs=logprobs_of(line["logprobs"])
    )
    return client.localise(
        line["prompt"], line["tokens"], rollout=rollout, scorer=_scorer(options), timeout=options.timeout_s
    )


def localise(options: Options) -> comparator_pb2.LocaliseResponse:
    """Asks the comparator.

    Raises:
      ValueError, KeyError, IndexError, TypeError: the sequence, or the line of the recording, is not valid.
      IsobitError, OSError: the services could not be asked.
    """
    with ComparatorClient(options.comparator, **options.security) as client:
        return _localise(client, options)


def json_of(found: comparator_pb2.LocaliseResponse) -> str:
    """The finding as JSON, in the form of the message LocaliseResponse."""
    return json_format.MessageToJson(found)


def is_equal(found: comparator_pb2.LocaliseResponse) -> bool:
    """Whether nothing differs."""
    return found.cause == comparator_pb2.DIFFERENCE_CAUSE_NONE
