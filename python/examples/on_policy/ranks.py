"""The processes of a run: how they start, agree, and stop."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from isobit.errors import IsobitError

_Result = TypeVar("_Result")


class RunError(Exception):
    """The run cannot go on; the message says why."""


class Stopped(Exception):
    """A signal asked the run to stop: the step is dropped, what came before it is saved."""


class StopSignal:
    """SIGINT and SIGTERM ask to stop; a second one ends the process at once."""

    def __init__(self):
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, _frame) -> None:
        if self.asked:
            sys.exit(128 + number)
        self.asked = True

    def check(self) -> None:
        """Raises Stopped on every rank if any was asked to stop. Every rank has to call it."""
        asked = torch.tensor(int(self.asked))
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        if asked:
            self.asked = True
            raise Stopped


def join(device: str) -> torch.device:
    """Joins the group of torchrun's processes, or one of this process alone. Returns this rank's device."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if device != "cuda":
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cuda", torch.cuda.current_device())


def is_first() -> bool:
    return dist.get_rank() == 0


def from_rank_0(what: str, work: Callable[[], _Result]) -> _Result:
    """What work() returns on rank 0, which alone calls it.

    Raises:
        RunError: work() raised; on every rank, with that message after `what`.
        Stopped: work() raised that; on every rank.
    """
    result, error, stopped = None, None, False
    if is_first():
        try:
            result = work()
        except Stopped:
            stopped = True
        except Exception as raised:
            error = f"{what}: {raised}"
            if not isinstance(raised, IsobitError | RunError):
                traceback.print_exc()
    outcome: list[Any] = [result, error, stopped]
    dist.broadcast_object_list(outcome)
    result, error, stopped = outcome
    if stopped:
        raise Stopped
    if error is not None:
        raise RunError(error)
    return result


def gathered(mine: dict[int, _Result]) -> list[_Result]:
    """Every rank's results by number, on every rank, in order."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole = {number: result for part in everyone for number, result in part.items()}
    return [whole[number] for number in sorted(whole)]
