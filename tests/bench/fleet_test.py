"""The simulation of a fleet beside closed forms: queues, what a prompt finds, what a lost replica costs,
weights, and how soon a fault is seen. Beside each stands a case in which the form does not hold."""

import contextlib
import io
import json
import math
import random
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench" / "fleet"))
import fleet
import fleet_plan as plan
from fleet_queue import Measured, Replica, Request, Simulation, Speed, hash_of

STEP = 0.001  # seconds
# Sequences share a replica evenly, as if it computed them one after the other; prompts take no time.
SHARED = Speed(((1, STEP), (2000, 2000 * STEP)), 1e18)


class QueueTest(unittest.TestCase):
    def serve(
        self,
        way: str,
        replicas: int,
        load: float,
        *,
        draw_length=None,
        losses_per_s: float = 0.0,
    ) -> Measured:
        """Requests of 100 tokens in the mean arrive at random, as many as use that share of the replicas."""
        simulation = Simulation(SHARED, replicas, way, seed=3)
        draw = random.Random(4)
        draw_length = draw_length or (lambda: max(1, round(draw.expovariate(1 / 100))))
        rate = load * replicas / (100 * STEP)
        at = 0.0
        for number in range(20_000):
            at += draw.expovariate(rate)
            request = Request(hash_of(str(number)), (), 0, (draw_length(),))
            simulation.at(at, lambda request=request: simulation.submit(request))
        when = 0.0
        while losses_per_s and (when := when + draw.expovariate(losses_per_s)) < at:
            replica = simulation.fleet[draw.randrange(replicas)]
            simulation.at(when, lambda replica=replica: simulation.lose(replica, 1e-6, 1e-6))
        measured = simulation.run()
        self.assertEqual(len(measured.wholes), 20_000, "every request ends, once")
        return measured

    def test_a_shared_replica_takes_the_time_of_processor_sharing(self):
        load = 0.6
        expected = 100 * STEP / (1 - load)  # M/G/1, processor sharing
        measured = self.serve("random", 3, load)
        self.assertLess(abs(sum(measured.wholes) / 20_000 / expected - 1), 0.06)
        self.assertLess(abs((1 - measured.idle) / load - 1), 0.05)
        for other in ("least loaded", "better of two"):
            level = sum(self.serve(other, 3, load).wholes) / 20_000
            self.assertLess(level, 0.9 * expected, f"control: {other} keeps queues level")

    def test_prompts_wait_for_each_other(self):
        speed = Speed(((1, 1e-6), (2000, 1e-6)), prefill=1000.0)
        simulation = Simulation(speed, 1, "round robin")
        draw, at, load = random.Random(1), 0.0, 0.7
        for _ in range(20_000):
            at += draw.expovariate(load * 10)
            request = Request(0, (), 100, (1,))
            simulation.at(at, lambda request=request: simulation.submit(request))
        firsts = simulation.run().firsts
        expected = 0.1 + load * 0.1 / (2 * (1 - load))  # M/D/1
        self.assertLess(abs(sum(firsts) / len(firsts) / expected - 1), 0.05)

    def test_requests_wait_for_a_place(self):
        simulation = Simulation(Speed(((1, STEP), (2, STEP)), 1e18), 1, "round robin")
        for _ in range(3):
            simulation.at(0.0, lambda: simulation.submit(Request(0, (), 0, (100,))))
        wholes = simulation.run().wholes
        for actual, expected in zip(wholes, (100, 100, 200), strict=True):
            self.assertAlmostEqual(actual, expected * STEP)

    def test_what_a_loss_computes_again(self):
        # At a random time the sequences have got L tokens in the mean if lengths are exponential, and L / 2
        # if they are equal; there are load / (1 - load) of them.
        for draw_length, each in ((None, 100), (lambda: 100, 50)):
            measured = self.serve("random", 3, 0.3, draw_length=draw_length, losses_per_s=0.4)
            self.assertGreater(measured.losses, 500)
            again = measured.sampled_twice / measured.losses
            self.assertLess(abs(again / (each * 0.3 / 0.7) - 1), 0.15, each)


class RoutingTest(unittest.TestCase):
    def found(self, way: str, replicas: int, bound: float = 1e9) -> float:
        """The share of second turns, in random order, that find their first."""
        simulation = Simulation(SHARED, replicas, way, bound=bound, seed=2)
        turns = list(range(5000))
        for again in (False, True):
            random.Random(7).shuffle(turns)
            for turn, number in enumerate(turns):
                name = f"c{number}"
                request = Request(hash_of(name), ((name, 100),), 100, (1,), ((name, 100),))
                at = 10 * again + 0.001 * turn
                simulation.at(at, lambda request=request: simulation.submit(request))
        measured = simulation.run(warm=10 - 1e-6)
        return 1 - measured.missed / measured.prompt

    def test_what_is_found(self):
        for replicas in (4, 20):
            error = 5 * math.sqrt(1 / replicas / 5000)
            for way in ("round robin", "random"):
                self.assertLess(abs(self.found(way, replicas) - 1 / replicas), error, way)
            self.assertEqual(
                self.found("by conversation", replicas),
                1,
                "control: affinity finds all",
            )

    def test_a_bound_levels(self):
        """All requests of one conversation at one time."""
        for bound, most in ((1.25, 2), (1e9, 40)):
            loads = self.loads(bound)
            self.assertEqual(sum(loads), 40)
            self.assertIn(max(loads), (most - 1, most))

    def loads(self, bound: float) -> list[int]:
        simulation = Simulation(SHARED, 40, "by conversation", bound=bound)
        for _ in range(40):
            simulation.at(0.0, lambda: simulation.submit(Request(hash_of("c"), (), 0, (10,))))
        loads: list[int] = []
        simulation.at(0.001, lambda: loads.extend(r.samples for r in simulation.fleet))
        simulation.run()
        return loads

    def test_a_lost_replica_gets_nothing_until_it_is_back(self):
        for way in (
            "round robin",
            "random",
            "least loaded",
            "better of two",
            "by conversation",
        ):
            simulation = Simulation(SHARED, 3, way)
            lost = simulation.fleet[1]
            simulation.at(0.0, lambda lost=lost, s=simulation: s.lose(lost, 0.1, 5.0))
            for number in range(300):  # three at a time
                request = Request(hash_of(str(number)), (), 0, (1,))
                at = 1 + 0.1 * (number // 3)
                simulation.at(at, lambda request=request, s=simulation: s.submit(request))
            busy: list[float] = []
            simulation.at(4.99, lambda lost=lost, busy=busy: busy.append(lost.busy))
            self.assertEqual(len(simulation.run().wholes), 300)
            self.assertEqual(busy, [0.0], way)
            self.assertGreater(lost.busy, 0, way)

    def test_a_cache_keeps_what_was_used_last(self):
        replica = Replica(0, [0.0, STEP], 1.0, capacity=100)
        for name in "abc":
            replica.keep(name, 40)
            replica.find([("b", 40)])
        self.assertEqual([replica.find([(name, 40)]) for name in "abc"], [0, 40, 40])
        replica.keep("b", 90)
        self.assertEqual((replica.find([("c", 40)]), replica.used), (0, 90))


class PlanTest(unittest.TestCase):
    link = plan.Link(bytes_per_s=10.0, latency_s=0.25)

    def test_relays(self):
        for replicas in (1, 2, 3, 7, 15, 63):
            for chunks in (1, 2, 10):
                of_chain = plan.simulate_relay(replicas, 100, self.link, chunks, 1)
                self.assertAlmostEqual(plan.chain(replicas, 100, self.link, chunks), of_chain)
        for replicas in (2, 6, 14, 62):  # whole trees
            for chunks in (1, 2, 10):
                of_tree = plan.simulate_relay(replicas, 100, self.link, chunks, 2)
                self.assertAlmostEqual(plan.tree(replicas, 100, self.link, chunks), of_tree)
        of_tree = plan.simulate_relay(1000, 100, self.link, 10, 2)
        self.assertLess(of_tree, plan.one_source(1000, 100, self.link) / 10, "control")
        bound = plan.tree(1000, 100, self.link, 10)
        self.assertTrue(0.9 * bound < of_tree <= bound, (of_tree, bound))

    def test_a_fault_is_seen_when_the_formula_says(self):
        share, rate, wrong = 0.05, 100.0, 0.2
        times = plan.simulate_detection(share, rate, wrong, 20_000, random.Random(1))
        mean = 1 / (share * wrong * rate)  # geometric
        self.assertLess(abs(sum(times) / len(times) / mean - 1), 0.03)
        for probability in (0.5, 0.9, 0.99):
            formula = plan.seen_after(share, rate, wrong, probability)
            simulated = times[int(probability * len(times))]
            self.assertLess(abs(simulated / formula - 1), 0.06, probability)
            self.assertAlmostEqual(plan.share_for(formula, rate, wrong, probability), share)
            faster = plan.seen_after(share, 10 * rate, wrong, probability)
            self.assertGreater(
                simulated,
                5 * faster,
                "control: the rate is the replica's, not the fleet's",
            )

    def test_evidence(self):
        day = plan.evidence(
            0.01, samples_per_s=1000, completion=100, gpus=40, bytes_per_sample=10,
            scored_per_s=500, gpu_hour=2.0,
        )  # fmt: skip
        self.assertEqual(day, plan.Evidence(8_640_000, 2.0, 0.05, 96.0))


class CommandTest(unittest.TestCase):
    def test_steps_are_the_measured_ones(self):
        times = fleet.measured_speed().table()
        data = {t["id"]: t for t in json.loads(fleet.DATA.read_text("utf-8"))["tables"]}
        for batch, column in ((1, 1), (64, 3), (512, 5)):
            self.assertAlmostEqual(1e3 * times[batch], data["decode-tp4"]["rows"][0][column])
        self.assertEqual(times, sorted(times))
        self.assertAlmostEqual(times[160], (times[64] + times[256]) / 2)

    def test_a_small_fleet(self):
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.redirect_stdout(io.StringIO()) as said,
        ):
            path = Path(folder) / "fleet.json"
            arguments = [
                "--replicas=10",
                "--seconds=2",
                "--warm=4",
                "--rates=10",
                "--prompts=2",
                "--losses=2",
            ]
            self.assertEqual(fleet.main([*arguments, f"--json={path}"]), 0)
            result = json.loads(path.read_text("utf-8"))
        chats = result["conversations, 10 requests/s and replica"]
        self.assertGreater(chats["by conversation"]["found"], 1.5 * chats["round robin"]["found"])
        self.assertLess(
            chats["by conversation"]["first_p50_ms"],
            chats["round robin"]["first_p50_ms"],
        )
        for name in chats:
            self.assertIn(name, said.getvalue())
        self.assertLess(
            result["rl_step"]["round robin"]["idle"],
            result["rl_step"]["random"]["idle"],
        )
        self.assertGreater(result["losses"]["by conversation"]["losses"], 0)


if __name__ == "__main__":
    unittest.main()
