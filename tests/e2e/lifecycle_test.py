"""What the three processes do when one of them, or their client, goes away."""

import contextlib
import signal
import threading
import unittest

from isobit import ComparatorClient, RolloutClient, ScorerClient
from isobit.errors import IsobitError, UnavailableError
from isobit.launch import Service, Setting
from isobit.results import Sample, SequenceReport
from isobit_tools.testing import ServiceTest

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11]]
LONG = {"seed": 1, "max_tokens": 1900, "ignore_eos": True}
# Long enough for a test to act before the last token.
MUCH = {**LONG, "n": 8}
SHORT = {"seed": 1, "max_tokens": 8}


class LifecycleTest(ServiceTest):
    setting = Setting("tree", tp_size=4, shards=2)

    def setUp(self):
        super().setUp()
        self.rollout, self.scorer, self.comparator = self.start_all().values()

    def client(self, kind, service: Service):
        return self.enterContext(kind(service.target))

    def kill(self, service: Service) -> None:
        service.process.kill()
        service.process.wait()

    def test_sigterm_while_idle_exits_0(self):
        self.services.stop()
        self.assertEqual(self.services.bad_ends, [])

    def test_sigterm_drains_what_is_in_flight(self):
        client = self.client(RolloutClient, self.rollout)
        events = client.generate(PROMPTS[0], stream=True, **LONG)
        next(events)
        self.rollout.process.send_signal(signal.SIGTERM)
        self.wait_until(lambda: self.refuses(client), "a draining rollout takes new requests")
        *_, sample = events
        self.assertIsInstance(sample, Sample)
        self.assertEqual((len(sample.tokens.token_ids), sample.finish_reason), (LONG["max_tokens"], "length"))
        self.assertEqual(self.rollout.process.wait(20), 0)

    def refuses(self, client: RolloutClient) -> bool:
        try:
            client.generate(PROMPTS[1], **SHORT)
        except UnavailableError:
            return True
        return False

    def test_killed_rollout_or_scorer_ends_the_call_but_not_the_comparator(self):
        client = self.client(ComparatorClient, self.comparator)
        for name, victim in (("rollout", self.rollout), ("scorer", self.scorer)):
            with self.subTest(killed=name):
                whole = client.compare(PROMPTS, **SHORT).summary
                self.assertEqual(whole.verdict, "equal")
                failure = self.failure_when_killed(client, victim)
                self.assertIn(name, failure.details)
                self.assertNotEqual(client.get_server_info().obstacle, "")
                self.restart(name, victim)
                self.wait_until(lambda: not client.get_server_info().obstacle, f"the new {name} is not found")
                self.assertEqual(client.compare(PROMPTS, **SHORT).summary.statistics, whole.statistics)

    def failure_when_killed(self, client: ComparatorClient, victim: Service) -> IsobitError:
        """The error of a Compare call in flight when `victim` is killed after the first sequence."""
        prompts = PROMPTS * 16
        events = client.compare(prompts, stream=True, max_concurrency=2, **LONG)
        with self.assertRaises(UnavailableError) as raised:
            for event in events:
                if isinstance(event, SequenceReport) and victim.process.poll() is None:
                    self.kill(victim)
        return raised.exception

    def restart(self, name: str, old: Service) -> None:
        """Starts the service anew at the port that the comparator knows."""
        self.start(name, f"--port={old.target.rpartition(':')[2]}")

    def test_killed_comparator_frees_what_it_had_asked_for(self):
        client = self.client(ComparatorClient, self.comparator)
        rollout = self.client(RolloutClient, self.rollout)
        failures = []

        def compare() -> None:
            try:
                client.compare(PROMPTS, **MUCH)
            except UnavailableError as error:
                failures.append(error)

        caller = threading.Thread(target=compare)
        caller.start()
        self.wait_until(lambda: rollout.get_load().num_used_pages, "the rollout has no work")
        self.kill(self.comparator)
        caller.join(20)
        self.assertEqual(len(failures), 1)
        self.assert_all_free(rollout)

    def test_client_gone_frees_its_pages(self):
        rollout = self.client(RolloutClient, self.rollout)
        events = rollout.generate(PROMPTS[0], stream=True, **MUCH)
        next(events)
        self.assertGreater(rollout.get_load().num_used_pages, 0)
        events.close()
        self.assert_all_free(rollout)

    def assert_all_free(self, rollout: RolloutClient) -> None:
        def is_free() -> bool:
            load = rollout.get_load()
            return load.num_used_pages == load.num_running_requests == load.num_waiting_requests == 0

        self.wait_until(is_free, "pages stay taken")

    def test_restarted_services_give_the_same_bits(self):
        before = self.client(RolloutClient, self.rollout).generate(PROMPTS[2], **SHORT)[0]
        self.kill(self.rollout)
        self.restart("rollout", self.rollout)
        after = self.client(RolloutClient, self.rollout).generate(PROMPTS[2], **SHORT)[0]
        scored = self.client(ScorerClient, self.scorer).score(
            [(PROMPTS[2], after.tokens.token_ids)], **SHORT
        )[0]
        for other in (after, scored):
            self.assertEqual(other.tokens.token_ids.tolist(), before.tokens.token_ids.tolist())
            self.assertEqual(
                other.tokens.logprobs.view("u4").tolist(), before.tokens.logprobs.view("u4").tolist()
            )


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        unittest.main()
