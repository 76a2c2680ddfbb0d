"""Calls opened and reset as fast as a connection takes them: memory stays bounded and is freed."""

import unittest

from attack_case import MIB, AttackTest, memory_of, path_of
from http2 import Connection, message

NUM_STREAMS = 10_000  # in each of three rounds
GENERATE = b"\x12\x03\x01\x02\x03" + b"\x1a\x02\x38\x08"  # prompt 1 2 3, max_tokens 8


class RapidResetTest(AttackTest):
    def test_rapid_resets(self):
        rollout = self.start_all()["rollout"]
        client = self.channel(rollout)
        self.assert_serves("rollout", client)
        before = memory_of(rollout)
        for round_ in range(3):
            with Connection(rollout.target) as connection:
                for i in range(NUM_STREAMS):
                    stream = connection.open(path_of("rollout", "Generate"))
                    if i % 2 == 0:  # half of them with a request
                        connection.write(stream, message(GENERATE))
                    connection.reset(stream)
                    if i % 1000 == 999:
                        connection.drain()
                peak = memory_of(rollout, "VmHWM")
            print(f"round {round_}: at most {(peak - before) // MIB} MiB more")
        self.assert_serves("rollout", client)
        self.assertLess(peak - before, 1024 * MIB)
        self.wait_until(lambda: memory_of(rollout) - before < 64 * MIB, "the memory stays taken", 90)
        print(f"after: {(memory_of(rollout) - before) // MIB} MiB more")


if __name__ == "__main__":
    unittest.main()
