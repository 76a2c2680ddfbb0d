"""Weights that a trainer broadcasts by NCCL, as vLLM's trainers do, to a rollout on GPUs: torch's store, a
pickled id, the sum of one number, then tensors packed and one by one. The bits are those of the directory; a
trainer that is killed or silent leaves the old weights. Without a GPU it skips.

Trainer and service share one GPU here: each process says that it is a host of its own, so that NCCL takes
sockets.
"""

import ctypes
import datetime
import multiprocessing
import os
import socket
import time
import unittest
from pathlib import Path

import torch
from torch.distributed import TCPStore

from isobit import RolloutClient, nccl
from isobit.errors import IsobitError
from isobit.weights import WeightSpec
from isobit_tools.bf16_files import bf16_tensors
from isobit_tools.services import Setting, run_model_tool
from isobit_tools.testing import BIN_DIR, ServiceTest
from isobit_tools.testing_transfer import ncclUniqueId, pickled_id

PROMPT = [1, 2, 3]
BUFFER_BYTES = 5000
SILENCE_S = 3
ENOUGH_S = 20
_UINT8, _FLOAT32, _BFLOAT16, _SUM = 1, 7, 9, 0  # of nccl.h


def as_host(number: int) -> None:
    """NCCL takes a process for one of another host, so that ranks may share a GPU."""
    os.environ["NCCL_HOSTID"] = f"isobit-{number}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"


class Communicator:
    """Rank 0 of a group of two, as vLLM's PyNcclCommunicator makes one."""

    def __init__(self, unique_id: ncclUniqueId):
        library = nccl.library()
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        library.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), number, ncclUniqueId, number]
        library.ncclAllReduce.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
        library.ncclBroadcast.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
        self._library = library
        self._comm = pointer()
        self._check(library.ncclCommInitRank(ctypes.byref(self._comm), 2, unique_id, 0))
        one = torch.zeros(1, device="cuda")
        self._check(
            library.ncclAllReduce(
                one.data_ptr(), one.data_ptr(), 1, _FLOAT32, _SUM, self._comm, self._stream()
            )
        )
        torch.cuda.synchronize()

    def broadcast(self, tensor: torch.Tensor) -> None:
        kind = {torch.uint8: _UINT8, torch.bfloat16: _BFLOAT16, torch.float32: _FLOAT32}[tensor.dtype]
        at = tensor.data_ptr()
        self._check(self._library.ncclBroadcast(at, at, tensor.numel(), kind, 0, self._comm, self._stream()))
        torch.cuda.synchronize()

    @staticmethod
    def _stream() -> int:
        return torch.cuda.current_stream().cuda_stream

    @staticmethod
    def _check(result: int) -> None:
        if result != 0:
            raise nccl.NcclError(f"result {result}")


def new_id() -> ncclUniqueId:
    unique_id = ncclUniqueId()
    Communicator._check(nccl.library().ncclGetUniqueId(ctypes.byref(unique_id)))
    return unique_id


def train(directory: Path, dtype: torch.dtype, forms: list[str], ports) -> None:
    """A trainer's process: a store, a group, and the weights once in each form. "silent" sends nothing."""
    as_host(1)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    ports.put(port)
    store = TCPStore(
        "127.0.0.1", port, world_size=2, is_master=True, use_libuv=False,
        master_listen_fd=listener.detach(), timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    unique_id = new_id()
    store.set("broadcast_from/0/0", pickled_id(bytes(unique_id)))
    group = Communicator(unique_id)
    tensors = [
        torch.from_numpy(bits.view("int16")).view(torch.bfloat16).cuda().to(dtype).contiguous()
        for bits in bf16_tensors(directory).values()
    ]
    for form in forms:
        if form == "silent":
            time.sleep(600)
        elif form == "each":
            for tensor in tensors:
                group.broadcast(tensor)
        else:
            parts: list[torch.Tensor] = []
            for tensor in tensors:
                parts.append(tensor.view(torch.uint8).view(-1))
                if sum(part.numel() for part in parts) > BUFFER_BYTES:
                    group.broadcast(torch.cat(parts))
                    parts = []
            if parts:
                group.broadcast(torch.cat(parts))
    time.sleep(600)  # until it is killed: rank 0 stays as long as the group is used


@unittest.skipUnless(torch.cuda.is_available(), "SKIPPED: no GPU")
class BroadcastWeightsTest(ServiceTest):
    setting = Setting("tree", tp_size=1, shards=1)

    @classmethod
    def make_model(cls):
        for seed, name in enumerate(("model", "other")):
            run_model_tool(BIN_DIR, "make", "tiny-qwen2", str(cls.scratch / name), f"--seed={seed}")

    def rollout(self, tp_size: int = 1) -> RolloutClient:
        as_host(0)
        devices = ",".join(str(i) for i in range(tp_size))
        service = self.start(
            "rollout", "--backend", "cuda", "--tp_size", str(tp_size), "--devices", devices,
            "--num_pages", "64", "--max_batch_tokens", "1024", "--weight_stream_timeout_s", str(SILENCE_S),
        )  # fmt: skip
        return self.enterContext(RolloutClient(service.target))

    def join(self, client: RolloutClient, dtype: torch.dtype, forms: list[str], **packing):
        """A trainer's process whose group the rollout has joined."""
        context = multiprocessing.get_context("spawn")
        ports = context.Queue()
        trainer = context.Process(
            target=train, args=(self.scratch / "other", dtype, forms, ports), daemon=True
        )
        trainer.start()
        self.addCleanup(trainer.join)
        self.addCleanup(trainer.kill)
        client.init_weight_transfer(
            master_address="127.0.0.1", master_port=ports.get(timeout=120), timeout=120, **packing
        )
        return trainer

    def specs(self, dtype: str) -> list[WeightSpec]:
        return [WeightSpec(name, dtype, b.shape) for name, b in bf16_tensors(self.scratch / "other").items()]

    @staticmethod
    def sampled(client: RolloutClient) -> bytes:
        (sample,) = client.generate(PROMPT, seed=1, max_tokens=4, ignore_eos=True)
        return sample.tokens.logprobs.tobytes()

    def test_the_bits_are_those_of_the_directory(self):
        digest = run_model_tool(BIN_DIR, "verify", str(self.scratch / "other")).split()[0]
        for tp_size in (1, 2) if torch.cuda.device_count() > 1 else (1,):
            client = self.rollout(tp_size)
            old = self.sampled(client)
            client.update_weights("other")
            expected = self.sampled(client)
            self.assertNotEqual(expected, old)
            for dtype, name in ((torch.bfloat16, "BF16"), (torch.float32, "F32")):
                forms = ["packed", "each", "packed"]
                self.join(client, dtype, forms, packed=True, packed_buffer_size_bytes=BUFFER_BYTES)
                for form in forms:
                    client.update_weights("model")
                    client.start_weight_transfer()
                    client.receive_weights(self.specs(name), packed=form == "packed", timeout=60)
                    done = client.finish_weight_transfer(expected_digest=digest)
                    self.assertEqual(done.current.digest, digest, (tp_size, name, form))
                    self.assertEqual(self.sampled(client), expected, (tp_size, name, form))
                client.shutdown_weight_transfer()

    def test_a_trainer_that_is_silent_or_killed(self):
        client = self.rollout()
        old = self.sampled(client)
        for kills in (False, True):
            trainer = self.join(client, torch.bfloat16, ["silent"])
            client.start_weight_transfer()
            if kills:
                trainer.kill()
            start = time.monotonic()
            with self.assertRaises(IsobitError):
                client.receive_weights(self.specs("BF16"), timeout=120)
            self.assertLess(time.monotonic() - start, SILENCE_S + ENOUGH_S)
            self.assertEqual(self.sampled(client), old)
        self.join(client, torch.bfloat16, ["each"])
        client.start_weight_transfer()
        client.receive_weights(self.specs("BF16"), timeout=60)
        client.finish_weight_transfer()
        self.assertNotEqual(self.sampled(client), old)


if __name__ == "__main__":
    unittest.main()
