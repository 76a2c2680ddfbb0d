"""A trainer's metrics for Prometheus, as docs/metrics.md lists them. Needs the extra `isobit[metrics]`.

metrics = TrainerMetrics()
metrics.serve(9104)
metrics.add_comparison(tokens=4096, unequal=0, max_abs_dlogp=0.0, kl_k1=0.0, kl_k2=0.0, kl_k3=0.0)
metrics.add_step(1, reward=0.5, staleness=0.0, seconds={"sample": 2.1, "train": 3.4, "sync": 0.2})
"""

from collections.abc import Mapping

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

TIMED = ("sample", "train", "compare", "sync")  # what is timed of a step
# The same buckets as in the services (common/metrics/metrics.cc).
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600)


class _Registry(CollectorRegistry):
    """A registry that leaves out the library's series with the creation time of each other series."""

    def collect(self):
        for family in super().collect():
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family


class TrainerMetrics:
    """The metrics of one run, kept in the process that knows the values. Thread-safe."""

    def __init__(self):
        self.registry = _Registry()
        self._server = None

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"isobit_trainer_{name}", text, registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"isobit_trainer_{name}", text, labels, registry=self.registry)

        self._step = gauge("step", "Number of the last optimizer step.")
        self._reward = gauge("reward_mean", "Mean reward of the last step's samples.")
        self._staleness = gauge("staleness_mean", "Mean staleness of the last step's tokens, in steps.")
        self._seconds = counter("step_seconds", "Time of the steps, by part.", "part")
        for part in TIMED:
            self._seconds.labels(part)
        self._sync = Histogram(
            "isobit_trainer_weight_sync_seconds",
            "Of a step, until all services have its weights.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._compared = counter("tokens_compared", "Tokens whose logprobs were compared with the rollout's.")
        self._unequal = counter("tokens_unequal", "Tokens whose logprobs have other bits, or are NaN.")
        self._impossible = counter(
            "tokens_impossible",
            "Tokens with a logprob that no token is drawn with: NaN, infinite or above 0.",
        )
        self._max_abs_dlogp = gauge(
            "logprob_abs_diff_max", "Largest difference of two logprobs in the last comparison."
        )
        text = "KL(rollout || trainer) of the last comparison, estimator k{}."
        self._kl = [gauge(f"kl_k{i}", text.format(i)) for i in (1, 2, 3)]

    def serve(self, port: int, host: str = "127.0.0.1") -> int:
        """Serves the metrics over HTTP, without TLS, until `close`. Returns the port; port 0 chooses a free
        one.

        Raises:
            OSError: the port is taken.
        """
        self._server, _ = prometheus_client.start_http_server(port, addr=host, registry=self.registry)
        return self._server.server_port

    def add_comparison(
        self,
        *,
        tokens: int,
        unequal: int,
        max_abs_dlogp: float,
        kl_k1: float,
        kl_k2: float,
        kl_k3: float,
        impossible: int = 0,
    ) -> None:
        """Adds the comparison of one batch: the rollout's logprobs with the trainer's, for the weights that
        drew the batch.

        Args:
            tokens, unequal: the number of tokens compared, and of those whose bits differ.
            max_abs_dlogp: the largest |rollout - trainer|, in nats.
            kl_k1, kl_k2, kl_k3: estimates of KL(rollout || trainer), in nats (docs/API.md, "Metric names").
            impossible: the number of tokens with a logprob, on either side, that is NaN, infinite or above 0.
        """
        self._compared.inc(tokens)
        self._unequal.inc(unequal)
        self._impossible.inc(impossible)
        self._max_abs_dlogp.set(max_abs_dlogp)
        for gauge, value in zip(self._kl, (kl_k1, kl_k2, kl_k3), strict=True):
            gauge.set(value)

    def add_step(self, step: int, *, reward: float, staleness: float, seconds: Mapping[str, float]) -> None:
        """Adds one optimizer step.

        Args:
            step: its number, from 1.
            reward: the mean over its samples.
            staleness: the mean over its tokens, in optimizer steps.
            seconds: the time of its parts, by names in TIMED.

        Raises:
            ValueError: an unknown part.
        """
        if unknown := set(seconds) - set(TIMED):
            raise ValueError(f"seconds: expected parts of {TIMED}, got {sorted(unknown)}")
        self._step.set(step)
        self._reward.set(reward)
        self._staleness.set(staleness)
        for part, value in seconds.items():
            self._seconds.labels(part).inc(value)
        if "sync" in seconds:
            self._sync.observe(seconds["sync"])

    def close(self) -> None:
        """Stops serving. Does nothing if `serve` was not called."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
