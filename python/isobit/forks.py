"""Protects a process that uses gRPC, and its forked children, from each other.

gRPC's threads and connections do not survive a fork. By default its C library restarts its threads in the
child. They then send pings on the parent's connections, until the services end the parent's calls. This
module turns that off, so that children which use no client, such as data loaders, do no harm. If a child uses
a client after its parent did, it gets an error at once, since its calls would hang.

To get gRPC's own handling instead, set GRPC_ENABLE_FORK_SUPPORT=1 before the first import.
"""

import ctypes
import os
import sys
import threading
import warnings
import weakref
from typing import Any, TypeVar

NEVER = -1  # not a value of generation()
_VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"
_Guarded = TypeVar("_Guarded")

# gRPC reads it when it is first imported.
_is_late = "grpc._cython.cygrpc" in sys.modules and _VARIABLE not in os.environ
_grpc_handles_forks = os.environ.setdefault(_VARIABLE, "0").lower() in ("1", "true", "yes")

_guarded: weakref.WeakSet = weakref.WeakSet()
_lock = threading.RLock()  # a signal's handler may fork
_is_used = False  # this process has opened a channel
_is_child = False  # this process was forked from one that had
_generation = 0


def check() -> None:
    """Checks that this process may use a client.

    Raises:
      RuntimeError: it was forked from a process that had used one.
    """
    if _is_child:
        raise RuntimeError(
            "this process was forked after its parent had used a client, which gRPC does not survive: start"
            " workers by multiprocessing's 'spawn' or 'forkserver', or fork before the first call"
        )


def generation() -> int:
    """Returns a number that is different in each forked child. What was opened under another number cannot be
    used."""
    return _generation


def guarded(thing: _Guarded) -> _Guarded:
    """Returns `thing`, a channel or call of gRPC, after making sure that a forked child never touches it, not
    even to free it."""
    global _is_used
    with _lock:
        _is_used = True
        _guarded.add(thing)
    return thing


def is_own(opened_in: int) -> bool:
    """Whether something that was opened in the generation `opened_in` belongs to this process."""
    return opened_in == _generation


def _before() -> None:
    global _is_late
    _lock.acquire()  # so that the set is consistent in the child
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
        # Kept for ever, since freeing it would write to the parent's connection.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
