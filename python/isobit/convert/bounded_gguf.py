"""Reads GGUF files that may be damaged."""

import numpy as np
from gguf import GGUFReader


class BoundedGGUFReader(GGUFReader):
    """A GGUFReader that stops at the end of the file.

    GGUFReader itself returns empty values beyond the end, as many as a damaged count asks for.

    Raises:
      EOFError: the header asks for more bytes than the file has.
      Exception: any exception that a damaged file causes in GGUFReader's code.
    """

    def _get(self, offset, dtype, count=1, override_order=None):
        dtype = np.dtype(dtype).newbyteorder(override_order or self.byte_order)
        end = int(offset) + int(count) * dtype.itemsize
        if end > self.data.size:
            raise EOFError(f"the file has {self.data.size} bytes, but its header needs {end}")
        # Slices of the memory map itself are ten times slower, and a header has many fields.
        return np.asarray(self.data)[offset:end].view(dtype)
