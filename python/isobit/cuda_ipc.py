"""Exports GPU memory, so that another process can read it. Needs only the CUDA driver."""

import ctypes
import functools

_Handle = ctypes.c_char * 64


def export_memory(address: int) -> tuple[bytes, int]:
    """Returns the handle (cudaIpcMemHandle_t, 64 bytes) and the first address of the allocation that contains
    `address`.

    Call it where the memory's CUDA context is current, as in a thread that uses the GPU through PyTorch.

    Raises:
      OSError: there is no CUDA driver, or it cannot export this memory; it can export only memory of
        cudaMalloc.
    """
    driver = _driver()
    begin, size = ctypes.c_uint64(), ctypes.c_size_t()
    _check(
        driver.cuMemGetAddressRange_v2(ctypes.byref(begin), ctypes.byref(size), ctypes.c_uint64(address)),
        f"no GPU memory at {address:#x}",
    )
    handle = _Handle()
    _check(
        driver.cuIpcGetMemHandle(ctypes.byref(handle), begin),
        "CUDA cannot export this memory to other processes: expected memory of cudaMalloc. With"
        " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True PyTorch allocates memory in another way",
    )
    return handle.raw, begin.value


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int, message: str) -> None:
    if result != 0:
        raise OSError(f"{message} (CUDA error {result})")
