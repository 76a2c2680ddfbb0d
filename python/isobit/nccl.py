"""NCCL point to point, through ctypes: the senders' side of weights that go from GPU to GPU. It needs NCCL's
library, which PyTorch brings, but not torch.

A communicator here never blocks: every wait polls, and ends when any thread calls `abort`.
"""

import contextlib
import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence

ID_BYTES = 128
_IN_PROGRESS = 7
_POLL_S = 50e-6


class NcclError(RuntimeError):
    """NCCL failed, or the group was aborted."""


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t as of NCCL 2.14. Later versions accept it, and use defaults for the fields that they have
    added."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """Returns libnccl.so.2: the one that this process has loaded, as PyTorch does, or the system's.

    Raises:
      OSError: there is none.
    """
    # The same setting as in the services: without NVLink multicast, whose setup can fail on shared hosts.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    nccl = ctypes.CDLL("libnccl.so.2")
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    nccl.ncclGetLastError.restype = ctypes.c_char_p
    nccl.ncclCommInitRankConfig.argtypes = [
        ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _Id, ctypes.c_int, ctypes.POINTER(_Config)
    ]  # fmt: skip
    for call in (nccl.ncclSend, nccl.ncclRecv):
        call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int,
                         ctypes.c_void_p, ctypes.c_void_p]  # fmt: skip
    return nccl


def version() -> int:
    found = ctypes.c_int()
    _check(library().ncclGetVersion(ctypes.byref(found)))
    return found.value


def new_id() -> bytes:
    """Returns the id of a new group, which is valid as long as this process lives."""
    made = _Id()
    _check(library().ncclGetUniqueId(ctypes.byref(made)))
    return bytes(bytearray(made))


class Communicator:
    """One rank's end of a group. One thread uses it; `abort` may come from another."""

    def __init__(self, group_id: bytes, rank: int, size: int):
        """group_id: the result of new_id."""
        if len(group_id) != ID_BYTES:
            raise ValueError(f"group_id: expected {ID_BYTES} bytes, got {len(group_id)}")
        self._group_id, self._rank, self._size = group_id, rank, size
        self._lock = threading.Lock()
        self._aborted = False
        self._comm = ctypes.c_void_p()

    def join(self) -> None:
        """Joins the group and waits until all ranks have joined. The thread's current CUDA device becomes the
        rank's.

        Raises:
          NcclError: NCCL refuses the group; or, as in all calls, `abort` was called.
        """
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21400, 0)
        self._call(
            lambda: library().ncclCommInitRankConfig(
                ctypes.byref(self._comm), self._size, _Id.from_buffer_copy(self._group_id), self._rank,
                ctypes.byref(config),
            )
        )  # fmt: skip
        self._wait()

    def exchange(self, transfers: Sequence[tuple[str, int, int, int]], stream: int) -> None:
        """Enqueues transfers, which then run at the same time.

        Args:
          transfers: ("send" or "receive", address in this GPU's memory, bytes, rank of the other side).
          stream: the handle of a CUDA stream.
        """
        nccl = library()

        def enqueue() -> int:
            _check(nccl.ncclGroupStart())
            result = 0
            for way, address, size, peer in transfers:
                call = nccl.ncclSend if way == "send" else nccl.ncclRecv
                result = call(address, size, 1, peer, self._comm, stream)  # 1: bytes
                if result not in (0, _IN_PROGRESS):
                    break
            ended = nccl.ncclGroupEnd()
            return result if result not in (0, _IN_PROGRESS) else ended

        self._call(enqueue)
        self._wait()

    def wait_for(self, is_done: Callable[[], bool]) -> None:
        """Waits until `is_done` returns true. Raises NcclError if the group fails first."""
        while not is_done():
            self._check_state()
            time.sleep(_POLL_S)

    def abort(self) -> None:
        """Ends the group on this side, with everything in flight. Any thread may call it; a second call does
        nothing."""
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            comm, self._comm = self._comm, ctypes.c_void_p()
        if comm:
            # Aborting may wait for copies that never end.
            threading.Thread(target=library().ncclCommAbort, args=(comm,), daemon=True).start()

    def _call(self, call: Callable[[], int]) -> None:
        with self._lock:
            if self._aborted:
                raise NcclError("the NCCL group was aborted")
            result = call()
        if result not in (0, _IN_PROGRESS):
            _check(result)

    def _check_state(self) -> bool:
        """Whether NCCL has completed the last call."""
        state = ctypes.c_int()
        self._call(lambda: library().ncclCommGetAsyncError(self._comm, ctypes.byref(state)))
        if state.value not in (0, _IN_PROGRESS):
            _check(state.value)
        return state.value == 0

    def _wait(self) -> None:
        while not self._check_state():
            time.sleep(_POLL_S)


def _check(result: int) -> None:
    if result != 0:
        detail = ""
        with contextlib.suppress(AttributeError):
            detail = (library().ncclGetLastError(None) or b"").decode(errors="replace").strip()
        name = library().ncclGetErrorString(result).decode()
        raise NcclError(f"NCCL: {name}" + (f", {detail}" if detail else ""))
