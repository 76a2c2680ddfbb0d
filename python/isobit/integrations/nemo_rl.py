"""Logprobs for NeMo-RL from isobit's scorers: a policy that trains as before, but whose get_logprobs and
get_reference_policy_logprobs ask services. The results have the bits of isobit's rollout."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from isobit.client import ScorerClient
from isobit.sampling import SamplingOptions, to_proto

# Tokens in one Score call. More would gain nothing, since results are streamed. An id takes up to 5 bytes,
# and a service refuses requests of more than 16 MiB.
_SEQUENCES_PER_CALL = 256
_TOKENS_PER_CALL = 2 << 20
# Parameters that depend on where the completion begins, which a NeMo-RL batch does not say.
_OF_COMPLETIONS = ("presence_penalty", "frequency_penalty", "min_tokens")


class ScorerPolicy:
    """A policy for NeMo-RL's algorithms whose logprobs isobit computes.

    Everything else (train, save_checkpoint, refits, ...) is done by the wrapped policy. When weights go to
    the rollout, they must go to the scorer, too: isobit.integrations.weights.send_weights. If the attribute
    `weight_version` is set, a batch fails if the scorer has other weights.

    Args:
      policy: NeMo-RL's policy (a PolicyInterface), which trains.
      scorer: a scorer with the weights that are trained.
      reference: a scorer of the reference policy; None: get_reference_policy_logprobs asks `policy`.
      sampling: the sampling parameters of the tokens, as in the generation section of NeMo-RL's config.
        Without it the logprobs are those of the model's own distribution.

    Raises:
      TypeError: an unknown sampling parameter, or a value of a wrong type.
      ValueError: a value is out of range; or presence_penalty, frequency_penalty or min_tokens is set, since
        a batch does not say where its completions begin.
    """

    def __init__(
        self,
        policy,
        scorer: ScorerClient,
        *,
        reference: ScorerClient | None = None,
        sampling: SamplingOptions | None = None,
    ):
        self._policy = policy
        self._scorer = scorer
        self._reference = reference
        self._sampling = dict(sampling or {})
        wanted = to_proto(self._sampling)
        for name in _OF_COMPLETIONS:
            if value := getattr(wanted, name):
                raise ValueError(
                    f"sampling: {name}: expected 0, got {value:g}: a NeMo-RL batch does not say where"
                    " completions begin, so a scorer cannot compute the rollout's logprobs"
                )
        self.weight_version: int | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # during copying and unpickling
        return getattr(self._policy, name)

    def get_logprobs(self, data, timer=None):
        """Returns the logprob of each token, given the tokens before it.

        Args:
          data: a BatchedDataDict with input_ids, integers [sequences, length], padded after each sequence,
            and input_lengths [sequences].
          timer: unused.

        Returns:
          A BatchedDataDict with logprobs, float32 [sequences, length]: the logprob of each token at its
            position; 0 at the first token and at padding.

        Raises:
          ValueError: a length is outside 1 to the width of input_ids.
          isobit.errors.FailedPreconditionError: other weights than `weight_version` are in use.
        """
        return type(data)({"logprobs": self._logprobs(self._scorer, data, self.weight_version)})

    def get_reference_policy_logprobs(self, data, micro_batch_size=None, timer=None):
        """Like get_logprobs, for the reference policy, under the name reference_logprobs."""
        if self._reference is None:
            return self._policy.get_reference_policy_logprobs(
                data, micro_batch_size=micro_batch_size, timer=timer
            )
        return type(data)({"reference_logprobs": self._logprobs(self._reference, data, None)})

    def prepare_for_lp_inference(self, *args, **kwargs) -> None:
        """Does nothing if the scorers compute all logprobs, since the policy can stay ready for training."""
        if self._reference is None:
            self._policy.prepare_for_lp_inference(*args, **kwargs)

    def _logprobs(self, scorer: ScorerClient, data, weight_version: int | None) -> torch.Tensor:
        ids, lengths = data["input_ids"].cpu(), data["input_lengths"].tolist()
        out = torch.zeros(ids.shape, dtype=torch.float32)
        for index, length in enumerate(lengths):
            if not 1 <= length <= ids.shape[1]:
                raise ValueError(f"input_lengths[{index}]: expected 1 to {ids.shape[1]}, got {length}")
        scored = [index for index, length in enumerate(lengths) if length > 1]
        for chosen in _calls(scored, lengths):
            self._score(scorer, ids, lengths, chosen, weight_version, out)
        return out.to(data["input_ids"].device)

    def _score(self, scorer, ids, lengths, chosen: Sequence[int], weight_version, out: torch.Tensor) -> None:
        """Writes the logprobs of some sequences. The prompt of each is its first token."""
        rows = [ids[i, : lengths[i]].tolist() for i in chosen]
        sequences = [(row[:1], row[1:]) for row in rows]
        scores = scorer.score(sequences, weight_version=weight_version, **self._sampling)
        for i, score in zip(chosen, scores, strict=True):
            out[i, 1 : lengths[i]] = torch.from_numpy(score.tokens.logprobs)


def _calls(sequences: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yields the sequences, in their order, in groups that fit one call."""
    chosen, tokens = [], 0
    for index in sequences:
        if chosen and (len(chosen) == _SEQUENCES_PER_CALL or tokens + lengths[index] > _TOKENS_PER_CALL):
            yield chosen
            chosen, tokens = [], 0
        chosen.append(index)
        tokens += lengths[index]
    if chosen:
        yield chosen
