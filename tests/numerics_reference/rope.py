"""The rotary table of C5 (docs/NUMERICS.md): float64 series, rounded to fp32."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Scaling:
    """rope_scaling of config.json."""

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 0.0  # 0: none, as for the two below
    mscale: float = 0.0
    mscale_all_dim: float = 0.0


def log(x: float) -> float:
    m, e = math.frexp(x)
    m, e = 2 * m, e - 1
    if m > float.fromhex("0x1.6a09e667f3bcdp+0"):
        m, e = m / 2, e + 1
    s = (m - 1) / (m + 1)
    q = s * s
    r = 0.0
    for n in range(41, 2, -2):
        r = (r + 1 / n) * q
    return e * float.fromhex("0x1.62e42fefa39efp-1") + 2 * (s + s * r)


def exp(x: float) -> float:
    n = math.floor(x / float.fromhex("0x1.62e42fefa39efp-1") + 0.5)
    f = (x - n * float.fromhex("0x1.62e42fee00000p-1")) - n * float.fromhex("0x1.a39ef35793c76p-33")
    r = 1.0
    for k in range(20, 0, -1):
        r = 1 + (f / k) * r
    return math.ldexp(r, n)


def cos_and_sin(angle: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    j = np.floor(angle * float.fromhex("0x1.45f306dc9c883p-1") + 0.5)
    x = angle
    for part in ("0x1.921fb54400000p+0", "0x1.0b4611a600000p-34", "0x1.3198a2e037073p-69"):
        x = x - j * float.fromhex(part)
    q = x * x
    c = np.ones_like(x)
    for k in range(20, 1, -2):
        c = 1 - (q / (k * (k - 1))) * c
    s = np.ones_like(x)
    for k in range(21, 2, -2):
        s = 1 - (q / (k * (k - 1))) * s
    s = s * x
    quadrant = [j % 4 == i for i in range(4)]
    return np.select(quadrant, [c, -s, -c, s]), np.select(quadrant, [s, c, -s, -c])


def yarn_share(i: int, head_dim: int, theta: float, scaling: Scaling) -> float:
    """How much of pair i is divided."""

    def pair(turns: float) -> float:
        length = scaling.original_max_positions
        return (head_dim * log(length / (turns * float.fromhex("0x1.921fb54442d18p+2")))) / (2 * log(theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    return min(max((i - low) / (high - low), 0.0), 1.0)


def attention_factor(scaling: Scaling) -> float:
    def of_scale(mscale: float) -> float:
        return 0.1 * mscale * log(scaling.factor) + 1 if scaling.factor > 1 else 1.0

    if scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return of_scale(scaling.mscale) / of_scale(scaling.mscale_all_dim)
    return of_scale(1)


def scaled(frequency: float, i: int, head_dim: int, theta: float, scaling: Scaling) -> float:
    if scaling.kind == "yarn":
        s = yarn_share(i, head_dim, theta, scaling)
        return (frequency / scaling.factor) * s + frequency * (1 - s)
    if scaling.kind == "default":
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    assert scaling.kind == "llama3", scaling.kind
    wavelength = float.fromhex("0x1.921fb54442d18p+2") / frequency
    length, low, high = scaling.original_max_positions, scaling.low_freq_factor, scaling.high_freq_factor
    if wavelength > length / low:
        return frequency / scaling.factor
    if wavelength < length / high:
        return frequency
    s = (length / wavelength - low) / (high - low)
    return ((1 - s) * frequency) / scaling.factor + s * frequency


def frequencies(head_dim: int, theta: float, scaling: Scaling) -> np.ndarray:
    plain = [exp(-log(theta) * ((2 * i) / head_dim)) for i in range(head_dim // 2)]
    stretched = [scaled(frequency, i, head_dim, theta, scaling) for i, frequency in enumerate(plain)]
    return np.array(stretched).astype(np.float32)


def table(positions: int, head_dim: int, theta: float, scaling: Scaling) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, each [positions, head_dim / 2]."""
    angles = np.arange(positions)[:, None] * frequencies(head_dim, theta, scaling).astype(np.float64)
    cos, sin = cos_and_sin(angles)
    attention = attention_factor(scaling)
    return (cos * attention).astype(np.float32), (sin * attention).astype(np.float32)
