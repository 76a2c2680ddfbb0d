"""Sends a PyTorch trainer's weights by NCCL, from GPU to GPU: each rank of the trainer sends each rank of a
service the parts that it holds and that the service's rank requests. Nothing is gathered, and no rank holds a
second model.

    group = init_weights_update_group(rollout)  # on every rank; as long as both sides live
    update_weights(model, rollout, transport="nccl", group=group, weight_version=step)

docs/API.md, "Weights by NCCL", describes the exchange.
"""

import contextlib
import threading
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from isobit import nccl
from isobit.torch_weights import parameters
from isobit.torch_weights.digest import model_digest
from isobit.torch_weights.parameters import sent_dtype
from isobit.torch_weights.ranks import rank, told_by_all, told_by_first, world
from isobit.torch_weights.slices import LocalSlice, local_slices
from isobit.weights import DistributedWeights, HeldBlock, WeightSpec

_REQUEST_WORDS = 6
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}


def init_weights_update_group(client: Any = None) -> "WeightsUpdateGroup":
    """Returns the groups of the trainer's ranks with those of a service. Every rank of the default group must
    call it.

    Args:
        client: RolloutClient or ScorerClient of a service on GPUs; only the first rank needs one.

    Raises:
        IsobitError: on every rank, if the service's GetServerInfo failed on the first rank.
    """
    told: Any = None
    if rank() == 0:
        try:
            # In a scorer, one rank receives and packs for all.
            told = getattr(client.get_server_info(), "tensor_parallel_size", 1)
        except Exception as error:
            told = error
    told = told_by_first(told)
    if isinstance(told, Exception):
        raise told
    return WeightsUpdateGroup(told)


class WeightsUpdateGroup:
    """One NCCL group for each rank of a service that receives: the trainer's ranks, then that rank. The
    groups are joined at the first update; after an update that fails, the next one makes new groups. Not
    thread-safe."""

    def __init__(self, num_receivers: int):
        self._num_receivers = num_receivers
        self._group_ids: list[bytes] = []
        self._senders: list[_Sender] = []  # one for each receiver; empty: not joined

    def close(self) -> None:
        """Leaves the groups. A later update joins new ones."""
        for sender in self._senders:
            sender.abort()
        self._senders = []

    @contextlib.contextmanager
    def sending(
        self, model: nn.Module, client: Any, expected_digest: str | None, arguments: dict
    ) -> Iterator[Exception | None]:
        """Sends the weights while the block runs; the first rank also makes the service's call. Yields the
        exception that this call raised, or None. If a rank raises an exception in the block, the sending
        ends."""
        has_joined = self._agree(model)
        named = parameters.of_model(model)
        digest = model_digest(model) if expected_digest is None else expected_digest
        if not has_joined:
            self._senders = [
                _Sender(group_id, rank(), world(), torch.cuda.current_device())
                for group_id in self._group_ids
            ]
        for sender in self._senders:
            sender.start(named, self._slices)
        failure = None
        try:
            if rank() == 0:
                failure = self._update(client, named, has_joined, digest, arguments)
            yield failure
            for sender in self._senders:
                sender.join()
        except BaseException as error:
            causes = [sender.failure for sender in self._senders if sender.failure is not None]
            self.close()
            raise error from (causes[0] if causes and causes[0] is not error else error.__cause__)

    def _agree(self, model: nn.Module) -> bool:
        """Tells all ranks which rank holds what, and the groups' ids. Returns whether the groups are joined
        already."""
        try:
            named = parameters.of_model(model)
            self._slices = local_slices(named)
            own: Any = [
                HeldBlock(held.tensor, (held.first_row, held.values.shape[0]),
                          (held.first_column, held.values.shape[1]), rank(), 0, 0)
                for held in self._slices
            ]  # fmt: skip
            ids = [nccl.new_id() for _ in range(self._num_receivers)] if rank() == 0 else []
        except Exception as error:
            own, ids = error, []
        together = told_by_all((own, ids, bool(self._senders)))
        for of_rank, _, _ in together:
            if isinstance(of_rank, Exception):
                raise of_rank
        self._blocks = [block for of_rank, _, _ in together for block in of_rank]
        has_joined = all(joined for _, _, joined in together)
        if not has_joined:
            self.close()
            self._group_ids = together[0][1]
        return has_joined

    def _update(
        self,
        client: Any,
        named: list[tuple[str, Tensor]],
        has_joined: bool,
        digest: str,
        arguments: dict,
    ) -> Exception | None:
        weights = DistributedWeights(
            specs=[WeightSpec(name, sent_dtype(name, p.dtype), tuple(p.shape)) for name, p in named],
            blocks=self._blocks,
            group_ids=self._group_ids,
            num_senders=world(),
            has_joined=has_joined,
            nccl_version=nccl.version(),
        )
        try:
            client.update_weights_from_distributed(
                weights, expected_digest=digest, has_sent=self._has_sent, **arguments
            )
        except Exception as error:
            return error
        return None

    def _has_sent(self) -> bool:
        """Whether this rank has sent everything. Raises the exception that stopped it."""
        return all([sender.has_sent() for sender in self._senders])


class _Sender:
    """Sends from this rank to one rank of the service, on its own thread and stream."""

    def __init__(self, group_id: bytes, rank: int, world: int, device: int):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._world = world
        self._comm = nccl.Communicator(group_id, rank, world + 1)
        self._has_joined = False
        self._thread: threading.Thread | None = None
        self.failure: Exception | None = None  # the exception that stopped it

    def start(self, named: list[tuple[str, Tensor]], slices: list[LocalSlice]) -> None:
        """Starts to send what is requested, once the GPU work so far has ended."""
        dtypes = [_DTYPES[sent_dtype(name, p.dtype)] for name, p in named]
        # In the order in which the service numbers them.
        sorted_by_name = sorted(range(len(named)), key=lambda i: named[i][0].encode())
        own: dict[int, list[LocalSlice]] = {}
        for held in slices:
            own.setdefault(held.tensor, []).append(held)
        self._stream.wait_stream(torch.cuda.current_stream())
        self._thread = threading.Thread(
            target=self._run,
            args=([(dtypes[i], own.get(i, [])) for i in sorted_by_name],),
            name="isobit weights",
            daemon=True,
        )
        self._thread.start()

    def has_sent(self) -> bool:
        if self.failure is not None:
            raise self.failure
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def abort(self) -> None:
        self._comm.abort()
        if self._thread is not None:
            self._thread.join()

    def _run(self, tensors: list[tuple[torch.dtype, list[LocalSlice]]]) -> None:
        try:
            torch.cuda.set_device(self._device)
            with torch.cuda.stream(self._stream), torch.no_grad():
                if not self._has_joined:
                    self._comm.join()
                    self._has_joined = True
                for _, requests in groupby(self._requests(), key=lambda request: request[0]):
                    # Kept until NCCL has enqueued them. Only this stream reuses their memory.
                    values = [_slice_of(*tensors[tensor], *place) for _, tensor, *place in requests]
                    self._exchange("send", values)
                self._wait()
        except Exception as error:
            self.failure = error

    def _requests(self) -> list[list[int]]:
        """Returns job, tensor, first row, rows, first column and columns of each part that the service's rank
        requests."""
        count = torch.empty(1, dtype=torch.int64, device=self._device)
        self._exchange("receive", [count])
        self._wait()
        requests = torch.empty(int(count), _REQUEST_WORDS, dtype=torch.int64, device=self._device)
        if len(requests) > 0:
            self._exchange("receive", [requests])
            self._wait()
        return requests.tolist()

    def _exchange(self, way: str, tensors: list[Tensor]) -> None:
        self._comm.exchange(
            [(way, t.data_ptr(), t.numel() * t.element_size(), self._world) for t in tensors],
            self._stream.cuda_stream,
        )

    def _wait(self) -> None:
        event = self._stream.record_event()
        self._comm.wait_for(event.query)


def _slice_of(
    dtype: torch.dtype, slices: list[LocalSlice], first_row: int, rows: int, first_column: int, columns: int
) -> Tensor:
    """Returns some rows and columns of a tensor, as they are sent. `slices`: what this rank holds of it."""
    for held in slices:
        row, column = first_row - held.first_row, first_column - held.first_column
        if row < 0 or column < 0:
            continue
        if row + rows <= held.values.shape[0] and column + columns <= held.values.shape[1]:
            return held.values[row : row + rows, column : column + columns].to(dtype).contiguous()
    raise ValueError(
        f"the service requests rows {first_row} to {first_row + rows} and columns {first_column} to"
        f" {first_column + columns} of a tensor, which this rank does not hold"
    )
