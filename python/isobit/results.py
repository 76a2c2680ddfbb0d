"""The services' answers as dataclasses of NumPy arrays, made from the messages of isobit.v1.

Logprobs are float32 with the bits that the service computed; token ids are int32; logarithms are natural.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np

from isobit.sampling import LogprobMode
from isobit.v1 import comparator_pb2, rollout_pb2, scorer_pb2, types_pb2

FinishReason = Literal["stop", "length", "abort"]
Verdict = Literal["equal", "unequal", "impossible", "nothing_compared"]


class _Result:
    """A dataclass whose repr() is short, however many tokens it has."""

    def __repr__(self) -> str:
        values = (f"{field.name}={_brief(getattr(self, field.name))}" for field in dataclasses.fields(self))
        return f"{type(self).__name__}({', '.join(values)})"


def _brief(value: Any) -> str:
    if isinstance(value, np.ndarray):
        some = np.array2string(value, threshold=6, edgeitems=2, separator=", ")
        return f"{value.dtype}{list(value.shape)} {some}"
    if isinstance(value, tuple) and len(value) > 2:
        return f"({value[0]!r}, ... {len(value)} in all)"
    return repr(value)


def _enum_name(enum, value: int) -> str:
    """FINISH_REASON_STOP becomes stop. A value that this client does not know becomes its number, as text."""
    if value not in enum.values():
        return str(value)
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    return enum.Name(value).removeprefix(prefix).lower()


@dataclass(frozen=True, repr=False)
class WeightVersion(_Result):
    """Names one set of weights: an id that grows with every update, and a digest of the values."""

    id: int
    digest: str  # 64 hex digits, a function of names, shapes and values (isobit.weight_digest)

    @classmethod
    def from_proto(cls, message: types_pb2.WeightVersion) -> Self:
        return cls(message.id, message.digest)


@dataclass(frozen=True, repr=False)
class TopLogprobs(_Result):
    """The most likely tokens at one position, most likely first."""

    token_ids: np.ndarray  # int32 [k]
    logprobs: np.ndarray  # float32 [k]


@dataclass(frozen=True, repr=False)
class TokenLogprobs(_Result):
    """Consecutive tokens, each with its logprob and weight version."""

    token_ids: np.ndarray  # int32 [tokens]
    logprobs: np.ndarray  # float32 [tokens]
    weight_versions: np.ndarray  # uint64 [tokens]
    top: tuple[TopLogprobs, ...]  # one for each token; empty if no alternatives were requested

    @classmethod
    def from_proto(cls, message: types_pb2.TokenLogprobs) -> Self:
        return cls(
            np.array(message.token_ids, np.int32),
            np.array(message.logprobs, np.float32),
            np.array(message.weight_versions, np.uint64),
            tuple(
                TopLogprobs(np.array(top.token_ids, np.int32), np.array(top.logprobs, np.float32))
                for top in message.top
            ),
        )

    @classmethod
    def concatenate(cls, parts: list[Self]) -> Self:
        if not parts:
            return cls.from_proto(types_pb2.TokenLogprobs())
        return cls(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.weight_versions for part in parts]),
            tuple(top for part in parts for top in part.top),
        )

    def to_proto(self) -> types_pb2.TokenLogprobs:
        return types_pb2.TokenLogprobs(
            token_ids=self.token_ids.tolist(),
            logprobs=self.logprobs.tolist(),
            weight_versions=self.weight_versions.tolist(),
            top=[
                types_pb2.TopLogprobs(token_ids=top.token_ids.tolist(), logprobs=top.logprobs.tolist())
                for top in self.top
            ],
        )


@dataclass(frozen=True, repr=False)
class Chunk(_Result):
    """The next tokens of a sample, as they arrive."""

    request_id: str
    index: int  # the sample, in [0, n)
    tokens: TokenLogprobs


@dataclass(frozen=True, repr=False)
class Sample(_Result):
    """One whole completion."""

    request_id: str
    index: int  # the sample, in [0, n)
    tokens: TokenLogprobs
    finish_reason: FinishReason
    stop_token_id: int | None  # set if finish_reason is stop
    abort_reason: str  # set if finish_reason is abort
    num_prompt_tokens: int
    seed: int
    logprob_mode: LogprobMode
    fingerprint: str
    weight_version: WeightVersion  # of the last token; tokens.weight_versions has one for each
    num_preemptions: int
    num_cached_tokens: int  # prompt tokens that were already computed when the sample first ran
    num_draft_tokens: int = 0  # guessed tokens that were computed for the sample
    num_accepted_tokens: int = 0  # tokens that the sample got from correct guesses
    settings: str = ""  # Fingerprint.settings: end-of-sequence ids, context length

    @classmethod
    def from_proto(
        cls, request_id: str, message: rollout_pb2.GenerateComplete, tokens: TokenLogprobs
    ) -> Self:
        return cls(
            request_id=request_id,
            index=message.index,
            tokens=tokens,
            finish_reason=_enum_name(types_pb2.FinishReason, message.finish_reason),
            stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
            abort_reason=message.abort_reason,
            num_prompt_tokens=message.num_prompt_tokens,
            seed=message.seed,
            logprob_mode=_enum_name(types_pb2.LogprobMode, message.logprob_mode),
            fingerprint=message.fingerprint.hex,
            weight_version=WeightVersion.from_proto(message.weight_version),
            num_preemptions=message.num_preemptions,
            num_cached_tokens=message.num_cached_tokens,
            num_draft_tokens=message.num_draft_tokens,
            num_accepted_tokens=message.num_accepted_tokens,
            settings=message.fingerprint.settings,
        )


@dataclass(frozen=True, repr=False)
class Score(_Result):
    """The scores of one sequence."""

    sequence_id: str
    index: int  # of the sequence in the request
    tokens: TokenLogprobs  # one entry for each completion token
    prompt: TokenLogprobs | None  # one entry for each prompt token except the first; None unless requested
    entropies: np.ndarray | None  # float32 [completion tokens], in nats; None unless requested
    logprob_mode: LogprobMode
    fingerprint: str
    weight_version: WeightVersion
    settings: str = ""  # as Sample's

    @classmethod
    def from_proto(cls, message: scorer_pb2.ScoreResponse, has_entropies: bool) -> Self:
        return cls(
            sequence_id=message.sequence_id,
            index=message.index,
            tokens=TokenLogprobs.from_proto(message.completion),
            prompt=TokenLogprobs.from_proto(message.prompt) if message.HasField("prompt") else None,
            entropies=np.array(message.entropies, np.float32) if has_entropies else None,
            logprob_mode=_enum_name(types_pb2.LogprobMode, message.logprob_mode),
            fingerprint=message.fingerprint.hex,
            weight_version=WeightVersion.from_proto(message.weight_version),
            settings=message.fingerprint.settings,
        )


@dataclass(frozen=True, repr=False)
class TokenGaps(_Result):
    """Consecutive tokens of one sequence with the logprobs of both sides. Every array is [tokens]."""

    sequence_id: str
    positions: np.ndarray  # int32, index in the completion, from 0
    token_ids: np.ndarray  # int32
    rollout_logprobs: np.ndarray  # float32
    scorer_logprobs: np.ndarray  # float32
    abs_dp: np.ndarray  # float64, |exp(rollout) - exp(scorer)|; 1 where dlogp is NaN
    dlogp: np.ndarray  # float64, rollout - scorer
    ulp_distances: np.ndarray  # uint32
    equal: np.ndarray  # bool, whether the bits are equal; False if either side is NaN
    rollout_weight_versions: np.ndarray  # uint64
    scorer_weight_versions: np.ndarray  # uint64
    impossible: np.ndarray  # bool; a side is NaN, infinite or above 0, which no drawn token can have

    @classmethod
    def from_proto(cls, message: comparator_pb2.TokenGaps) -> Self:
        def column(field: str, dtype) -> np.ndarray:
            return np.array([getattr(gap, field) for gap in message.gaps], dtype)

        return cls(
            sequence_id=message.sequence_id,
            positions=column("position", np.int32),
            token_ids=column("token_id", np.int32),
            # Made from the bit patterns, so that even the payload of a NaN is preserved.
            rollout_logprobs=column("rollout_bits", np.uint32).view(np.float32),
            scorer_logprobs=column("scorer_bits", np.uint32).view(np.float32),
            abs_dp=column("abs_dp", np.float64),
            dlogp=column("dlogp", np.float64),
            ulp_distances=column("ulp_distance", np.uint32),
            equal=column("equal", np.bool_),
            rollout_weight_versions=column("rollout_weight_version", np.uint64),
            scorer_weight_versions=column("scorer_weight_version", np.uint64),
            impossible=column("impossible", np.bool_),
        )


@dataclass(frozen=True, repr=False)
class GapStatistics(_Result):
    """Statistics over tokens. proto/isobit/v1/comparator.proto defines each one, and how it counts a NaN or
    an infinity."""

    num_tokens: int
    num_unequal: int
    num_nan: int
    num_finite: int
    max_abs_dp: float
    mean_abs_dp: float
    max_abs_dlogp: float
    mean_abs_dlogp: float
    max_ulp_distance: int
    kl_k1: float
    kl_k2: float
    kl_k3: float
    pearson_correlation: float | None
    effective_sample_size: float
    num_impossible: int = 0

    @classmethod
    def from_proto(cls, message: comparator_pb2.GapStatistics) -> Self:
        values = {field.name: getattr(message, field.name) for field in dataclasses.fields(cls)}
        if not message.HasField("pearson_correlation"):
            values["pearson_correlation"] = None
        return cls(**values)


@dataclass(frozen=True, repr=False)
class Divergence(_Result):
    """The place of a token, such as the first one whose bits differ."""

    sequence_id: str
    position: int  # index in the completion, from 0


def _divergence(message, field: str = "first_divergence") -> Divergence | None:
    if not message.HasField(field):
        return None
    place = getattr(message, field)
    return Divergence(place.sequence_id, place.position)


@dataclass(frozen=True, repr=False)
class SequenceReport(_Result):
    """The comparison of one sequence."""

    sequence_id: str
    prompt_index: int
    sample_index: int
    finish_reason: FinishReason
    statistics: GapStatistics
    first_divergence: Divergence | None  # None when all bits are equal
    first_impossible: Divergence | None = None  # the first token with a logprob that no token is drawn with

    @classmethod
    def from_proto(cls, message: comparator_pb2.SequenceReport) -> Self:
        return cls(
            sequence_id=message.sequence_id,
            prompt_index=message.prompt_index,
            sample_index=message.sample_index,
            finish_reason=_enum_name(types_pb2.FinishReason, message.finish_reason),
            statistics=GapStatistics.from_proto(message.statistics),
            first_divergence=_divergence(message),
            first_impossible=_divergence(message, "first_impossible"),
        )


@dataclass(frozen=True, repr=False)
class SideIdentity(_Result):
    """The arithmetic and the weights of one side of a comparison."""

    fingerprint: str
    weight_version: WeightVersion
    settings: str = ""  # as Sample's


def _side(message, side: str) -> SideIdentity | None:
    if not message.HasField(side):
        return None
    identity = getattr(message, side)
    return SideIdentity(
        identity.fingerprint.hex,
        WeightVersion.from_proto(identity.weight_version),
        identity.fingerprint.settings,
    )


@dataclass(frozen=True, repr=False)
class CompareSummary(_Result):
    """The comparison of many sequences."""

    verdict: Verdict
    num_sequences: int
    num_unequal_sequences: int
    statistics: GapStatistics
    first_divergence: Divergence | None  # None when all bits are equal
    rollout: SideIdentity | None  # None in watch(): its window may span several weight versions
    scorer: SideIdentity | None
    first_impossible: Divergence | None = None  # the first token with a logprob that no token is drawn with

    @classmethod
    def from_proto(cls, message: comparator_pb2.CompareSummary) -> Self:
        return cls(
            verdict=_enum_name(comparator_pb2.Verdict, message.verdict),
            num_sequences=message.num_sequences,
            num_unequal_sequences=message.num_unequal_sequences,
            statistics=GapStatistics.from_proto(message.statistics),
            first_divergence=_divergence(message),
            rollout=_side(message, "rollout"),
            scorer=_side(message, "scorer"),
            first_impossible=_divergence(message, "first_impossible"),
        )


@dataclass(frozen=True, repr=False)
class Comparison(_Result):
    """All results of one compare call."""

    summary: CompareSummary
    reports: tuple[SequenceReport, ...]  # by prompt_index, then sample_index
    gaps: tuple[TokenGaps, ...]  # in order of arrival


@dataclass(frozen=True, repr=False)
class WatchUpdate(_Result):
    """One rolling summary."""

    window: CompareSummary
    total: CompareSummary
    uptime_seconds: float

    @classmethod
    def from_proto(cls, message: comparator_pb2.WatchResponse) -> Self:
        return cls(
            CompareSummary.from_proto(message.window),
            CompareSummary.from_proto(message.total),
            message.uptime_seconds,
        )
