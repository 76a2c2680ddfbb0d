"""What a fork does to gRPC, and how a forked child is told.

gRPC's threads and connections do not survive a fork. Its C library restarts its threads in the child by
default, which then ping on the parent's connections until the services end the parent's calls. That is turned
off here, so that children which use no client, such as data loaders, harm nobody. A child that uses one after
its parent did is told at once, since its calls would hang.

Who sets GRPC_ENABLE_FORK_SUPPORT=1 before the first import wants gRPC's own handling, and gets it.
"""

import ctypes
import os
import sys
import threading
import warnings
import weakref
from typing import Any, TypeVar

NEVER = -1  # no generation()
_VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"
_Guarded = TypeVar("_Guarded")

# gRPC reads it when it is first imported.
_is_late = "grpc._cython.cygrpc" in sys.modules and _VARIABLE not in os.environ
_grpc_handles_forks = os.environ.setdefault(_VARIABLE, "0").lower() in ("1", "true", "yes")

_guarded: weakref.WeakSet = weakref.WeakSet()
_lock = threading.RLock()  # a signal's handler may fork
_is_used = False  # this process has opened a channel
_is_child = False  # a process before this one had
_generation = 0


def check() -> None:
    """RuntimeError: this process was forked from one that had used a client."""
    if _is_child:
        raise RuntimeError(
            "forked after its parent had used a client, which gRPC does not survive: start workers by"
            " multiprocessing's 'spawn' or 'forkserver', or fork before the first call"
        )


def generation() -> int:
    """Another number in each forked child: what was opened under an earlier one is of no use."""
    return _generation


def guarded(thing: _Guarded) -> _Guarded:
    """`thing`, a channel or call of gRPC, which a forked child shall not touch, not even to free it."""
    global _is_used
    with _lock:
        _is_used = True
        _guarded.add(thing)
    return thing


def is_own(opened_in: int) -> bool:
    """Whether what was opened in that generation belongs to this process."""
    return opened_in == _generation


def _before() -> None:
    global _is_late
    _lock.acquire()  # so that the set is whole in the child
    if _is_late and _is_used:
        _is_late = False
        warnings.warn(
            "isobit: this process forks, and had imported grpc before isobit: its children may end its calls."
            f" Import isobit first, or set {_VARIABLE}=0 in the environment",
            RuntimeWarning,
            stacklevel=2,
        )


def _in_parent() -> None:
    _lock.release()


def _in_child() -> None:
    global _guarded, _generation, _is_child, _is_used
    things: list[Any] = list(_guarded)
    _guarded = weakref.WeakSet()
    _lock.release()
    _generation += 1
    if _grpc_handles_forks:
        return
    _is_child, _is_used = _is_child or _is_used, False
    for thing in things:
        # For ever: to free it would write to the parent's connection.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
