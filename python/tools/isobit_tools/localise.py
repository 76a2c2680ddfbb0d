"""Says where a rollout and a scorer first compute different bits for a sequence.

    isobit localise --rollout HOST:PORT --scorer HOST:PORT --tokens 1,2,3,4

Both services compute the sequence once more, op by op, with the weights that they serve (the method Probe,
role admin). The first op whose digest differs is asked for its rows, and its first row that
differs for its values. The inputs of that op are the results of the ops before it, which are equal: so either
its weights differ, or its arithmetic does. Generation pauses while the rollout computes.

Exit status: 0: all ops are equal; 1: an op differs; 2: the services could not be asked.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from isobit import RolloutClient, ScorerClient
from isobit.errors import IsobitError
from isobit.v1 import types_pb2

# What each op reads besides the results before it: names of parameters in a checkpoint, L the layer.
_LAYER = "model.layers.L."
_WEIGHTS = {
    "EMBEDDING": ["model.embed_tokens.weight"],
    "INPUT_NORM": [_LAYER + "input_layernorm.weight"],
    "QKV": [_LAYER + f"self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")],
    "Q": [_LAYER + "self_attn.q_norm.weight"],
    "K": [_LAYER + "self_attn.k_norm.weight"],
    "V": [],
    "ATTENTION": [],
    "ATTENTION_SUM": [_LAYER + "self_attn.o_proj.weight", _LAYER + "self_attn.o_proj.bias"],
    "POST_NORM": [_LAYER + "post_attention_layernorm.weight"],
    "GATE": [_LAYER + "mlp.gate_proj.weight"],
    "UP": [_LAYER + "mlp.up_proj.weight"],
    "ACTIVATION": [],
    "MLP_SUM": [_LAYER + "mlp.down_proj.weight", _LAYER + "mlp.down_proj.bias"],
    "FINAL_NORM": ["model.norm.weight"],
    "LOGITS": ["lm_head.weight", "model.embed_tokens.weight, if it is tied"],
}


@dataclass(frozen=True)
class Element:
    """The first element that differs, with both values' bits as fp32."""

    row: int  # the token's place in the sequence
    column: int
    rollout_bits: int
    scorer_bits: int
    ulp_distance: int
    num_different: int  # columns of the row


@dataclass(frozen=True)
class Finding:
    """Where the two sides first differ."""

    equal: bool
    num_ops: int  # that were compared
    layer: int | None = None
    op: str | None = None  # as isobit.v1.ProbeOp, without its prefix
    element: Element | None = None
    cause: str = ""  # "weights", "arithmetic", "input" or ""
    explanation: str = ""
    suspects: list[str] = field(default_factory=list)  # parameters that the op reads

    def text(self) -> str:
        if self.equal:
            return f"equal: {self.num_ops} ops gave the same bits. {self.explanation}"
        lines = [f"first difference: layer {self.layer}, {self.op}: {self.explanation}"]
        if self.element is not None:
            e = self.element
            lines.append(
                f"token {e.row}, column {e.column}: rollout {as_float(e.rollout_bits):.9g} "
                f"(0x{e.rollout_bits:08x}), scorer {as_float(e.scorer_bits):.9g} (0x{e.scorer_bits:08x}), "
                f"{e.ulp_distance} fp32 numbers apart; {e.num_different} columns of this token differ"
            )
        if self.suspects:
            lines.append("it reads " + ", ".join(self.suspects))
        return "\n".join(lines)


def as_float(bits: int) -> float:
    return float(np.array([bits], np.uint32).view(np.float32)[0])


def ulp_distance(a: int, b: int) -> int:
    """Steps between two fp32 numbers by neighbours, -0 and +0 being neighbours; of NaNs, of their bits."""

    def place(bits: int) -> int:
        return -(bits & 0x7FFFFFFF) - 1 if bits >> 31 else bits

    return abs(place(a) - place(b))


def localise(
    rollout: RolloutClient, scorer: ScorerClient, tokens: list[int], timeout: float = 600.0
) -> Finding:
    """Compares the two sides op by op. IsobitError: one could not be asked."""
    probes = [client.probe(tokens, timeout=timeout) for client in (rollout, scorer)]
    by_site = [{(d.site.layer, d.site.op): d.digest for d in probe.digests} for probe in probes]
    if by_site[0].keys() != by_site[1].keys():
        return Finding(
            equal=False,
            num_ops=0,
            cause="input",
            explanation="the two sides serve models of different shapes",
        )
    different = [site for site, digest in by_site[0].items() if by_site[1][site] != digest]
    same_weights = probes[0].weight_version.digest == probes[1].weight_version.digest
    same_arithmetic = probes[0].fingerprint.hex == probes[1].fingerprint.hex
    if not different:
        return Finding(
            equal=True,
            num_ops=len(by_site[0]),
            explanation=(
                "If logprobs differed when the sequence was sampled, the fault was in its state then, such "
                "as a page of the KV cache, or in sampling parameters that differed between the sides."
            ),
        )
    layer, op = different[0]
    name = types_pb2.ProbeOp.Name(op).removeprefix("PROBE_OP_")
    suspects = [weight.replace(".L.", f".{layer}.") for weight in _WEIGHTS[name]]
    if not same_weights and suspects:
        cause = "weights"
        explanation = "its inputs are equal and the sides' weights are not, so its weights differ"
    elif not same_arithmetic:
        cause, explanation = "arithmetic", "its inputs are equal, and the sides' fingerprints are not"
    elif same_weights:
        cause = "arithmetic"
        explanation = (
            "its inputs and the weights' digests are equal: its arithmetic differs, or memory that held "
            "weights has changed since they were loaded"
        )
    else:
        cause, explanation = "arithmetic", "it reads no weights, and its inputs are equal"
    return Finding(
        equal=False,
        num_ops=len(by_site[0]),
        layer=layer,
        op=name,
        element=_first_element(rollout, scorer, tokens, layer, op, timeout),
        cause=cause,
        explanation=explanation,
        suspects=suspects,
    )


def _first_element(rollout, scorer, tokens, layer: int, op: int, timeout: float) -> Element | None:
    rows = [
        np.array(client.probe(tokens, site=(layer, op), timeout=timeout).row_digests, np.uint64)
        for client in (rollout, scorer)
    ]
    different = np.flatnonzero(rows[0] != rows[1])
    if len(different) == 0:
        return None  # a fault that comes and goes
    row = int(different[0])
    values = [
        np.array(client.probe(tokens, site=(layer, op), row=row, timeout=timeout).values, np.uint32)
        for client in (rollout, scorer)
    ]
    columns = np.flatnonzero(values[0] != values[1])
    if len(columns) == 0:
        return None
    column = int(columns[0])
    bits = [int(side[column]) for side in values]
    return Element(row, column, bits[0], bits[1], ulp_distance(*bits), len(columns))


def _tokens(options) -> list[int]:
    if options.tokens is not None:
        return [int(token) for token in options.tokens.split(",")]
    line = options.recording.read_text().splitlines()[options.line - 1]
    record = json.loads(line)
    return [*record["prompt"], *record["tokens"]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="isobit localise",
        description=__doc__.split("\n")[0],
        epilog="Exit status: 0: all ops are equal; 1: an op differs; 2: the services could not be asked.",
    )
    parser.add_argument("--rollout", required=True, metavar="HOST:PORT")
    parser.add_argument("--scorer", required=True, metavar="HOST:PORT")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--tokens", metavar="ID,ID,...", help="prompt and completion, up to the token that differs"
    )
    what.add_argument("--recording", type=Path, help="a file of isobit.recording, with --line")
    parser.add_argument("--line", type=int, default=1, help="of the recording, from 1")
    parser.add_argument("--json", action="store_true", help="print the finding as JSON")
    parser.add_argument("--tls_ca", help="trust servers with a certificate of this CA (PEM)")
    parser.add_argument("--token_file", help="a bearer token with the role admin")
    parser.add_argument("--timeout_s", type=float, default=600.0, help="of each probe")
    options = parser.parse_args(arguments)
    security = {name: value for name in ("tls_ca", "token_file") if (value := getattr(options, name))}
    try:
        tokens = _tokens(options)
        with (
            RolloutClient(options.rollout, **security) as rollout,
            ScorerClient(options.scorer, **security) as scorer,
        ):
            finding = localise(rollout, scorer, tokens, options.timeout_s)
    except (IsobitError, OSError, ValueError, KeyError, IndexError) as error:
        print(f"localise: {error}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(finding), indent=1) if options.json else finding.text())
    return 0 if finding.equal else 1


if __name__ == "__main__":
    sys.exit(main())
