"""C1 to C5 of docs/NUMERICS.md on NumPy arrays: the k16 step, leaves and the functions between products.

fp32 values are float32 arrays. So are bf16 values, since every bf16 value is an fp32 value.
"""

import numpy as np

F32 = np.float32
LEAVES = 8
STEP = 16
LOG2E = F32(float.fromhex("0x1.715476p+0"))
INFINITY = F32(np.inf)
CHUNK = 1 << 18  # products that one NumPy call works on: they stay in the cache


def constants(*texts: str) -> list[np.float32]:
    return [F32(float.fromhex(text)) for text in texts]


def from_bits(bits: np.ndarray) -> np.ndarray:
    return np.asarray(bits, np.uint32).view(F32)


def bits_of(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, F32).view(np.uint32)


def bf16(x: np.ndarray) -> np.ndarray:
    """fp32 rounded to the nearest bf16, ties to even."""
    bits = bits_of(x).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return from_bits(np.where(np.isnan(x), 0x7FFF0000, rounded).astype(np.uint32))


def fma(a, b, c) -> np.ndarray:
    """a * b + c with one rounding to fp32.

    The product is exact in float64. The sum is rounded there to odd, so that rounding it once more, to fp32,
    gives the right result.
    """
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    c = np.asarray(c, np.float64)
    total = np.asarray(product + c)
    with np.errstate(invalid="ignore"):
        part = total - product
        error = (product - (total - part)) + (c - part)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    toward = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact, bits + toward, bits).view(np.float64).astype(F32)


def maximum(a, b) -> np.ndarray:
    return np.fmax(a, b)  # ignores NaN


# ---- C1 to C3


class Operand:
    """bf16 values with their exponents; the last axis is K, padded with +0 to whole steps."""

    def __init__(self, values: np.ndarray):
        padding = -values.shape[-1] % STEP
        values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, padding)])
        self.values = values.astype(np.float64)
        self.exponents = exponent(values)

    def step(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        return self.values[..., k : k + STEP], self.exponents[..., k : k + STEP]


def exponent(x: np.ndarray) -> np.ndarray:
    """The unbiased exponent field, -126 for subnormals."""
    field = (bits_of(x) >> 23).astype(np.int16) & 0xFF
    return np.maximum(field, 1) - np.int16(127)


def mma16(c: np.ndarray, a: tuple, b: tuple) -> np.ndarray:
    """C1 with c [...], and a, b as Operand.step gives them, [..., 16]."""
    no_term = np.int16(-1000)
    products = a[0] * b[0]
    exponents = np.where(products == 0, no_term, a[1] + b[1])
    top = np.maximum(exponents.max(-1), np.where(c == 0, no_term, exponent(c)))
    top = np.maximum(top, -133)
    scale = np.ldexp(1.0, 25 - top)
    products *= scale[..., None]
    units = np.trunc(products, out=products).sum(-1) + np.trunc(c * scale)  # exact in float64
    result = truncate_to_fp32(units / scale)
    if np.isfinite(units).all():
        return result
    return np.where(np.isfinite(units), result, non_finite_step(c, a[0], b[0]))


def truncate_to_fp32(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        nearest = x.astype(F32)
    too_large = np.abs(nearest.astype(np.float64)) > np.abs(x)
    truncated = np.where(too_large, np.nextafter(nearest, F32(0)), nearest)
    return np.where(np.abs(x) >= 2.0**128, np.copysign(INFINITY, nearest), truncated) + F32(0)


def non_finite_step(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        terms = np.concatenate([a * b, np.broadcast_to(c, np.broadcast(a, b).shape[:-1])[..., None]], -1)
    up, down = (terms == np.inf).any(-1), (terms == -np.inf).any(-1)
    nan = np.isnan(terms).any(-1) | (up & down)
    return np.where(nan, from_bits(0x7FFFFFFF), np.where(up, INFINITY, -INFINITY))


def dot(c: np.ndarray, a: Operand, b: Operand) -> np.ndarray:
    """C2's chain from c [...] over the last axes of a and b."""
    for k in range(0, a.values.shape[-1], STEP):
        c = mma16(c, a.step(k), b.step(k))
    return c


def products(x: np.ndarray, w: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
    """C2 of every row of x [m, K] with every row of w [n, K], from `start` [m, n] or +0."""
    out = np.zeros((len(x), len(w)), F32) if start is None else start.astype(F32)
    rows = max(1, CHUNK // (len(w) * STEP))
    right = Operand(w[None])
    for m in range(0, len(x), rows):
        out[m : m + rows] = dot(out[m : m + rows], Operand(x[m : m + rows, None]), right)
    return out


def leaf_bounds(total: int, unit: int = STEP) -> list[int]:
    """Leaf l holds columns [bounds[l], bounds[l + 1])."""
    units = -(-total // unit)
    return [min(leaf * units // LEAVES * unit, total) for leaf in range(LEAVES + 1)]


def tree(sums: list) -> np.ndarray:
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def chain(sums: list) -> np.ndarray:
    total = sums[0]
    for value in sums[1:]:
        total = total + value
    return total


# ---- C5

EXP2 = constants(
    "0x1.5bda40p-10", "0x1.3ce8acp-7", "0x1.c6b6d8p-5", "0x1.ebf9c2p-3", "0x1.62e42ap-1", "0x1p+0"
)  # fmt: skip
LOG = constants(
    "-0x1.38b590p-4", "0x1.055b6cp-3", "-0x1.0d8540p-3", "0x1.22da1cp-3",
    "-0x1.547244p-3", "0x1.99a008p-3", "-0x1.000226p-2", "0x1.555554p-2",
)  # fmt: skip


def horner(coefficients: list, x: np.ndarray) -> np.ndarray:
    p = np.broadcast_to(coefficients[0], np.shape(x))
    for coefficient in coefficients[1:]:
        p = fma(p, x, coefficient)
    return p


def exp2(x) -> np.ndarray:
    x = np.asarray(x, F32)
    inside = (x >= -126) & (x < 127.5)
    safe = np.where(inside, x, F32(0))
    magic = F32(1.5 * 2**23)
    n = (safe + magic) - magic
    result = horner(EXP2, safe - n) * np.ldexp(F32(1), n.astype(np.int32))
    result = np.where(inside, result, np.where(x > 0, INFINITY, F32(0)))
    return np.where(np.isnan(x), x, result)


def log_of_reduced(f: np.ndarray, e: np.ndarray) -> np.ndarray:
    low, high, minus_half = constants("-0x1.bd0106p-13", "0x1.63p-1", "-0x1p-1")
    q = f * f
    r = (q * f) * horner(LOG, f)
    r = fma(e, low, r)
    r = fma(minus_half, q, r)
    return fma(e, high, f + r)


def log(x) -> np.ndarray:
    x = np.asarray(x, F32)
    normal = (x >= F32(2.0**-126)) & np.isfinite(x)
    offset = bits_of(np.where(normal, x, F32(1))).astype(np.int64) - 0x3F3504F3
    m = from_bits(((offset & 0x7FFFFF) + 0x3F3504F3).astype(np.uint32))
    result = log_of_reduced(m - F32(1), (offset >> 23).astype(F32))
    result = np.where(normal, result, np.where(x == np.inf, INFINITY, -INFINITY))
    return np.where(x >= 0, result, F32(np.nan))


def log_1m(u) -> np.ndarray:
    """log(1 - u)"""
    u = np.asarray(u, F32)
    return np.where(u <= F32(0.25), log_of_reduced(-u, np.zeros_like(u)), log(F32(1) - u))


def sigmoid(x) -> np.ndarray:
    return F32(1) / (F32(1) + exp2(x * -LOG2E))


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return bf16((gate * sigmoid(gate)) * up)


def padded_tree(leaves: np.ndarray) -> np.ndarray:
    """The balanced tree over the last axis, adjacent leaves first."""
    n = leaves.shape[-1]
    padding = (1 << max(n - 1, 0).bit_length()) - n
    q = np.pad(leaves, [(0, 0)] * (leaves.ndim - 1) + [(0, padding)])
    while q.shape[-1] > 1:
        q = q[..., ::2] + q[..., 1::2]
    return q[..., 0]


def tree_of_products(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of a * b over the last axis: leaves of four columns, then the tree."""
    padding = [(0, 0)] * (a.ndim - 1) + [(0, -a.shape[-1] % 4)]
    a, b = (np.pad(x, padding).reshape(*x.shape[:-1], -1, 4) for x in (a, b))
    q = a[..., 0] * b[..., 0]
    for i in (1, 2, 3):
        q = fma(a[..., i], b[..., i], q)
    return padded_tree(q)


def sum_of_squares(x: np.ndarray) -> np.ndarray:
    """Of the last axis."""
    return tree_of_products(x, x)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: np.float32) -> np.ndarray:
    s = F32(1) / np.sqrt(sum_of_squares(x) / F32(x.shape[-1]) + eps)
    return bf16(weight * bf16(x * s[..., None]))


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """RoPE of the last axis, by tables of half its size."""
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([bf16(fma(a, cos, -(b * sin))), bf16(fma(b, cos, a * sin))], -1)
