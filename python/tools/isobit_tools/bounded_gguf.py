"""Reads GGUF files that may be damaged."""

import numpy as np
from gguf import GGUFReader


class BoundedGGUFReader(GGUFReader):
    """A GGUFReader that ends at the file's end.

    GGUFReader itself reads nothing there, as often as a damaged count says.

    Raises:
      EOFError: the header speaks of more bytes than the file has.
      Exception: whatever else GGUFReader's code runs into in a damaged file.
    """

    def _get(self, offset, dtype, count=1, override_order=None):
        dtype = np.dtype(dtype).newbyteorder(override_order or self.byte_order)
        end = int(offset) + int(count) * dtype.itemsize
        if end > self.data.size:
            raise EOFError(f"the file has {self.data.size} bytes, its header speaks of {end}")
        # Slices of the memory map itself are ten times as slow, and a header has many fields.
        return np.asarray(self.data)[offset:end].view(dtype)
