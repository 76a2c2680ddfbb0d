"""Makes the references for comparing the order of the sampling parameters with vLLM's.

    python tests/accuracy/make_vllm_references.py

No engine runs: `distribution` below is vLLM's V1 sampler in float64, step by step as vLLM documents it. Its
results for random rows of logits and random parameters are tests/accuracy/references/vllm_sampling.json:

    cases   logits (in 64ths, so that they are exact and sometimes tie), prompt and output: token ids;
            parameters: those of SamplingParams that are not at their defaults; eos_token_ids: the model's;
            kept: the ids that can be drawn, in order; logprobs: of those, as processed_logprobs;
            greedy: the id that temperature 0 draws

A case is left out if fp32 rounding could change which tokens are kept: if two logits nearly tie, or a
probability is near the bound of min_p or top_p. Exact ties stay. If a tie straddles the end of top_k or
top_p, vLLM's GPU kernels (topk_topp_triton.py) keep the lowest ids, and its PyTorch path keeps all that tie
(top_k). The GPU kernels are the reference.
"""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np

OUTPUT = Path(__file__).resolve().parent / "references" / "vllm_sampling.json"
SEED = 20261
CASES = 240
VOCAB = 28
SCALE = 64
MARGIN = 1e-4  # far above fp32's roundings


class NearTie(Exception):
    """The case depends on rounding: fp32 may keep other tokens than float64."""


def order_of(x: np.ndarray) -> np.ndarray:
    """Ids by value descending, ties by lowest id."""
    return np.lexsort((np.arange(x.size), -x))


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def away_from(values: np.ndarray, bound: float, scale: float) -> None:
    if np.any(np.abs(values - bound) < MARGIN * scale):
        raise NearTie


def processed_logits(logits: np.ndarray, case: dict) -> np.ndarray:
    """What vLLM does to the logits of greedy and random requests alike."""
    params = case["parameters"]
    x = logits.copy()
    output = np.array(case["output"], dtype=int)
    if len(output) < params.get("min_tokens", 0):  # all_stop_token_ids, whatever ignore_eos says
        x[params.get("stop_token_ids", []) + case["eos_token_ids"]] = -np.inf
    for token, bias in params.get("logit_bias", {}).items():
        x[int(token)] += bias
    counts = np.bincount(output, minlength=x.size)
    seen = counts > 0
    seen[case["prompt"]] = True
    repetition = params.get("repetition_penalty", 1.0)
    x = np.where(seen, np.where(x > 0, x / repetition, x * repetition), x)
    x = x - params.get("frequency_penalty", 0.0) * counts
    x = x - params.get("presence_penalty", 0.0) * (counts > 0)
    # Equal logits that were treated alike tie exactly; others must not come near each other.
    biased = logits.copy()
    for token, bias in params.get("logit_bias", {}).items():
        biased[int(token)] += bias
    order = [i for i in order_of(x) if x[i] > -np.inf]
    for a, b in pairwise(order):
        alike = (biased[a], seen[a], counts[a]) == (biased[b], seen[b], counts[b])
        if not alike and abs(x[a] - x[b]) < MARGIN * max(1.0, abs(x[a])):
            raise NearTie
    return x


def distribution(logits: np.ndarray, case: dict) -> tuple[np.ndarray, np.ndarray, int]:
    """Ids that can be drawn, their logprobs, and the greedy id."""
    params = case["parameters"]
    x = processed_logits(logits, case)
    greedy = int(order_of(x)[0])
    temperature = params.get("temperature", 1.0)
    if temperature > 0.0:
        x = x / temperature
        probabilities = softmax(x)
        if min_p := params.get("min_p", 0.0):
            bound = min_p * probabilities.max()
            away_from(probabilities, bound, bound)
            x[probabilities < bound] = -np.inf
        if 0 < (top_k := params.get("top_k", 0)) < x.size:
            x[order_of(x)[top_k:]] = -np.inf
        if (top_p := params.get("top_p", 1.0)) < 1.0:
            order = order_of(x)
            mass = np.cumsum(softmax(x)[order])
            away_from(mass, top_p, 1.0)
            x[order[1:][mass[:-1] >= top_p]] = -np.inf
    kept = np.flatnonzero(x > -np.inf)
    return kept, np.log(softmax(x)[kept]), greedy


def random_case(rng: np.random.Generator) -> tuple[np.ndarray, dict]:
    logits = np.round(rng.normal(0.0, 2.0, VOCAB) * SCALE) / SCALE
    if rng.random() < 0.3:
        logits = np.round(logits)  # many ties
    params = {"temperature": float(rng.choice([0.0, 0.5, 0.8, 1.0, 1.0, 1.5]))}

    def maybe(name: str, *values: float) -> None:
        if rng.random() < 0.5:
            params[name] = rng.choice(values).item()

    def ids(count: int) -> list[int]:
        return [int(i) for i in rng.choice(VOCAB, count, replace=False)]

    maybe("top_k", 1, 3, 6, 12)
    maybe("top_p", 0.3, 0.6, 0.8, 0.9, 0.95)
    maybe("min_p", 0.02, 0.05, 0.1, 0.3)
    maybe("repetition_penalty", 1.1, 1.5, 0.8)
    maybe("frequency_penalty", 0.25, -0.5)
    maybe("presence_penalty", 0.75, -0.3)
    maybe("min_tokens", 2, 5)
    if rng.random() < 0.5:
        params["logit_bias"] = {str(i): rng.choice([-3.0, -1.25, 1.5, 4.0]).item() for i in ids(6)}
    if rng.random() < 0.5:
        params["stop_token_ids"] = ids(2)
    if rng.random() < 0.5:
        params["ignore_eos"] = True
    case = {
        "parameters": params,
        "prompt": [int(i) for i in rng.integers(0, VOCAB, rng.integers(1, 8))],
        "output": [int(i) for i in rng.integers(0, VOCAB, rng.integers(0, 8))],
        "eos_token_ids": ids(2),
    }
    return logits, case


def main() -> None:
    rng = np.random.default_rng(SEED)
    lines = []
    while len(lines) < CASES:
        logits, case = random_case(rng)
        try:
            kept, logprobs, greedy = distribution(logits, case)
        except NearTie:
            continue
        case["logits"] = [int(x) for x in logits * SCALE]
        case["kept"] = [int(i) for i in kept]
        case["logprobs"] = [round(float(x), 7) for x in logprobs]
        case["greedy"] = greedy
        lines.append(json.dumps(case, separators=(",", ":")))
    OUTPUT.write_text('{"cases":[\n' + ",\n".join(lines) + "\n]}\n")


if __name__ == "__main__":
    main()
