"""The trainer's side of the services: samples groups, sends weights, records the gap. Rank 0 alone talks to
them; the other ranks get what it got."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Literal
from uuid import uuid4

import numpy as np
from completions import Completion
from gap import Gap
from learner import Learner
from ranks import RunError, Stopped, StopSignal, from_rank_0, is_first
from tasks import Task

from isobit import ComparatorClient, RolloutClient, ScorerClient
from isobit.errors import IsobitError
from isobit.nccl import NcclError
from isobit.results import Sample, Score, TokenLogprobs, WeightVersion
from isobit.torch_weights import WeightsUpdateGroup, init_weights_update_group, model_digest, update_weights
from isobit.v1 import types_pb2


@dataclass(frozen=True)
class Draw:
    """How a step's prompts are sampled."""

    prompts: int  # a step
    samples: int  # of each prompt
    max_tokens: int
    temperature: float
    seed: int  # below 2^32


class Sampler:
    """Every rank makes one and calls the same methods; only that of rank 0 has connections."""

    def __init__(
        self,
        task: Task,
        draw: Draw,
        stop: StopSignal,
        rollout: str,
        scorer: str | None,
        comparator: str | None,
        transport: Literal["stream", "cuda_ipc", "nccl"],
    ):
        """rollout, scorer, comparator: HOST:PORT. transport: how weights go to the first two."""
        self._task = task
        self._draw = draw
        self._stop = stop
        self._name = f"on-policy-{uuid4().hex[:12]}"
        self._samples: list[Sample] = []  # of the latest batch, for the comparator
        self._offset = 0  # the version id of the weights after 0 optimizer steps
        self._serving: WeightVersion | None = None
        self._transport = transport
        self._served: list[RolloutClient | ScorerClient | None] = [None] * (2 if scorer else 1)
        self._update_groups: list[WeightsUpdateGroup] = []  # with transport nccl, of each of them
        if is_first():
            self._rollout = RolloutClient(rollout)
            self._served = [self._rollout] + ([ScorerClient(scorer)] if scorer else [])
            self._comparator = ComparatorClient(comparator) if comparator else None
            self._pool = ThreadPoolExecutor(max_workers=1)

    def numerics(self) -> str:
        """The rollout's mode: tree, batch_invariant or vanilla. Waits until the services serve."""

        def ask() -> str:
            for service in self._served:
                service.wait_until_serving(timeout=60)
            mode = self._rollout.get_server_info().server.numerics_mode
            return types_pb2.NumericsMode.Name(mode).removeprefix("NUMERICS_MODE_").lower()

        return from_rank_0("reaching the services", ask)

    def sync(self, learner: Learner, step: int) -> str:
        """Sends the trainer's weights, those after `step` optimizer steps. Returns their digest."""

        def choose() -> int:
            if self._serving is not None:
                return self._offset + step
            # Both sides take ids above what they have had.
            infos = [service.get_server_info() for service in self._served]
            return 1 + max(info.server.weight_version.id for info in infos)

        version = from_rank_0("sending weights", choose)
        digest = model_digest(learner.model)
        try:
            if self._transport == "nccl" and not self._update_groups:
                self._update_groups = [init_weights_update_group(service) for service in self._served]
            groups = self._update_groups or [None] * len(self._served)
            # Each refuses weights of another digest.
            for service, group in zip(self._served, groups, strict=True):
                update_weights(
                    learner.model, service, transport=self._transport, group=group,
                    weight_version=version, expected_digest=digest,
                )  # fmt: skip
        except (IsobitError, NcclError, OSError, ValueError) as error:
            raise RunError(f"sending weights: {error}") from error
        self._serving = WeightVersion(version, digest)
        self._offset = version - step
        return digest

    def sample(self, step: int) -> list[Completion]:
        """The completions of that step's prompts, in the order of the prompts' numbers, drawn by the weights
        that serve now."""
        return self.join(self.start(step))

    def start(self, step: int) -> Future | None:
        """Begins what sample() does, in the background."""
        return self._pool.submit(self._groups, step) if is_first() else None

    def join(self, started: Future | None) -> list[Completion]:
        """The end of what start() began."""
        return from_rank_0("sampling", lambda: started.result())

    def _groups(self, step: int) -> list[Completion]:
        numbers = range(step * self._draw.prompts, (step + 1) * self._draw.prompts)
        prompts = [list(self._task.prompt(number)) for number in numbers]
        ids = [f"{self._name}-{number}" for number in numbers]
        with ThreadPoolExecutor(max_workers=64) as pool:
            futures = [
                pool.submit(
                    self._rollout.generate,
                    prompt,
                    request_id=request_id,
                    seed=self._draw.seed * 2**32 + number,
                    n=self._draw.samples,
                    max_tokens=self._draw.max_tokens,
                    temperature=self._draw.temperature,
                )
                for number, prompt, request_id in zip(numbers, prompts, ids, strict=True)
            ]
            while wait(futures, timeout=0.2).not_done:
                if self._stop.asked:
                    self._rollout.abort(ids)
            groups = [future.result() for future in futures]
        self._samples = [sample for group in groups for sample in group]
        if self._stop.asked:
            raise Stopped
        return [
            self._completion(number, prompt, sample)
            for number, prompt, group in zip(numbers, prompts, groups, strict=True)
            for sample in group
        ]

    def _completion(self, number: int, prompt: list[int], sample: Sample) -> Completion:
        if sample.finish_reason == "abort":
            raise RunError(f"the rollout aborted prompt {number}: {sample.abort_reason}")
        steps = sample.tokens.weight_versions.astype(np.int64) - self._offset
        reward = float(self._task.reward(number, sample.tokens.token_ids.tolist()))
        return Completion(
            number, sample.index, prompt, sample.tokens.token_ids, sample.tokens.logprobs, steps, reward
        )

    def record(self, trainer: Sequence[np.ndarray], gap: Gap) -> None:
        """Gives the latest batch's logprobs of both sides to the comparator, which must find the same gap.

        Args:
            trainer: for each completion the trainer's logprobs, fp32 [tokens].
        """

        def side(index: int, sample: Sample, logprobs: np.ndarray) -> Score:
            # The trainer says that it computes what the rollout does, on the weights that it sent: the
            # comparator refuses a sample of other weights.
            versions = np.full(len(logprobs), self._serving.id, np.uint64)
            tokens = TokenLogprobs(sample.tokens.token_ids, logprobs, versions, ())
            mode = sample.logprob_mode
            return Score(
                "", index, tokens, None, None, mode, sample.fingerprint, self._serving, sample.settings
            )

        def compare() -> None:
            if self._comparator is None:
                return
            pairs = enumerate(zip(self._samples, trainer, strict=True))
            summary = self._comparator.record((s, side(i, s, logprobs)) for i, (s, logprobs) in pairs)
            found = summary.statistics
            if (found.num_tokens, found.num_unequal) != (gap.tokens, gap.unequal):
                raise RunError(
                    f"the comparator found {found.num_unequal} of {found.num_tokens} tokens unequal, the"
                    f" trainer {gap.unequal} of {gap.tokens}"
                )

        from_rank_0("comparing", compare)

    def close(self) -> None:
        if is_first():
            self._pool.shutdown()
            for client in (*self._served, self._comparator):
                if client is not None:
                    client.close()
