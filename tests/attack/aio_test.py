"""The asyncio clients at guarded services: TLS, client certificates, tokens, roles, quotas."""

import asyncio
import time
import unittest

from certificates import Authority
from guarded_services import GuardedServicesTest

from isobit import aio
from isobit.errors import (
    DeadlineExceededError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)


class AioGuardedTest(GuardedServicesTest, unittest.IsolatedAsyncioTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = cls.scratch / "certificates"
        folder.mkdir()
        cls.ca, cls.stranger = Authority(folder, "ca"), Authority(folder, "stranger")
        cls.pair = cls.ca.sign("trainer")
        cls.mine = {"tls_ca": cls.ca.cert, "tls_cert": cls.pair.cert, "tls_key": cls.pair.key}

    async def load_with(self, target: str, timeout: float = 30, **security) -> None:
        async with aio.RolloutClient(target, **security) as client:
            await client.wait_until_serving(timeout=timeout)
            await client.get_load()

    async def test_certificates_and_tokens(self):
        server = self.ca.sign_server()
        flags = [f"--tls_cert={server.cert}", f"--tls_key={server.key}", f"--tls_client_ca={self.ca.cert}"]
        service = await asyncio.to_thread(self.start, "rollout", *flags, self.write_access(), **self.mine)
        await self.load_with(service.target, **self.mine, token="token-watch")
        with self.assertRaises(UnauthenticatedError):
            await self.load_with(service.target, **self.mine, token="wrong")
        with self.assertRaises(PermissionDeniedError):
            await self.load_with(service.target, **self.mine, token="token-score")
        stranger = self.stranger.sign("trainer")
        for kept_out in (
            {},
            {"tls_ca": self.ca.cert},
            {"tls_ca": self.ca.cert, "tls_cert": stranger.cert, "tls_key": stranger.key},
            {**self.mine, "tls_ca": self.stranger.cert},
            {**self.mine, "tls_server_name": "elsewhere.example"},
        ):
            with self.subTest(kept_out), self.assertRaises(DeadlineExceededError):
                await self.load_with(service.target, timeout=1, **kept_out)
            async with aio.RolloutClient(service.target, **kept_out) as client:
                with self.assertRaises((UnavailableError, DeadlineExceededError)):
                    await client.get_load(timeout=1)

    async def test_a_token_goes_with_streams_and_is_read_anew(self):
        service = await asyncio.to_thread(self.start, "rollout", self.write_access())
        file = self.log_dir / "client.token"
        file.write_text("token-watch\n")
        async with aio.RolloutClient(service.target, token_file=file) as client:
            await client.get_load()
            with self.assertRaises(PermissionDeniedError):
                await client.generate([1], max_tokens=1)
            file.write_text("token-generate\n")
            events = [event async for event in client.generate([1], stream=True, max_tokens=1)]
            self.assertEqual(len(events[-1].tokens.token_ids), 1)
            file.unlink()  # the last token stays in force
            await client.generate([1], max_tokens=1)

    async def test_a_token_goes_with_streams_of_requests(self):
        service = await asyncio.to_thread(self.start, "comparator", self.write_access())
        async with aio.ComparatorClient(service.target, token="token-watch") as client:
            with self.assertRaises(PermissionDeniedError):
                await client.record([])
        async with aio.ComparatorClient(service.target, token="token-compare") as client:
            self.assertEqual((await client.record([])).verdict, "nothing_compared")

    def test_arguments_that_cannot_work_are_refused_at_once(self):
        for arguments, message in (
            ({"token": "x"}, "another host"),
            ({"token": "x", "tls_cert": self.pair.cert}, "tls_ca"),
            ({"tls_ca": self.ca.cert, "tls_cert": self.pair.cert}, "both or neither"),
            ({"tls_ca": self.ca.cert, "token": "a b"}, "printable"),
        ):
            with self.subTest(message), self.assertRaisesRegex(ValueError, message):
                aio.RolloutClient("10.0.0.1:7001", **arguments)
        with self.assertRaises(FileNotFoundError):
            aio.RolloutClient("10.0.0.1:7001", tls_ca="/nowhere.pem")
        with self.assertRaisesRegex(TypeError, "'tls'"):
            aio.RolloutClient("10.0.0.1:7001", tls=True)

    async def test_a_quota_says_when_to_come_back(self):
        service = await asyncio.to_thread(self.start, "rollout", "--max_client_requests=2")
        async with aio.RolloutClient(service.target) as client:
            await client.pause_generation("keep")  # so that no request ends by itself
            held = [asyncio.create_task(client.generate([1], max_tokens=1)) for _ in range(2)]
            deadline = time.monotonic() + 20
            while (await client.get_load()).num_waiting_requests < 2:
                self.assertLess(time.monotonic(), deadline)
                await asyncio.sleep(0.02)
            with self.assertRaises(ResourceExhaustedError) as raised:
                await client.generate([1], max_tokens=1, timeout=0.9)  # no time for another try
            self.assertEqual(raised.exception.retry_after_ms, 1000)
            await client.continue_generation()
            self.assertEqual([len(samples) for samples in await asyncio.gather(*held)], [1, 1])


if __name__ == "__main__":
    unittest.main()
