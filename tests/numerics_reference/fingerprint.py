"""The fingerprint (docs/NUMERICS.md)."""

import hashlib
from pathlib import Path

import numpy as np

from numerics_reference import log_prob, noise, rope
from numerics_reference.arithmetic import (
    F32,
    INFINITY,
    LOG2E,
    Operand,
    bits_of,
    exp2,
    from_bits,
    log,
    mma16,
    sigmoid,
    sum_of_squares,
)
from numerics_reference.checkpoint import Config
from numerics_reference.sampling import penalise

PAGE = Path(__file__).resolve().parents[2] / "docs" / "NUMERICS.md"


def version() -> int:
    return int(PAGE.read_text().splitlines()[0].rsplit(" ", 1)[1])


def softmax_probe(x: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
    """Alpha of the tile, then its split folded into (0.25, 1.5, x)."""
    scale = F32(0.125)
    scores = b * F32(100)
    top = scores.max(-1)
    alpha = exp2(-INFINITY - top * scale)
    weights = exp2(log_prob.fma(scores, scale, -(top * scale)[:, None]))
    lanes = list((weights[:, :8] + weights[:, 8:]).T)
    while len(lanes) > 1:
        lanes = [left + right for left, right in zip(lanes[::2], lanes[1::2], strict=True)]
    largest = np.maximum(F32(0.25), top * scale)
    left, right = exp2(F32(0.25) - largest), exp2(top * scale - largest)
    return [alpha, x * left + F32(1) * right, F32(1.5) * left + lanes[0] * right]


def log_prob_probe(x: np.ndarray) -> list[np.ndarray]:
    one = F32(1)
    unit = F32(2.0**-40)
    own = log_prob.RangeResult(
        x,
        log_prob.integer(log_prob.weights(x, one)).astype(F32) * unit,
        log_prob.integer(log_prob.weighted_distances(x, one)).astype(F32) * unit,
    )
    other = log_prob.RangeResult(*(np.full_like(x, value) for value in (0.5, 1.25, -0.5)))
    row = log_prob.combine(own, other)
    return [log_prob.log_prob(x, row), log_prob.entropy(row)]


def probes() -> bytes:
    i = np.arange(512)
    r = noise.philox(7, i, 2, 1, 0)
    x = r[0].astype(F32) * F32(2.0**-32)
    p = noise.philox(11, i[:, None], 3, np.arange(16), 0)
    a, b = (p[0] & np.uint64(0xBFFF)), (p[1] & np.uint64(0x83FF)) | np.uint64(0x3C00)
    a, b = (from_bits((pattern << np.uint64(16)).astype(np.uint32)) for pattern in (a, b))
    squares = [sum_of_squares(b[:, : 16 - missing]) for missing in range(4)]
    columns = [noise.gumbel(word) for word in r]
    columns += [exp2(x * F32(-100)), log(x * F32(1000)), sigmoid(x * F32(8) - F32(4))]
    columns += [penalise(x, i.astype(F32), F32(1.25), F32(0.5), F32(0.125))]
    columns += [mma16(x, Operand(a).step(0), Operand(b).step(0)), np.choose(i % 4, squares)]
    columns += softmax_probe(x, b) + log_prob_probe(x)
    tables = []
    for kind in ("llama3", "yarn"):
        tables += rope.table(64, 16, 10000.0, rope.Scaling(kind, 8.0, 1.0, 4.0, 32))
    values = [np.stack(columns, -1), *tables]
    return b"".join(bits_of(value).astype("<u4").tobytes() for value in values)


def shortest_hex(x: float) -> str:
    """C's %a."""
    mantissa, power = float(x).hex().split("p")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}p{power}"


def rope_text(scaling: rope.Scaling) -> str:
    if scaling.kind == "default":
        return "default"
    if scaling.kind == "linear":
        return f"linear {shortest_hex(scaling.factor)}"
    if scaling.kind == "yarn":
        betas = f"{shortest_hex(scaling.beta_fast)} {shortest_hex(scaling.beta_slow)}"
        attention = (scaling.attention_factor, scaling.mscale, scaling.mscale_all_dim)
        return (
            f"yarn {shortest_hex(scaling.factor)} {scaling.original_max_positions} {betas} "
            f"{int(scaling.truncate)} {' '.join(map(shortest_hex, attention))}"
        )
    factors = (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor)
    return " ".join(["llama3", *map(shortest_hex, factors), str(scaling.original_max_positions)])


def model_text(config: Config) -> str:
    fields = {
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_layers": config.layers,
        "num_heads": config.heads,
        "num_kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": shortest_hex(config.eps),
        "rope_theta": shortest_hex(config.theta),
        "rope": rope_text(config.scaling),
        "tied": int(config.tied),
        "qkv_bias": int(config.qkv_bias),
        "o_bias": int(config.o_bias),
        "mlp_bias": int(config.mlp_bias),
        "qk_norm": int(config.qk_norm),
        "windows": ",".join(map(str, config.windows)),
    }
    return "".join(f"{name}={value}\n" for name, value in fields.items())


def fingerprint(config: Config, mode: str) -> str:
    constants = (
        f"version={version()} mma_k=16 mma_bits=25 mma_min=-133 leaves=8 unit=16 norm_leaf=4 kv_tile=128/64 "
        f"split=512 lanes=8 weight_bits=40 philox=10 log2e={bits_of(LOG2E)}"
    )
    lines = [
        "isobit numerics",
        constants,
        f"probes={hashlib.sha256(probes()).hexdigest()}",
        f"mode={mode}",
        f"model={model_text(config)}",
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
