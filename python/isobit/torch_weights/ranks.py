"""What the ranks of a PyTorch trainer tell each other."""

import weakref
from typing import Any

import torch.distributed as dist


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def told_by_first(told: Any) -> Any:
    """Returns the first rank's value on every rank. Every rank must call it."""
    if world() == 1:
        return told
    objects = [told]
    dist.broadcast_object_list(objects, group=_cpu_group())
    return objects[0]


def told_by_all(own: Any) -> list[Any]:
    """Returns the values of all ranks, in their order, on every rank. Every rank must call it."""
    if world() == 1:
        return [own]
    together = [None] * world()
    dist.all_gather_object(together, own, group=_cpu_group())
    return together


_cpu_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = weakref.WeakKeyDictionary()


def _cpu_group() -> dist.ProcessGroup:
    """Returns a group of all ranks of the default group, on the CPU. It is made at the first call, which
    every rank must make.

    In an NCCL group, a rank that waits for the others runs a kernel on its GPU meanwhile. A service on that
    GPU would share its time with that kernel, and NCCL cannot set up a sender beside it: all would wait for
    each other.
    """
    everyone = dist.group.WORLD
    if dist.get_backend() == "gloo":
        return everyone
    if everyone not in _cpu_groups:
        _cpu_groups[everyone] = dist.new_group(backend="gloo")
    return _cpu_groups[everyone]
