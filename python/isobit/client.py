"""Typed synchronous clients of rollout and scorer: token ids in, numpy arrays out.

    with RolloutClient("localhost:50051") as rollout, ScorerClient("localhost:50052") as scorer:
        rollout.wait_until_serving()
        sample = rollout.generate(prompt_ids, max_tokens=64, seed=1)[0]
        score = scorer.score([(prompt_ids, sample.tokens.token_ids)])[0]
        assert (sample.tokens.logprobs.view("u4") == score.tokens.logprobs.view("u4")).all()

A failed call raises a class of isobit.errors. `timeout` is in seconds and always ends the call on the
server, too. Answers of the control plane are the messages of isobit.v1 as they are.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, Unpack, overload

import grpc

from isobit.calls import TokenIds, enum_value, in_order, token_list
from isobit.channel import ServiceClient
from isobit.credentials import Security
from isobit.errors import IncompleteStreamError
from isobit.results import Chunk, Sample, Score, TokenLogprobs
from isobit.sampling import LogprobMode, SamplingOptions, mode_to_proto, to_proto
from isobit.v1 import rollout_pb2, rollout_pb2_grpc, scorer_pb2, scorer_pb2_grpc, types_pb2

InFlightMode = Literal["abort", "wait", "recompute_kv"]
PauseMode = Literal["abort", "wait", "keep"]

_CONTROL_TIMEOUT_S = 30.0
_WORK_TIMEOUT_S = 600.0


class _ModelServiceClient(ServiceClient):
    """What rollout and scorer have in common."""

    def update_weights(
        self,
        model_path: str,
        *,
        weight_version: int | None = None,
        expected_digest: str = "",
        in_flight: InFlightMode | None = None,
        timeout: float = _WORK_TIMEOUT_S,
    ) -> types_pb2.UpdateWeightsResponse:
        """Switches to the weights in `model_path`, relative to the service's --model_root.

        Args:
          weight_version: the id to give them; None gives the present id plus 1.
          expected_digest: refuse any other weights; empty skips the check.
          in_flight: what happens to requests in flight; None is the service's default.
        """
        request = types_pb2.UpdateWeightsRequest(
            model_path=model_path,
            weight_version=weight_version,
            expected_digest=expected_digest,
            in_flight_mode=enum_value(types_pb2.InFlightMode, "IN_FLIGHT_MODE_", in_flight),
        )
        return self._unary(self._stub.UpdateWeights, request, timeout)

    def get_server_info(self, timeout: float = _CONTROL_TIMEOUT_S):
        """RolloutServerInfo or ScorerServerInfo: model, numerics, weights and limits."""
        return self._unary(self._stub.GetServerInfo, types_pb2.GetServerInfoRequest(), timeout)


class RolloutClient(_ModelServiceClient):
    """Samples completions."""

    def __init__(
        self, target: str, credentials: grpc.ChannelCredentials | None = None, **security: Unpack[Security]
    ):
        super().__init__(target, credentials, **security)
        self._stub = rollout_pb2_grpc.RolloutServiceStub(self._channel)

    @overload
    def generate(
        self, prompt_token_ids: TokenIds, *, stream: Literal[False] = False, request_id: str = "",
        logprob_mode: LogprobMode = "processed", timeout_ms: int | None = None,
        timeout: float = _WORK_TIMEOUT_S, **sampling: Unpack[SamplingOptions],
    ) -> list[Sample]: ...  # fmt: skip

    @overload
    def generate(
        self, prompt_token_ids: TokenIds, *, stream: Literal[True], request_id: str = "",
        logprob_mode: LogprobMode = "processed", timeout_ms: int | None = None,
        timeout: float = _WORK_TIMEOUT_S, **sampling: Unpack[SamplingOptions],
    ) -> Iterator[Chunk | Sample]: ...  # fmt: skip

    def generate(
        self,
        prompt_token_ids,
        *,
        stream=False,
        request_id="",
        logprob_mode="processed",
        timeout_ms=None,
        timeout=_WORK_TIMEOUT_S,
        **sampling,
    ):
        """Samples `n` completions of one prompt.

        Args:
          prompt_token_ids: one row of integers.
          stream: gives an iterator of chunks as they come and, at the end of each sample, the whole Sample.
            The request is sent when the first item is asked for; closing the iterator cancels it.
          request_id: for abort(); empty lets the server make one.
          logprob_mode: of the distribution drawn from, or the model's own.
          timeout_ms: ends the request after that time with the tokens it has.
          timeout: ends the call with DeadlineExceededError.
          **sampling: see SamplingOptions.

        Returns:
          The samples by index, or the iterator.
        """
        request = rollout_pb2.GenerateRequest(
            request_id=request_id,
            prompt_token_ids=token_list(prompt_token_ids, "prompt_token_ids"),
            sampling=to_proto(sampling),
            logprob_mode=mode_to_proto(logprob_mode),
            timeout_ms=timeout_ms,
            final_only=not stream,
        )
        stream_events = self._generate_events(request, timeout)
        return stream_events if stream else _samples_in_order(request, stream_events)

    def generate_batch(
        self,
        prompts: Sequence[TokenIds],
        *,
        max_concurrency: int = 64,
        logprob_mode: LogprobMode = "processed",
        timeout_ms: int | None = None,
        timeout: float = _WORK_TIMEOUT_S,
        **sampling: Unpack[SamplingOptions],
    ) -> list[list[Sample]]:
        """Samples completions of many prompts at once; the arguments are those of generate.

        Returns:
          The samples of each prompt, in the order of `prompts`. The first failure is raised.
        """

        def one(prompt: TokenIds) -> list[Sample]:
            return self.generate(
                prompt, logprob_mode=logprob_mode, timeout_ms=timeout_ms, timeout=timeout, **sampling
            )

        with ThreadPoolExecutor(max_workers=max_concurrency) as pool:
            return list(pool.map(one, prompts))

    def abort(self, request_ids: str | Sequence[str], timeout: float = _CONTROL_TIMEOUT_S) -> list[str]:
        """Ends requests early, each with the tokens it has; returns the ids of those that were in flight."""
        names = [request_ids] if isinstance(request_ids, str) else request_ids
        return list(
            self._unary(self._stub.Abort, rollout_pb2.AbortRequest(request_ids=names), timeout).request_ids
        )

    def abort_all(self, timeout: float = _CONTROL_TIMEOUT_S) -> list[str]:
        """Ends every request in flight; returns their ids."""
        return list(self._unary(self._stub.Abort, rollout_pb2.AbortRequest(all=True), timeout).request_ids)

    def pause_generation(
        self, mode: PauseMode = "abort", timeout: float = _WORK_TIMEOUT_S
    ) -> rollout_pb2.PauseGenerationResponse:
        """Stops generation; returns once no step runs."""
        value = enum_value(rollout_pb2.PauseMode, "PAUSE_MODE_", mode)
        return self._unary(
            self._stub.PauseGeneration, rollout_pb2.PauseGenerationRequest(mode=value), timeout
        )

    def continue_generation(
        self, timeout: float = _CONTROL_TIMEOUT_S
    ) -> rollout_pb2.ContinueGenerationResponse:
        """Undoes pause_generation."""
        return self._unary(self._stub.ContinueGeneration, rollout_pb2.ContinueGenerationRequest(), timeout)

    def get_load(self, timeout: float = _CONTROL_TIMEOUT_S) -> rollout_pb2.GetLoadResponse:
        """How full the queues and the KV cache are, and how many prompt tokens were found computed."""
        return self._unary(self._stub.GetLoad, rollout_pb2.GetLoadRequest(), timeout)

    def _generate_events(
        self, request: rollout_pb2.GenerateRequest, timeout: float
    ) -> Iterator[Chunk | Sample]:
        parts: dict[int, list[TokenLogprobs]] = {}
        for response in self._stream(self._stub.Generate, request, timeout):
            if response.HasField("chunk"):
                tokens = TokenLogprobs.from_proto(response.chunk.tokens)
                parts.setdefault(response.chunk.index, []).append(tokens)
                yield Chunk(response.request_id, response.chunk.index, tokens)
            elif response.HasField("complete"):
                yield _whole_sample(response, parts.pop(response.complete.index, []))


def _whole_sample(response: rollout_pb2.GenerateResponse, parts: list[TokenLogprobs]) -> Sample:
    tokens = TokenLogprobs.concatenate(parts)
    if len(tokens.token_ids) != response.complete.num_completion_tokens:
        raise IncompleteStreamError(
            f"sample {response.complete.index} brought {len(tokens.token_ids)} tokens, expected"
            f" {response.complete.num_completion_tokens}"
        )
    return Sample.from_proto(response.request_id, response.complete, tokens)


def _samples_in_order(request: rollout_pb2.GenerateRequest, events: Iterator[Chunk | Sample]) -> list[Sample]:
    samples = {event.index: event for event in events if isinstance(event, Sample)}
    wanted = request.sampling.n if request.sampling.HasField("n") else 1
    return in_order(samples, wanted, "samples")


class ScorerClient(_ModelServiceClient):
    """Computes logprobs of given tokens."""

    def __init__(
        self, target: str, credentials: grpc.ChannelCredentials | None = None, **security: Unpack[Security]
    ):
        super().__init__(target, credentials, **security)
        self._stub = scorer_pb2_grpc.ScorerServiceStub(self._channel)

    @overload
    def score(
        self, sequences: Sequence[tuple[TokenIds, TokenIds]], *, stream: Literal[False] = False,
        logprob_mode: LogprobMode = "processed", prompt_logprobs: bool = False, entropy: bool = False,
        weight_version: int | None = None, timeout: float = _WORK_TIMEOUT_S,
        **sampling: Unpack[SamplingOptions],
    ) -> list[Score]: ...  # fmt: skip

    @overload
    def score(
        self, sequences: Sequence[tuple[TokenIds, TokenIds]], *, stream: Literal[True],
        logprob_mode: LogprobMode = "processed", prompt_logprobs: bool = False, entropy: bool = False,
        weight_version: int | None = None, timeout: float = _WORK_TIMEOUT_S,
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[Score]: ...  # fmt: skip

    def score(
        self,
        sequences,
        *,
        stream=False,
        logprob_mode="processed",
        prompt_logprobs=False,
        entropy=False,
        weight_version=None,
        timeout=_WORK_TIMEOUT_S,
        **sampling,
    ):
        """Scores sequences under one set of sampling parameters.

        Args:
          sequences: pairs of prompt and completion token ids.
          stream: gives an iterator of scores as they finish, in any order.
          prompt_logprobs: scores the prompt tokens too, except the first.
          entropy: reports the entropy at each completion token.
          weight_version: fails with FailedPreconditionError unless these weights serve.
          **sampling: what the tokens were drawn with; see SamplingOptions.

        Returns:
          The scores in the order of `sequences`, or the iterator.
        """
        request = scorer_pb2.ScoreRequest(
            sequences=[
                scorer_pb2.ScoreSequence(
                    prompt_token_ids=token_list(prompt, f"sequences[{index}] prompt"),
                    completion_token_ids=token_list(completion, f"sequences[{index}] completion"),
                )
                for index, (prompt, completion) in enumerate(sequences)
            ],
            sampling=to_proto(sampling),
            logprob_mode=mode_to_proto(logprob_mode),
            prompt_logprobs=prompt_logprobs,
            entropy=entropy,
            weight_version=weight_version,
        )
        scores = (
            Score.from_proto(response, entropy)
            for response in self._stream(self._stub.Score, request, timeout)
        )
        if stream:
            return scores
        return in_order({score.index: score for score in scores}, len(request.sequences), "sequences")
