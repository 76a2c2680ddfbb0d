"""The noise of C8 (docs/NUMERICS.md)."""

import numpy as np

from numerics_reference.arithmetic import F32, fma, log, log_1m

LOW = np.uint64(0xFFFFFFFF)


def philox(key: int, c0, c1, c2, c3) -> list[np.ndarray]:
    """Philox4x32-10: four words for each counter, as uint64 arrays below 2^32."""
    words = np.broadcast_arrays(*(np.asarray(c, np.uint64) for c in (c0, c1, c2, c3)))
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        c0, c1, c2, c3 = words
        a, b = np.uint64(0xCD9E8D57) * c2, np.uint64(0xD2511F53) * c0
        shift = np.uint64(32)
        words = [(a >> shift) ^ c1 ^ np.uint64(k0), a & LOW, (b >> shift) ^ c3 ^ np.uint64(k1), b & LOW]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return words


def gumbel(word: np.ndarray) -> np.ndarray:
    u = fma(word.astype(F32), F32(2.0**-32), F32(2.0**-33))
    u = np.minimum(u, F32(1 - 2.0**-24))
    return -log(-log_1m(u))


def token_noise(seed: int, sample: int, position: int, vocab: int) -> np.ndarray:
    """g of every id."""
    groups = np.arange(-(-vocab // 4))
    return gumbel(np.stack(philox(seed, groups, position, sample, 0), -1).ravel()[:vocab])
