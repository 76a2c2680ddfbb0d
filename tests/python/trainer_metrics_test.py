"""A trainer's metrics: Prometheus's own check accepts them, docs/metrics.md lists just these, and the figures
are those that were given."""

import math
import re
import shutil
import subprocess
import unittest
from pathlib import Path

from isobit.trainer_metrics import TIMED, TrainerMetrics
from isobit_tools.testing import http_get, metric_values

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
EQUAL = {"tokens": 40, "unequal": 0, "max_abs_dlogp": 0.0, "kl_k1": 0.0, "kl_k2": 0.0, "kl_k3": 0.0}


def documented() -> set[str]:
    """The trainer's metrics that the page lists."""
    rows = [
        line.split(" | ") for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `isobit_")
    ]
    return {
        name
        for names, services, *_ in rows
        if services == "T"
        for name in re.findall(r"`(isobit_\w+)", names)
    }


class TrainerMetricsTest(unittest.TestCase):
    def setUp(self):
        self.metrics = TrainerMetrics()
        self.addCleanup(self.metrics.close)
        self.url = f"http://127.0.0.1:{self.metrics.serve(0)}/metrics"

    def page(self) -> str:
        return http_get(self.url)

    def test_the_page(self):
        self.metrics.add_comparison(**EQUAL)
        self.metrics.add_step(1, reward=0.25, staleness=0.0, seconds=dict.fromkeys(TIMED, 0.5))
        text = self.page()
        promtool = shutil.which("promtool")
        self.assertIsNotNone(promtool, "Debian's package prometheus has promtool; `make deps` installs it")
        run = subprocess.run(
            [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
        )
        self.assertEqual((run.returncode, run.stdout, run.stderr), (0, "", ""))
        self.assertEqual(set(re.findall(r"# TYPE (\w+)", text)), documented())

    def test_figures(self):
        before = metric_values(self.page())
        self.assertEqual(before["isobit_trainer_tokens_compared_total"], 0, "counters are there at once")
        self.metrics.add_comparison(**EQUAL)
        self.metrics.add_step(7, reward=0.25, staleness=0.5, seconds={"train": 2.0, "sync": 0.2})
        self.metrics.add_comparison(
            tokens=2, unequal=1, max_abs_dlogp=0.5, kl_k1=0.25, kl_k2=0.0625, kl_k3=0.05, impossible=1
        )
        self.metrics.add_step(8, reward=0.75, staleness=0.0, seconds={"train": 1.0, "sync": 4.0})
        values = metric_values(self.page())
        expected = {
            "step": 8, "reward_mean": 0.75, "staleness_mean": 0, "tokens_compared_total": 42,
            "tokens_unequal_total": 1, "tokens_impossible_total": 1, "logprob_abs_diff_max": 0.5,
            "kl_k1": 0.25, "kl_k2": 0.0625, "kl_k3": 0.05, 'step_seconds_total{part="train"}': 3,
            'step_seconds_total{part="sample"}': 0,
            "weight_sync_seconds_count": 2, 'weight_sync_seconds_bucket{le="0.3"}': 1,
        }  # fmt: skip
        self.assertEqual({name: values[f"isobit_trainer_{name}"] for name in expected}, expected)

    def test_what_is_not_finite_stays_so(self):
        """A logprob that is NaN or infinite cannot pass for a perfect match."""
        names = {
            "max_abs_dlogp": "logprob_abs_diff_max",
            "kl_k1": "kl_k1",
            "kl_k2": "kl_k2",
            "kl_k3": "kl_k3",
        }
        for value in (math.nan, math.inf, -math.inf):
            self.metrics.add_comparison(**EQUAL | {"unequal": 1} | dict.fromkeys(names, value))
            self.metrics.add_step(1, reward=value, staleness=value, seconds={})
            seen = metric_values(self.page())
            for name in (*names.values(), "reward_mean", "staleness_mean"):
                self.assertEqual(str(seen[f"isobit_trainer_{name}"]), str(value), name)

    def test_no_other_label(self):
        with self.assertRaisesRegex(ValueError, r"expected parts of .*, got \['think'\]"):
            self.metrics.add_step(1, reward=0.0, staleness=0.0, seconds={"think": 1.0})
        parts = set(re.findall(r'part="(\w+)"', self.page()))
        self.assertEqual(parts, set(TIMED))


if __name__ == "__main__":
    unittest.main()
