"""The weight digest in NumPy, as docs/API.md defines it: a sum over words, so that any part of a tensor can
be summed separately, in any order.

    sums = block_sums(rows_0_to_99, columns=576) + block_sums(rows_100_up, columns=576, first_row=100)
    digest = weight_digest({"model.norm.weight": ((576,), tensor_digest(array)), ...})

Values are bfloat16, which NumPy does not have: their bits are stored as uint16.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np

WORD_VALUES = 4
INDEX_KEY = 0x9E3779B97F4A7C15
MIX = 0xBF58476D1CE4E5B9
LANES = (0x94D049BB133111EB, 0xFF51AFD7ED558CCD)
# Words that are mixed at the same time, so that their intermediate results stay in a core's cache.
_CHUNK = 1 << 14
_U64 = 2**64
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_ROTARY_BUFFERS = ("inv_freq", "original_inv_freq", "cos_cached", "sin_cached")


def bf16_bits(array: np.ndarray) -> np.ndarray:
    """Returns the values of `array` rounded to bfloat16 (to nearest, ties to even), as uint16 in the same
    shape.

    Args:
      array: float32, float16, ml_dtypes' bfloat16, or uint16, which is taken as the bits of bfloat16.

    Raises:
      ValueError: another dtype.
    """
    if array.dtype == np.uint16:
        return array
    if array.dtype.name == "bfloat16":
        return array.view(np.uint16)
    if array.dtype not in (np.float32, np.float16):
        raise ValueError(f"expected float32, float16, bfloat16 or its bits as uint16, got {array.dtype}")
    flat = np.ascontiguousarray(array).reshape(-1)
    rounded = np.empty(flat.size, np.uint16)
    step = 4 * _CHUNK
    for at in range(0, flat.size, step):
        bits = flat[at : at + step].astype(np.float32, copy=False).view(np.uint32)
        high = bits >> np.uint32(16)
        near = (bits + (high & np.uint32(1)) + np.uint32(0x7FFF)) >> np.uint32(16)
        is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        if is_nan.any():  # a NaN keeps its sign and becomes quiet
            near = np.where(is_nan, high | np.uint32(0x40), near)
        rounded[at : at + step] = near
    return rounded.reshape(array.shape)


def rows_and_columns(shape: Sequence[int]) -> tuple[int, int]:
    """Returns a tensor's shape as a matrix: a row is the last dimension. The elements of a vector are rows of
    one value."""
    return (math.prod(shape), 1) if len(shape) < 2 else (math.prod(shape[:-1]), shape[-1])


def check_columns(first_column: int, width: int, columns: int) -> None:
    """Raises ValueError if `width` columns from `first_column` on, of rows of `columns` values, are not whole
    words."""
    if first_column % WORD_VALUES or (width % WORD_VALUES and first_column + width != columns):
        raise ValueError(
            f"columns {first_column} to {first_column + width} of {columns}: expected multiples of"
            f" {WORD_VALUES}, or the end of the row"
        )


def block_sums(block: np.ndarray, columns: int, first_row: int = 0, first_column: int = 0) -> np.ndarray:
    """Returns the sums of one block of a tensor. The sums of disjoint blocks can be added, modulo 2^64.

    Args:
      block: bf16 bits, uint16 [rows, values of each row].
      columns: the length of a whole row of the tensor (see rows_and_columns).
      first_row, first_column: where the block begins. first_column is a multiple of 4; so is the width of the
        block, unless it reaches the end of the rows.

    Returns:
      uint64 [2].

    Raises:
      ValueError: first_column or the width is not a multiple of 4.
    """
    rows, width = block.shape
    check_columns(first_column, width, columns)
    sums = np.zeros(2, np.uint64)
    if block.size == 0:
        return sums
    row_words = -(-columns // WORD_VALUES)
    start = first_row * row_words + first_column // WORD_VALUES
    if width % WORD_VALUES:
        padded = np.zeros((rows, -(-width // WORD_VALUES) * WORD_VALUES), np.uint16)
        padded[:, :width] = block
        block = padded
    words = np.ascontiguousarray(block).view("<u8")  # [rows, words of each row]
    if words.shape[1] == row_words:
        words, row_words = words.reshape(1, -1), words.size
    steps = np.arange(min(words.shape[1], _CHUNK), dtype=np.uint64) * np.uint64(INDEX_KEY)
    # Short rows are mixed together, as many as fit into a chunk.
    at_once = max(1, _CHUNK // words.shape[1])
    for row in range(0, rows if words.shape[0] > 1 else 1, at_once):
        some = words[row : row + at_once]
        row_keys = np.array(
            [(start + r * row_words + 1) * INDEX_KEY % _U64 for r in range(row, row + some.shape[0])],
            np.uint64,
        )
        for at in range(0, words.shape[1], _CHUNK):
            part = some[:, at : at + _CHUNK]
            keys = row_keys[:, None] + np.uint64(at * INDEX_KEY % _U64) + steps[: part.shape[1]]
            sums += _mixed_sums(part, keys)
    return sums


def _mixed_sums(words: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns the sums of the mixed words. Overwrites `keys`."""
    half = np.uint64(32)
    mixed = np.bitwise_xor(words, keys, out=keys)
    shifted = mixed >> half
    mixed ^= shifted
    mixed *= np.uint64(MIX)
    np.right_shift(mixed, half, out=shifted)
    mixed ^= shifted
    sums = np.empty(2, np.uint64)
    lane = np.empty_like(mixed)
    for i, factor in enumerate(LANES):
        np.multiply(mixed, np.uint64(factor), out=lane)
        np.right_shift(lane, half, out=shifted)
        lane ^= shifted
        sums[i] = lane.sum(dtype=np.uint64)
    return sums


def sums_hex(sums: np.ndarray) -> str:
    """Returns the digest of a tensor with these sums, 32 hex digits."""
    return f"{int(sums[0]):016x}{int(sums[1]):016x}"


def tensor_digest(array: np.ndarray) -> str:
    """Returns the digest of a whole tensor, 32 hex digits. `array`: as in bf16_bits."""
    rows, columns = rows_and_columns(array.shape)
    return sums_hex(block_sums(bf16_bits(array).reshape(rows, columns), columns))


def is_rotary_buffer(name: str) -> bool:
    """Whether the tensor is a buffer of a rotary embedding, such as "model.rotary_emb.inv_freq". Old
    checkpoints have them, but they are never read."""
    *modules, buffer = name.split(".")
    return bool(modules) and modules[-1].startswith("rotary") and buffer in _ROTARY_BUFFERS


def weight_digest(tensors: Mapping[str, tuple[Sequence[int], str]]) -> str:
    """Returns the digest of weights, 64 hex digits, as a service reports it.

    Args:
      tensors: shape and tensor digest by name. Tensors that a checkpoint may have or not are ignored: rotary
        buffers, and an lm_head that equals the embedding.
    """
    weights = {
        name: (tuple(shape), digest)
        for name, (shape, digest) in tensors.items()
        if not is_rotary_buffer(name)
    }
    if weights.get(_HEAD) == weights.get(_EMBEDDING):
        weights.pop(_HEAD, None)
    whole = hashlib.sha256(b"isobit weights\n")
    for name, (shape, digest) in sorted((name.encode(), tensor) for name, tensor in weights.items()):
        text = f" [{', '.join(str(extent) for extent in shape)}] {digest}\n"
        whole.update(str(len(name)).encode() + b" " + name + text.encode())
    return whole.hexdigest()
