"""Tests of weights by broadcast through the gateway when the trainer, or the rollout, goes or never comes.

python tests/gateway/transfer_faults_test.py

The rollout is a real one on CPUs, and the trainer's group one of TCP connections (docs/API.md, "Weights by
broadcast"). What a lost transfer is answered with must not be a 5xx: trainers send those again for minutes.
"""

import functools
import json
import signal
import socket
import threading
import time
import unittest
from collections.abc import Callable
from typing import Any

from engines import EngineTest

from isobit_tools.bf16_files import bf16_tensors
from isobit_tools.testing_transfer import StoreServer, TcpGroup

PROMPT = [5, 6, 7, 8, 9]
INIT = "/init_weight_transfer_engine"
SHORT_S = 1.5  # how long the gateway waits for a trainer


class TransferFaultsTest(EngineTest):
    def setUp(self):
        super(EngineTest, self).setUp()  # without a scorer
        self.rollout = self.start("rollout")
        self.other = self.log_dir / "other"
        self.write_model(self.other, seed=9)
        self.gateway = self.start_gateway(self.rollout, None, f"--trainer_timeout_s={SHORT_S}")
        tensors = bf16_tensors(self.other)
        self.tensors = [bits.tobytes() for bits in tensors.values()]
        self.update_info = {
            "names": list(tensors),
            "dtype_names": ["bfloat16"] * len(tensors),
            "shapes": [list(bits.shape) for bits in tensors.values()],
        }

    def init_info(self, port: int) -> dict[str, Any]:
        info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        return {"init_info": info | {"packed": False}}

    def beside(self, work: Callable[[], object]) -> threading.Thread:
        """Runs `work` on a thread; the test fails if it does, or has not ended when the test has."""
        failures: list[BaseException] = []

        def checked() -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)

        def end() -> None:
            thread.join(60)
            self.assertFalse(thread.is_alive())
            self.assertEqual(failures, [])

        thread = threading.Thread(target=checked, daemon=True)
        thread.start()
        self.addCleanup(end)
        return thread

    def sampled(self) -> list[int]:
        body = {"prompt": PROMPT, "max_tokens": 8, "seed": 1, "return_token_ids": True}
        return self.gateway.post("/v1/completions", body)["choices"][0]["token_ids"]

    def conflict(self, path: str, body: Any, *texts: str) -> None:
        """The answer is a 409 that nobody sends again, with `texts` in the dialect's form of an error."""
        status, headers, text = self.gateway.request("POST", path, body)
        self.assertEqual(status, 409, text)
        error = json.loads(text)["error"]
        self.assertEqual((error["type"], error["code"]), ("ConflictError", 409))
        for wanted in texts:
            self.assertIn(wanted, error["message"])
        self.assertEqual(headers.get("x-should-retry"), "false")
        self.assertNotIn("retry-after", headers)

    def join(self) -> TcpGroup:
        """A group that the rollout has joined, by the id in a store."""
        group, store = self.enterContext(TcpGroup()), self.enterContext(StoreServer())
        store.put_id(group.unique_id)
        thread = self.beside(group.join)
        self.gateway.post(INIT, self.init_info(store.port))
        thread.join(60)
        return group

    def update(self, group: TcpGroup) -> None:
        self.gateway.post("/start_weight_update")
        self.beside(functools.partial(group.broadcast_each, self.tensors))
        self.gateway.post("/update_weights", {"update_info": self.update_info})
        self.gateway.post("/finish_weight_update", {"weight_version": "new"})

    def test_a_trainer_that_never_comes(self):
        before = self.sampled()
        with socket.socket() as silent:  # bound, so that nobody else listens there
            silent.bind(("127.0.0.1", 0))
            port = silent.getsockname()[1]
            place, begun = f"127.0.0.1:{port}", time.monotonic()
            waits = self.beside(lambda: self.conflict(INIT, self.init_info(port), place, f"{SHORT_S:g} s"))
            self.assertEqual(self.sampled(), before)
            self.conflict("/start_weight_update", None)
            waits.join(60)
        self.assertGreaterEqual(time.monotonic() - begun, SHORT_S)
        self.assertIn(f"waits for the trainer at {place}", self.gateway.log.read_text())
        self.conflict("/start_weight_update", None)
        self.update(self.join())  # nothing of it is left
        self.assertNotEqual(self.sampled(), before)
        self.assertEqual(self.gateway.get("/weight_info"), {"weight_version": "new"})

    def test_a_store_that_never_has_an_id(self):
        with StoreServer() as store:
            self.conflict(INIT, self.init_info(store.port), f"127.0.0.1:{store.port}")

    def test_a_trainer_that_goes_before_the_group_is_there(self):
        with TcpGroup() as group, StoreServer() as store:
            store.put_id(group.unique_id)
            group.close()
            self.conflict(INIT, self.init_info(store.port), f"127.0.0.1:{store.port}")
        with StoreServer() as store:
            closes = self.beside(lambda: (store.wait_workers(2), store.close()))
            self.conflict(INIT, self.init_info(store.port), f"127.0.0.1:{store.port}")
            closes.join()
        info = self.init_info(50000)
        info["init_info"]["master_address"] = "no.such.host.invalid"
        self.conflict(INIT, info, "no.such.host.invalid:50000")

    def test_a_later_call_takes_the_place_of_one_that_waits(self):
        with StoreServer() as store:
            waits = self.beside(lambda: self.conflict(INIT, self.init_info(store.port)))
            store.wait_workers(2)
            self.update(self.join())
            waits.join(60)

    def test_a_trainer_that_is_lost_after_bytes_have_moved(self):
        before, group = self.sampled(), self.join()
        self.gateway.post("/start_weight_update")
        self.beside(lambda: (group.broadcast(self.tensors[0]), group.close()))
        body = {"update_info": self.update_info}
        self.conflict("/update_weights", body, "closed the connection", f"begin again with {INIT}")
        self.conflict("/update_weights", body, f"{INIT} and /start_weight_update first")
        self.conflict("/finish_weight_update", None, "/start_weight_update first")
        self.assertEqual(self.sampled(), before)
        self.update(self.join())
        self.assertNotEqual(self.sampled(), before)

    def test_a_rollout_that_is_lost(self):
        group = self.join()
        self.gateway.post("/start_weight_update")
        body = {"update_info": self.update_info}

        def kill() -> None:
            group.broadcast(self.tensors[0])
            self.rollout.process.send_signal(signal.SIGKILL)

        self.beside(kill)
        for path, asked in (
            ("/update_weights", body), ("/finish_weight_update", None), ("/start_weight_update", None),
        ):  # fmt: skip
            self.conflict(path, asked, "the weight transfer is lost", f"begin again with {INIT}")
        status, headers, _ = self.gateway.request("POST", INIT, self.init_info(50000))
        self.assertEqual(status, 503)  # nothing has begun: the rollout may come back
        self.assertIn("retry-after", headers)


if __name__ == "__main__":
    unittest.main()
