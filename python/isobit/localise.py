"""Says where and why a rollout and a scorer first compute different bits for a sequence.

    isobit localise --comparator HOST:PORT --tokens 1,2,3,4
    isobit localise --comparator HOST:PORT --recording run.jsonl --line 7

The comparator between the two has both compute the sequence once more, op by op (its method Localise, role
admin). Of a recording's line the logprobs are explained, too: by the sides' parameters, or by the rollout's
state when it sampled. Generation pauses while the rollout computes.

Exit status: 0: nothing differs; 1: something does; 2: the services could not be asked.
"""

import json
import sys
from pathlib import Path

import numpy as np
from google.protobuf import json_format

from isobit import ComparatorClient
from isobit.calls import LocaliseSide
from isobit.command_line import Parser
from isobit.errors import IsobitError
from isobit.recording import SEAL_FIELDS, logprobs_of, parse_line
from isobit.v1 import comparator_pb2, types_pb2


def cause_of(found: comparator_pb2.LocaliseResponse) -> str:
    """Such as "weights"; "none": nothing differs."""
    name = comparator_pb2.DifferenceCause.Name(found.cause)
    return name.removeprefix("DIFFERENCE_CAUSE_").lower()


def op_of(site: types_pb2.ProbeSite) -> str:
    return types_pb2.ProbeOp.Name(site.op).removeprefix("PROBE_OP_")


def text_of(found: comparator_pb2.LocaliseResponse) -> str:
    lines = [f"cause: {cause_of(found)}: {found.explanation}"]
    if found.HasField("site"):
        lines.append(f"first difference: layer {found.site.layer}, {op_of(found.site)}")
    else:
        lines.append(f"{found.num_ops} ops gave the same bits")
    if found.HasField("element"):
        e = found.element
        lines.append(
            f"token {e.token}, column {e.column}: rollout {_float(e.rollout_bits):.9g} "
            f"(0x{e.rollout_bits:08x}), scorer {_float(e.scorer_bits):.9g} (0x{e.scorer_bits:08x}), "
            f"{e.ulp_distance} fp32 numbers apart; {e.num_different} columns of this token differ"
        )
    if found.HasField("position"):
        lines.append(f"from token {found.position} of the completion on")
    return "\n".join(lines)


def _float(bits: int) -> float:
    return float(np.array([bits], np.uint32).view(np.float32)[0])


def _scorer(options) -> LocaliseSide | None:
    if options.scorer_sampling is None and options.scorer_mode is None:
        return None
    sampling = json.loads(options.scorer_sampling or "{}")
    return LocaliseSide(sampling=sampling, logprob_mode=options.scorer_mode or "processed")


def _localise(client: ComparatorClient, options) -> comparator_pb2.LocaliseResponse:
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


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(
        prog="isobit localise",
        description=__doc__.split("\n")[0],
        epilog="Exit status: 0: nothing differs; 1: something does; 2: the services could not be asked.",
    )
    parser.add_argument("--comparator", required=True, metavar="HOST:PORT")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--tokens", metavar="ID,ID,...", help="prompt and completion: compares ops alone")
    what.add_argument("--recording", type=Path, help="a file of isobit.recording, with --line")
    parser.add_argument("--line", type=int, default=1, help="of the recording, from 1")
    parser.add_argument(
        "--scorer_sampling", metavar="JSON", help="how the scorer was asked; default: as the rollout was"
    )
    parser.add_argument("--scorer_mode", choices=("processed", "raw"), help="likewise")
    parser.add_argument("--json", action="store_true", help="print the finding as JSON")
    parser.add_argument("--tls_ca", help="trust servers with a certificate of this CA (PEM)")
    parser.add_argument("--token_file", help="a bearer token with the role admin")
    parser.add_argument("--timeout_s", type=float, help="default: none, the comparator replays all it needs")
    options = parser.parse_args(arguments)
    security = {name: value for name in ("tls_ca", "token_file") if (value := getattr(options, name))}
    try:
        with ComparatorClient(options.comparator, **security) as client:
            found = _localise(client, options)
    except (IsobitError, OSError, ValueError, KeyError, IndexError, TypeError) as error:
        print(f"localise: {error}", file=sys.stderr)
        return 2
    print(json_format.MessageToJson(found) if options.json else text_of(found))
    return 0 if found.cause == comparator_pb2.DIFFERENCE_CAUSE_NONE else 1


if __name__ == "__main__":
    sys.exit(main())
