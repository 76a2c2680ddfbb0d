"""Tests of clients in processes of their own: forks, interrupts, event loops, proxies, many calls at once.

python tests/python/processes_test.py        (in an environment where the package `isobit` is installed)
"""

import os
import signal
import subprocess
import sys
import threading
import time
import unittest
from concurrent import futures

import client_test
import grpc

from isobit.v1 import rollout_pb2, rollout_pb2_grpc

LONG = 960  # first token of a prompt whose call lasts until the test lets it go on
END_S = 25  # what ends at once has ended by then, on any machine

# What every child process has: `client`, `target`, and go_on(), which waits for a line of its parent.
BEGIN = """
import asyncio, os, signal, sys, threading, time
from isobit import RolloutClient, aio
target = sys.argv[1]
def go_on():
    print("ready", flush=True)
    sys.stdin.readline()
def outcome(work):
    try:
        work()
        return "works"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
def forked(work):
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, str(work()).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text
"""

INHERITED = """
client = RolloutClient(target)
print(forked(lambda: outcome(client.get_load)))  # nobody has used it before
client.get_load()
def own():
    with RolloutClient(target) as other:
        other.get_load()
def own_batch():
    with RolloutClient(target) as other:
        other.generate_batch([[1]])
def own_aio():
    async def use():
        async with aio.RolloutClient(target) as other:
            await other.get_load()
    asyncio.run(use())
for work in (client.get_load, own, own_batch, own_aio):
    print(forked(lambda: outcome(work))[:80])
def grandchild():
    return forked(lambda: outcome(own))
print(forked(grandchild)[:80])
print(outcome(client.get_load))
"""

IN_FLIGHT = """
client = RolloutClient(target)
ends = []
def call():
    ends.append(outcome(lambda: client.generate([960])))
threads = [threading.Thread(target=call) for _ in range(4)]
events = client.generate([960], stream=True)
threads.append(threading.Thread(target=lambda: ends.append(outcome(lambda: list(events)))))
[thread.start() for thread in threads]
go_on()
def touch():  # all that a child can do to what it inherits
    global client, events
    client.close()
    del client, events
    import gc
    gc.collect()
    return len(os.listdir("/proc/self/task"))
print([forked(touch) for _ in range(4)])
if (child := os.fork()) == 0:
    sys.exit(0)  # which frees everything
os.waitpid(child, 0)
go_on()
[thread.join() for thread in threads]
print(ends)
"""

INTERRUPTED = """
import numpy as np
class Slow(dict):
    def items(self):
        print("reading", flush=True)
        for _ in range(6000):  # one sleep would go on if the interrupt came just before its system call
            time.sleep(0.1)
        yield "x", np.zeros((4, 4), np.uint16)
async def asynchronous(work):
    async with aio.RolloutClient(target) as own:
        await work(own)
client = RolloutClient(target)
{
    "generate": lambda: client.generate([960]),
    "stream": lambda: list(client.generate([960], stream=True)),
    "batch": lambda: client.generate_batch([[960]] * 60, max_concurrency=20),
    "weights": lambda: client.update_weights_from_stream(Slow()),
    "waiting": lambda: RolloutClient("127.0.0.1:1").wait_until_serving(600),
    "full": lambda: client.generate([961]),
    "aio generate": lambda: asyncio.run(asynchronous(lambda own: own.generate([960]))),
    "aio batch": lambda: asyncio.run(asynchronous(lambda own: own.generate_batch([[960]] * 60))),
    "aio weights": lambda: asyncio.run(asynchronous(lambda own: own.update_weights_from_stream(Slow()))),
    "aio full": lambda: asyncio.run(asynchronous(lambda own: own.generate([961]))),
}[sys.argv[2]]()
"""

LOOPS = """
import logging
lines = []
class Catch(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger().addHandler(Catch())
counts = []
async def batch(leave):
    async with aio.RolloutClient(target) as client:
        calls = [asyncio.ensure_future(client.generate([1])) for _ in range(60)]
        if leave:  # calls end with the client, or after their loop
            for call in calls:
                call.add_done_callback(lambda call: call.cancelled() or call.exception())
            await calls[0]
            return
        counts.append(len(await asyncio.gather(*calls)))
def several(leave):
    for _ in range(3):
        asyncio.run(batch(leave))
threads = [threading.Thread(target=several, args=(number == 0,)) for number in range(4)]
def at_once():
    counts.append(len(RolloutClient(target).generate_batch([[1]] * 60)))
threads.append(threading.Thread(target=at_once))
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(sorted(counts), lines[:3])
"""

LEFT_OPEN = """
async def leave():
    client = aio.RolloutClient(target)
    await client.get_load()
    tasks = [asyncio.create_task(client.generate([960])) for _ in range(4)]
    stream = client.generate([960], stream=True)
    await asyncio.sleep(0.2)
asyncio.run(leave())
client = RolloutClient(target)
threading.Thread(target=lambda: outcome(lambda: client.generate_batch([[960]] * 4)), daemon=True).start()
go_on()
print("ends")
"""

WIDE = """
client = RolloutClient(target)
client.generate_batch([[1]])
before = len(os.listdir("/proc/self/task"))
thread = threading.Thread(target=lambda: client.generate_batch([[960]] * 200, max_concurrency=200))
thread.start()
go_on()
print(len(os.listdir("/proc/self/task")) - before)
go_on()
thread.join()
"""

PROXIES = """
async def use():
    async with aio.RolloutClient(target) as client:
        await client.get_load(timeout=20)
client = RolloutClient(target)
print(outcome(lambda: client.get_load(timeout=20)), outcome(lambda: asyncio.run(use())))
"""


LATE = """
client.get_load()
print(forked(lambda: "forks"))
"""


class FakeRollout(client_test.FakeRollout):
    """Calls whose prompt begins with LONG last until go_on is set, and LONG + 1 is refused with a hint."""

    def __init__(self):
        super().__init__()
        self.go_on = threading.Event()
        self.begun = 0
        self._lock = threading.Lock()

    def Generate(self, request, context):
        if request.prompt_token_ids[0] in (LONG, LONG + 1):
            with self._lock:
                self.begun += 1
        if request.prompt_token_ids[0] == LONG + 1:
            context.set_trailing_metadata((("retry-after-ms", "600000"),))
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        if request.prompt_token_ids[0] == LONG:
            over = threading.Event()
            context.add_callback(over.set)
            while not (self.go_on.wait(0.05) or over.is_set()):
                pass
        yield from super().Generate(rollout_pb2.GenerateRequest(prompt_token_ids=[1]), context)

    def GetLoad(self, request, context):
        return rollout_pb2.GetLoadResponse()

    def UpdateWeightsFromStream(self, requests, context):
        for _ in requests:
            pass
        return rollout_pb2.types__pb2.UpdateWeightsResponse()


class ProcessesTest(unittest.TestCase):
    def setUp(self):
        self.service = FakeRollout()
        server = grpc.server(futures.ThreadPoolExecutor(256))
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self.service, server)
        self.port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        self.addCleanup(lambda: server.stop(None).wait())
        self.addCleanup(self.service.go_on.set)

    def process(
        self, source: str, *words: str, env: dict | None = None, host="127.0.0.1", first=""
    ) -> subprocess.Popen:
        inherited = {name: text for name, text in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
        process = subprocess.Popen(
            [sys.executable, "-c", first + BEGIN + source, f"{host}:{self.port}", *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=inherited | (env or {}),
        )  # fmt: skip
        self.addCleanup(process.__exit__, None, None, None)
        self.addCleanup(process.kill)
        return process

    def lines(self, process: subprocess.Popen) -> list[str]:
        """What it prints until its end, which must be an end in order and without a word on stderr."""
        out, err = process.communicate(timeout=120)
        self.assertEqual((process.returncode, said(err)), (0, ""), out)
        return out.splitlines()

    def wait_until_begun(self, calls: int) -> None:
        deadline = time.monotonic() + 60
        while self.service.begun < calls:
            self.assertLess(time.monotonic(), deadline, f"{self.service.begun} of {calls} calls came")
            time.sleep(0.01)

    def let_go_on(self, process: subprocess.Popen) -> None:
        """Once it is ready."""
        self.assertEqual(process.stdout.readline(), "ready\n")
        process.stdin.write("\n")
        process.stdin.flush()

    def test_a_forked_child_is_told_at_once(self):
        unused, *told, parent = self.lines(self.process(INHERITED))
        self.assertEqual((unused, parent), ("works", "works"))
        self.assertEqual(len(told), 5)
        for text in told:
            self.assertRegex(
                text, "^RuntimeError: this process was forked after its parent had used a client"
            )

    def test_grpc_that_was_imported_first_is_warned_of(self):
        process = self.process("client = RolloutClient(target)" + LATE, first="import grpc")
        out, err = process.communicate(timeout=120)
        self.assertEqual(out, "forks\n", err)
        self.assertRegex(err, "RuntimeWarning: .*GRPC_ENABLE_FORK_SUPPORT=0")

    def test_forked_children_leave_the_calls_of_their_parent_alone(self):
        process = self.process(IN_FLIGHT)
        self.wait_until_begun(4)  # the stream may begin later
        self.let_go_on(process)
        # A thread of gRPC in a child would ping on the parent's connection.
        self.assertEqual(process.stdout.readline(), f"{['1'] * 4}\n")
        self.service.go_on.set()
        self.let_go_on(process)
        self.assertEqual(self.lines(process), [str(["works"] * 5)])

    def test_an_interrupt_ends_every_call(self):
        for call, begun in (
            ("generate", 1), ("stream", 1), ("batch", 20), ("weights", 0), ("waiting", 0), ("full", 1),
            ("aio generate", 1), ("aio batch", 60), ("aio weights", 0), ("aio full", 1),
        ):  # fmt: skip
            with self.subTest(call):
                self.service.begun = 0
                process = self.process('print("begins", flush=True)' + INTERRUPTED, call)
                self.assertEqual(process.stdout.readline(), "begins\n")
                self.wait_until_begun(begun)
                if "weights" in call:
                    self.assertEqual(process.stdout.readline(), "reading\n")
                elif not begun:
                    time.sleep(0.5)  # no event tells that it waits
                process.send_signal(signal.SIGINT)
                process.communicate(timeout=END_S)
                self.assertNotEqual(process.returncode, 0)

    def test_several_event_loops_leave_no_word(self):
        (line,) = self.lines(self.process(LOOPS))
        self.assertEqual(line, f"{[60] * 10} []")

    def test_the_end_of_a_process_with_calls_in_flight_leaves_no_word(self):
        process = self.process(LEFT_OPEN)
        self.wait_until_begun(8)
        self.let_go_on(process)
        self.assertEqual(self.lines(process), ["ends"])

    def test_a_wide_batch_takes_no_thread_for_each_call(self):
        process = self.process(WIDE)
        self.wait_until_begun(200)
        self.let_go_on(process)
        self.assertLess(int(process.stdout.readline()), 20)
        self.service.go_on.set()
        self.let_go_on(process)
        self.lines(process)

    def test_no_proxy_stands_before_loopback(self):
        nothing = {name: "" for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy")}
        for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"):
            with self.subTest(name):
                env = nothing | {name: "http://127.0.0.1:1"}  # nobody listens there
                self.assertEqual(
                    self.lines(self.process(PROXIES, env=env, host="localhost")), ["works works"]
                )


def said(stderr: str) -> str:
    """Without the notes of gRPC's own log about connections that the test's service ends."""
    own = ("I0000", "WARNING: All log messages before absl")
    return "\n".join(line for line in stderr.splitlines() if not line.startswith(own))


if __name__ == "__main__":
    unittest.main()
