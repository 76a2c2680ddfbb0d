"""The simulation of a fleet: what holds of any way to route, and that it tells good ways from bad ones."""

import unittest

import fleet


class FleetTest(unittest.TestCase):
    def run_all(self, replicas: int, capacity: int = 100_000) -> dict[str, fleet.Result]:
        return {
            name: fleet.simulate(route, replicas, 3000, capacity, seed=1)
            for name, route in fleet.WAYS.items()
        }

    def test_one_replica_finds_what_is_possible(self):
        for name, result in self.run_all(1, capacity=10**9).items():
            self.assertEqual((result.found, result.busiest), (result.possible, 1.0), name)

    def test_affinity_finds_more_and_a_bound_levels(self):
        results = self.run_all(20)
        for result in results.values():
            self.assertLessEqual(result.found, result.possible)
        self.assertGreater(results["by conversation"].found, 2 * results["round robin"].found)
        self.assertLess(results["by conversation, bounded"].busiest, results["by conversation"].busiest)
        small = self.run_all(20, capacity=2000)
        self.assertLess(small["by conversation"].found, results["by conversation"].found)

    def test_a_cache_keeps_what_was_used_last(self):
        replica = fleet.Replica(100)
        for name in "abc":
            replica.keep(name, 40)
            replica.find("b")
        self.assertEqual([replica.find(name) for name in "abc"], [0, 40, 40])
        replica.keep("b", 90)
        self.assertEqual((replica.find("c"), replica.used), (0, 90))


if __name__ == "__main__":
    unittest.main()
