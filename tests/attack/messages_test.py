"""Messages that are small on the wire and large in memory, or malformed: refused, their memory freed."""

import functools
import unittest
import zlib
from pathlib import Path

import grpc
from attack_case import METHODS, MIB, VLLM_METHODS, VLLM_SERVICE, AttackTest, call, memory_of, path_of
from http2 import Connection, message

from isobit.launch import Service

MALFORMED = b"\x0a\xff\xff\xff\xff\x07"  # a field of 2 GiB, all of which is missing
NUM_ENTRIES = 8 * MIB - 100  # empty ones of two bytes, just below the limit of a message


def inside(number: int, payload: bytes) -> bytes:
    """`payload` as the submessage `number`."""
    size, digits = len(payload), []
    while size >= 128:
        size, digits = size >> 7, [*digits, size & 127 | 128]
    return bytes([number << 3 | 2, *digits, size]) + payload


@functools.cache
def bomb() -> bytes:
    """3 GiB of zeros, gzipped."""
    zeros, times = bytes(16 * MIB), 192
    deflater = zlib.compressobj(9, wbits=-15)
    block = deflater.compress(zeros) + deflater.flush(zlib.Z_FULL_FLUSH)
    crc = functools.reduce(lambda crc, _: zlib.crc32(zeros, crc), range(times), 0)
    end = b"\x03\x00" + crc.to_bytes(4, "little") + (len(zeros) * times).to_bytes(4, "little")
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + block * times + end


class MessagesTest(AttackTest):
    def setUp(self):
        super().setUp()
        self.running = self.start_all()
        self.face = self.start("rollout", "--vllm_face")

    def methods(self):
        """Each method: its service, a connection, its path and the type it takes."""
        channel = self.channel(self.face)
        for method, request in VLLM_METHODS.items():
            yield self.face, channel, f"{VLLM_SERVICE}/{method}", f"vllm.grpc.engine.{request}"
        for name, service in self.running.items():
            channel = self.channel(service)
            for method, request in METHODS[name].items():
                yield service, channel, path_of(name, method), f"isobit.v1.{request}"

    def growth(self, service: Service, attack) -> int:
        """The most MiB by which the process grew while `attack` ran."""
        before = memory_of(service)
        Path(f"/proc/{service.process.pid}/clear_refs").write_text("5")  # VmHWM becomes VmRSS
        attack()
        return (memory_of(service, "VmHWM") - before) // MIB

    def test_malformed_requests_say_what_they_should_have_been(self):
        for _, channel, path, request in self.methods():
            code, details = call(channel, path, MALFORMED)
            self.assertEqual(code, grpc.StatusCode.INVALID_ARGUMENT, details)
            self.assertIn(f"{request}: malformed", details)
        rollout = self.channel(self.running["rollout"])
        code, details = call(rollout, path_of("rollout", "Abort"), b"\x0a\x01\xff")
        self.assertEqual((code, "UTF-8" in details), (grpc.StatusCode.INVALID_ARGUMENT, True))
        self.assertEqual(call(rollout, path_of("rollout", "Boil"), b"")[0], grpc.StatusCode.UNIMPLEMENTED)
        self.assertEqual(call(rollout, path_of("rollout", "GetLoad"), b""), (grpc.StatusCode.OK, ""))

    def test_empty_entries_are_counted_before_they_are_built(self):
        entries = b"\x0a\x00" * NUM_ENTRIES  # of field 1: prompts, sequences, ids, or one that nobody knows
        requests = {
            "isobit.v1.GenerateRequest": inside(3, b"\x72\x00" * NUM_ENTRIES),  # sampling.logit_bias
            "isobit.v1.RecordRequest": inside(2, inside(1, b"\x22\x00" * NUM_ENTRIES)),  # rollout.tokens.top
            "vllm.grpc.engine.GenerateRequest": inside(4, b"\x52\x00" * NUM_ENTRIES),  # sampling_params.stop
        }
        for service, channel, path, request in self.methods():
            payload = requests.get(request, entries)
            status = []
            grown = self.growth(
                service, lambda c=channel, p=path, b=payload, s=status: s.extend(call(c, p, b))
            )
            print(f"{path}: {status[0].name}, grew {grown} MiB")
            self.assertEqual(status[0], grpc.StatusCode.INVALID_ARGUMENT, status[1])
            self.assertIn(f"{request}: expected at most", status[1])
            self.assertLess(grown, 128)

    def test_a_message_above_the_limit_is_refused(self):
        for _, channel, path, _ in self.methods():
            code, details = call(channel, path, bytes(16 * MIB + 1))
            self.assertEqual(code, grpc.StatusCode.RESOURCE_EXHAUSTED, details)

    def test_compressed_messages_are_refused_unread(self):
        for service, channel, path, _ in self.methods():
            code, details = call(channel, path, bytes(100_000), compression=grpc.Compression.Gzip)
            self.assertEqual(code, grpc.StatusCode.UNIMPLEMENTED)
            self.assertIn("gzip", details)
            if path.endswith(("Abort", "Score", "Record")):
                grown = self.growth(service, lambda s=service, p=path: self.throw_bomb(s, p))
                print(f"{path}: a bomb of {len(bomb())} bytes, grew {grown} MiB")
                self.assertLess(grown, 64)

    def throw_bomb(self, service: Service, path: str) -> None:
        with Connection(service.target) as connection:
            stream = connection.open(path, encoding="gzip")
            connection.write(stream, message(bomb(), compressed=True))
            connection.await_end(stream)

    def test_memory_of_large_requests_is_given_back(self):
        ids = inside(1, b"an-id-that-nobody-has") * 500_000
        prompt = inside(1, inside(2, b"\x05" * (15 * MIB)))
        for name, method, request, expected in (
            ("rollout", "Abort", ids, grpc.StatusCode.OK),
            ("scorer", "Score", prompt, grpc.StatusCode.INVALID_ARGUMENT),
            ("comparator", "Compare", prompt, grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with self.subTest(service=name):
                service = self.running[name]
                before = memory_of(service)
                for _ in range(4):
                    code, details = call(self.channel(service), path_of(name, method), request)
                    self.assertEqual(code, expected, details)
                self.wait_until(
                    lambda s=service, b=before: memory_of(s) - b < 48 * MIB, "the memory stays taken", 10
                )
                print(f"{name}: {(memory_of(service) - before) // MIB} MiB more than before")

    def test_what_clients_send_is_cut_in_logs_and_errors(self):
        for name in ("rollout", "scorer"):
            service = self.running[name]
            before = service.log.stat().st_size
            path = path_of(name, "UpdateWeights")
            code, details = call(self.channel(service), path, inside(1, b"m" * (15 * MIB)))
            self.assertEqual(code, grpc.StatusCode.INVALID_ARGUMENT)
            self.assertLess(len(details), 3000)
            self.assertLess(service.log.stat().st_size - before, 50_000)

    def test_a_circle_of_links_is_a_bad_path(self):
        (self.model.parent / "circle").symlink_to("circle")
        self.addCleanup((self.model.parent / "circle").unlink)
        for name in ("rollout", "scorer"):
            path = path_of(name, "UpdateWeights")
            code, details = call(self.channel(self.running[name]), path, inside(1, b"circle"))
            self.assertEqual((code, "circle" in details), (grpc.StatusCode.INVALID_ARGUMENT, True), details)


if __name__ == "__main__":
    unittest.main()
