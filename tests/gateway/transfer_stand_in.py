"""Stands in for NCCL on a CPU: a rollout whose weight transfer takes a trainer's tensors within the process.

    with TransferStandIn(rollout.target) as stand_in:
        gateway = start_gateway(stand_in)     # all other calls go on to the rollout
        group = stand_in.join(init_info)      # the trainer's side, while the gateway's call waits
        group.broadcast(tensors)

It checks what the two sides tell each other, as NCCL would hang on: world, names' order, dtypes, sizes. What
FinishWeightTransfer commits goes to the rollout as a stream. The receiver itself has tests of its own.
"""

import queue
import threading
import types
from collections.abc import Iterable
from concurrent import futures

import grpc
import numpy as np

from isobit import RolloutClient
from isobit.v1 import rollout_pb2, types_pb2

_SERVICE = "/isobit.v1.RolloutService/"
_TIMEOUT_S = 60.0
_WIDTH = {"BF16": 2, "F16": 2, "F32": 4}
_NUMPY = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
_MODES = {1: "abort", 2: "wait", 3: "recompute_kv"}


class Group:
    """The trainer's end: rank 0."""

    def __init__(self, sent: queue.Queue):
        self._sent = sent
        self.group = types.SimpleNamespace()  # what TRL lets go of when it ends

    def broadcast(self, tensors: Iterable[bytes]) -> None:
        for data in tensors:
            self._sent.put(data)


class TransferStandIn(grpc.GenericRpcHandler):
    """Use it in a `with` block."""

    def __init__(self, target: str):
        self._rollout_target = target
        self._joined: queue.Queue[dict] = queue.Queue()  # what trainers have joined with
        self._sent: queue.Queue[bytes] = queue.Queue()
        self._received: dict[str, np.ndarray] = {}
        self._last: list = []
        self.requests: list = []  # of the transfer's calls, as they came
        self._in_flight: str | None = None

    def join(self, init_info: dict) -> Group:
        """As a trainer joins the group that `init_info` says."""
        self._joined.put(init_info)
        return Group(self._sent)

    def __enter__(self) -> "TransferStandIn":
        self._channel = grpc.insecure_channel(self._rollout_target)
        self._server = grpc.server(futures.ThreadPoolExecutor(64), handlers=[self])
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        return self

    def __exit__(self, *_) -> None:
        self._server.stop(0).wait()
        self._channel.close()

    def service(self, details):
        own = {
            "InitWeightTransfer": (self._init, rollout_pb2.InitWeightTransferRequest),
            "StartWeightTransfer": (self._start, rollout_pb2.StartWeightTransferRequest),
            "ReceiveWeights": (self._receive, rollout_pb2.ReceiveWeightsRequest),
            "FinishWeightTransfer": (self._finish, rollout_pb2.FinishWeightTransferRequest),
            "GetServerInfo": (self._info, types_pb2.GetServerInfoRequest),
        }
        found = own.get(details.method.removeprefix(_SERVICE))
        if found is None:
            return grpc.stream_stream_rpc_method_handler(
                lambda requests, context: self._pass_on(details.method, requests, context)
            )
        handler, kind = found

        def noted(request, context):
            if handler != self._info:
                self.requests.append(request)
            try:
                return handler(request)
            except (AssertionError, queue.Empty) as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{type(error).__name__}: {error}")

        return grpc.unary_unary_rpc_method_handler(
            noted, kind.FromString, lambda answer: answer.SerializeToString()
        )

    def _pass_on(self, method: str, requests, context):
        call = self._channel.stream_stream(method, None, None)(requests)
        context.add_callback(call.cancel)
        try:
            yield from call
        except grpc.RpcError as error:
            context.set_trailing_metadata(error.trailing_metadata() or ())
            context.abort(error.code(), error.details())

    def _info(self, request):
        """The rollout's own, on a GPU: where there is NCCL."""
        with RolloutClient(self._rollout_target) as rollout:
            info = rollout.get_server_info()
        info.server.instruction_set = "cuda/NVIDIA H200"
        return info

    def _init(self, request):
        told = self._joined.get(timeout=_TIMEOUT_S)
        assert request.world_size == int(told["world_size"]), (request, told)
        assert request.master_address == told["master_address"], (request, told)
        assert request.master_port == int(told["master_port"]), (request, told)
        assert request.packed and 1 <= request.rank_offset < request.world_size, request
        return rollout_pb2.InitWeightTransferResponse()

    def _start(self, request):
        self._in_flight, self._received = _MODES[request.in_flight_mode], {}
        return rollout_pb2.StartWeightTransferResponse()

    def _receive(self, request):
        self._last = list(request.tensors) or self._last
        size = 0
        for tensor in self._last:
            data = self._sent.get(timeout=_TIMEOUT_S)
            assert len(data) == int(np.prod(tensor.shape)) * _WIDTH[tensor.dtype], tensor
            assert tensor.name not in self._received, tensor
            values = np.frombuffer(data, _NUMPY[tensor.dtype])
            self._received[tensor.name] = values.reshape([int(d) for d in tensor.shape])
            size += len(data)
        return rollout_pb2.ReceiveWeightsResponse(num_bytes=size)

    def _finish(self, request):
        with RolloutClient(self._rollout_target) as rollout:
            return rollout.update_weights_from_stream(self._received, in_flight=self._in_flight)


def in_thread(work) -> "threading.Thread":
    """Runs `work` beside the caller."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def tensors_of(directory):
    """Names and torch tensors of a checkpoint, in the order of its names."""
    from safetensors.torch import load_file

    found = load_file(directory / "model.safetensors")
    return [(name, found[name]) for name in sorted(found)]


def raw(tensor) -> bytes:
    """A torch tensor's bytes."""
    import torch

    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def update_info(tensors) -> dict:
    """What vLLM's trainers say of them."""
    return {
        "names": [name for name, _ in tensors],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
        "shapes": [list(tensor.shape) for _, tensor in tensors],
    }
