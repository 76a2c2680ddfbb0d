"""The service's client of a trainer's store against torch's own, with both of its servers: rank 0 makes the
store as vLLM's StatelessProcessGroup does, and waits in it for all workers."""

import datetime
import socket
import threading
import unittest

from torch.distributed import TCPStore

from isobit import RolloutClient
from isobit.weights import WeightSpec
from isobit_tools.bf16_files import bf16_tensors
from isobit_tools.services import run_model_tool
from isobit_tools.testing import BIN_DIR, ServiceTest
from isobit_tools.testing_transfer import TcpGroup, pickled_id


class TcpStoreTest(ServiceTest):
    @classmethod
    def make_model(cls):
        for seed, name in enumerate(("model", "other")):
            run_model_tool(BIN_DIR, "make", "tiny-llama", str(cls.scratch / name), f"--seed={seed}")

    def test_trainer_and_rollout_meet_in_torchs_store(self):
        tensors = bf16_tensors(self.scratch / "other")
        specs = [WeightSpec(name, "BF16", bits.shape) for name, bits in tensors.items()]
        digest = run_model_tool(BIN_DIR, "verify", str(self.scratch / "other")).split()[0]
        client = self.enterContext(RolloutClient(self.start("rollout").target))
        failures: list[BaseException] = []

        def trainer(use_libuv: bool, group: TcpGroup, listener: socket.socket, port: int) -> None:
            try:
                store = TCPStore(
                    "127.0.0.1", port, world_size=2, is_master=True, use_libuv=use_libuv,
                    master_listen_fd=listener.detach(), timeout=datetime.timedelta(seconds=60),
                )  # fmt: skip
                store.set("broadcast_from/0/0", pickled_id(group.unique_id))
                group.join()
                group.broadcast_each(bits.tobytes() for bits in tensors.values())
            except BaseException as error:
                failures.append(error)

        for use_libuv in (False, True):
            with self.subTest(use_libuv=use_libuv), TcpGroup() as group:
                client.update_weights("model")
                listener = socket.create_server(("127.0.0.1", 0))
                port = listener.getsockname()[1]
                thread = threading.Thread(
                    target=trainer, args=(use_libuv, group, listener, port), daemon=True
                )
                thread.start()
                client.init_weight_transfer(master_address="127.0.0.1", master_port=port, timeout=60)
                client.start_weight_transfer()
                client.receive_weights(specs)
                done = client.finish_weight_transfer()
                thread.join(60)
                self.assertFalse(thread.is_alive())
                self.assertEqual(failures, [])
                self.assertEqual(done.current.digest, digest)


if __name__ == "__main__":
    unittest.main()
