"""Typed synchronous clients of rollout and scorer: token ids in, numpy arrays out.

    with RolloutClient("localhost:7001") as rollout, ScorerClient("localhost:7002") as scorer:
        rollout.wait_until_serving()
        sample = rollout.generate(prompt_ids, max_tokens=64, seed=1)[0]
        score = scorer.score([(prompt_ids, sample.tokens.token_ids)])[0]
        assert (sample.tokens.logprobs.view("u4") == score.tokens.logprobs.view("u4")).all()

A failed call raises a class of isobit.errors. `timeout` is in seconds and always ends the call on the
server, too; None or infinity: no limit. Answers of the control plane are the messages of isobit.v1.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Unpack, overload

from isobit import aio, calls
from isobit.calls import (
    CONTROL_TIMEOUT_S,
    Determinism,
    DraftTokenIds,
    InFlightMode,
    PauseMode,
    SleepLevel,
    TokenIds,
)
from isobit.channel import ServiceClient
from isobit.results import Chunk, Sample, Score
from isobit.sampling import LogprobMode, SamplingOptions
from isobit.v1 import rollout_pb2, rollout_pb2_grpc, scorer_pb2_grpc, types_pb2
from isobit.weight_transfer import WeightTransferCalls
from isobit.weights import DistributedWeights, HeldWeights, Weights


class _ModelServiceClient(ServiceClient):
    """What rollout and scorer have in common."""

    def update_weights(
        self,
        model_path: str,
        *,
        weight_version: int | None = None,
        expected_digest: str = "",
        in_flight: InFlightMode | None = None,
        timeout: float | None = None,
    ) -> types_pb2.UpdateWeightsResponse:
        """Switches to the weights in `model_path`, relative to the service's --model_root.

        Args:
          weight_version: the id to give them; None gives the present id plus 1.
          expected_digest: refuse any other weights; empty skips the check.
          in_flight: what happens to requests in flight; None is the service's default.
        """
        request = calls.update_weights_request(model_path, weight_version, expected_digest, in_flight)
        return self._unary(self._stub.UpdateWeights, request, timeout)

    def update_weights_from_stream(
        self,
        tensors: Weights,
        *,
        weight_version: int | None = None,
        expected_digest: str | None = None,
        in_flight: InFlightMode | None = None,
        timeout: float | None = None,
    ) -> types_pb2.UpdateWeightsResponse:
        """Switches to weights that this call sends, without a disk between.

        Args:
          tensors: names as in a checkpoint, and numpy arrays or torch tensors: a mapping or pairs (see
            isobit.weights.Weights). They must not change until the call returns. Whatever they
            raise ends the call, and is raised here.
          expected_digest: what the service's digest must be; None: that of the tensors as they are sent,
            computed meanwhile; empty skips the check.
          weight_version, in_flight: as for update_weights.

        Raises:
          AbortedError: another update is in progress.
          Others: the fault of a tensor, by its name. The old weights serve on after any of them.
        """
        chunks = calls.weight_chunks(tensors, weight_version, expected_digest, in_flight)
        return self._upload(self._stub.UpdateWeightsFromStream, chunks, timeout, calls.WEIGHTS_ACCEPTED)

    def update_weights_from_tensor(
        self,
        weights: HeldWeights,
        *,
        weight_version: int | None = None,
        expected_digest: str | Callable[[], str] = "",
        in_flight: InFlightMode | None = None,
        timeout: float | None = None,
    ) -> types_pb2.UpdateWeightsResponse:
        """Switches to weights that lie in GPU memory of processes on the service's host (CUDA IPC).

        Args:
          weights: where they lie. Nobody may change or free them until the call returns, and what computes
            them must have ended on the GPU.
          weight_version, expected_digest, in_flight: as for update_weights. A function may compute the
            digest while the service reads the weights.

        Raises:
          UnimplementedError: the service computes on CPUs, or is a scorer of several processes.
          InvalidArgumentError: not all values are there, or the memory cannot be reached.
          Others as for update_weights_from_stream. The old weights serve on after any of them.
        """
        chunks = calls.held_weight_chunks(weights, weight_version, expected_digest, in_flight)
        return self._upload(self._stub.UpdateWeightsFromStream, chunks, timeout, calls.WEIGHTS_ACCEPTED)

    def update_weights_from_distributed(
        self,
        weights: DistributedWeights,
        *,
        weight_version: int | None = None,
        expected_digest: str = "",
        in_flight: InFlightMode | None = None,
        has_sent: Callable[[], bool] = calls.nothing_to_send,
        timeout: float | None = None,
    ) -> types_pb2.UpdateWeightsResponse:
        """Switches to weights that a trainer's processes send from GPU to GPU (NCCL), meanwhile.
        isobit.torch.update_weights calls it, and sends.

        Args:
          weights: who sends what.
          weight_version, expected_digest, in_flight: as for update_weights.
          has_sent: whether the senders here are done; asked now and then. Whatever it raises ends the call,
            and is raised here.

        Raises:
          UnimplementedError: the service computes on CPUs, or is a scorer of several processes.
          FailedPreconditionError: another version of NCCL, or a group that the service is not in any more.
          DeadlineExceededError: a sender is silent.
          Others as for update_weights_from_stream. The old weights serve on after any of them.
        """
        chunks = calls.held_weight_chunks(weights, weight_version, expected_digest, in_flight, has_sent)
        return self._upload(self._stub.UpdateWeightsFromStream, chunks, timeout, calls.WEIGHTS_ACCEPTED)

    def probe(
        self,
        token_ids: TokenIds,
        *,
        site: tuple[int, int] | None = None,
        row: int | None = None,
        timeout: float | None = None,
    ) -> types_pb2.ProbeResponse:
        """Has the service compute a sequence and say what each op gave, as digests. Needs the role admin.

        Args:
          token_ids: prompt and completion.
          site: (layer, ProbeOp) of which each row's digest is wanted too.
          row: a row of `site` whose values are wanted too.
        """
        return self._unary(self._stub.Probe, calls.probe_request(token_ids, site, row), timeout)

    def get_server_info(self, timeout: float | None = CONTROL_TIMEOUT_S):
        """RolloutServerInfo or ScorerServerInfo: model, numerics, weights and limits."""
        return self._unary(self._stub.GetServerInfo, types_pb2.GetServerInfoRequest(), timeout)


class RolloutClient(_ModelServiceClient, WeightTransferCalls):
    """Samples completions."""

    _stub_type = rollout_pb2_grpc.RolloutServiceStub

    @overload
    def generate(
        self, prompt_token_ids: TokenIds, *, stream: Literal[False] = False, request_id: str = "",
        logprob_mode: LogprobMode = "processed", timeout_ms: int | None = None,
        draft_token_ids: DraftTokenIds = (), speculation: bool | None = None,
        determinism: Determinism = "required",
        timeout: float | None = None, **sampling: Unpack[SamplingOptions],
    ) -> list[Sample]: ...  # fmt: skip

    @overload
    def generate(
        self, prompt_token_ids: TokenIds, *, stream: Literal[True], request_id: str = "",
        logprob_mode: LogprobMode = "processed", timeout_ms: int | None = None,
        draft_token_ids: DraftTokenIds = (), speculation: bool | None = None,
        determinism: Determinism = "required",
        timeout: float | None = None, **sampling: Unpack[SamplingOptions],
    ) -> Iterator[Chunk | Sample]: ...  # fmt: skip

    def generate(
        self,
        prompt_token_ids,
        *,
        stream=False,
        request_id="",
        logprob_mode="processed",
        timeout_ms=None,
        draft_token_ids=(),
        speculation=None,
        determinism="required",
        timeout=None,
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
          draft_token_ids: a text that samples may repeat, such as a trajectory of earlier weights, or up to n
            such texts: of t texts, sample i begins with text i % t. At most n * max_tokens ids. They change
            the time, never a bit.
          speculation: False: no guesses for this request, and none from its samples for others.
          determinism: "none": with --speculation=fast_path, numerics that promise no bits may draw.
          timeout: ends the call with DeadlineExceededError; None: no limit.
          **sampling: see SamplingOptions.

        Returns:
          The samples by index, or the iterator.
        """
        request = calls.generate_request(
            prompt_token_ids,
            stream,
            request_id,
            logprob_mode,
            timeout_ms,
            draft_token_ids,
            speculation,
            determinism,
            sampling,
        )
        events = self._stream(self._stub.Generate, request, timeout, calls.SampleAssembly().events)
        return events if stream else calls.samples_in_order(request, events)

    def generate_batch(
        self,
        prompts: Sequence[TokenIds],
        *,
        max_concurrency: int = 64,
        logprob_mode: LogprobMode = "processed",
        timeout_ms: int | None = None,
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> list[list[Sample]]:
        """Samples completions of many prompts at once; the arguments are those of generate.

        Args:
          max_concurrency: the most requests in flight.
          timeout: of all together.

        Returns:
          The samples of each prompt, in the order of `prompts`. The first failure is raised, and cancels the
          requests that are still in flight.
        """

        def all_of(batches: aio.RolloutClient):
            return batches.generate_batch(
                prompts,
                max_concurrency=max_concurrency,
                logprob_mode=logprob_mode,
                timeout_ms=timeout_ms,
                timeout=timeout,
                **sampling,
            )

        return self._at_once(aio.RolloutClient, all_of)

    def abort(self, request_ids: str | Sequence[str], timeout: float | None = CONTROL_TIMEOUT_S) -> list[str]:
        """Ends requests early, each with the tokens it has; returns the ids of those that were in flight."""
        request = calls.abort_request(request_ids)
        return list(self._unary(self._stub.Abort, request, timeout).request_ids)

    def abort_all(self, timeout: float | None = CONTROL_TIMEOUT_S) -> list[str]:
        """Ends every request in flight; returns their ids."""
        return list(self._unary(self._stub.Abort, rollout_pb2.AbortRequest(all=True), timeout).request_ids)

    def pause_generation(
        self, mode: PauseMode = "abort", timeout: float | None = None
    ) -> rollout_pb2.PauseGenerationResponse:
        """Stops generation; returns once no step runs."""
        return self._unary(self._stub.PauseGeneration, calls.pause_request(mode), timeout)

    def continue_generation(
        self, timeout: float | None = CONTROL_TIMEOUT_S
    ) -> rollout_pb2.ContinueGenerationResponse:
        """Undoes pause_generation."""
        return self._unary(self._stub.ContinueGeneration, rollout_pb2.ContinueGenerationRequest(), timeout)

    def sleep(
        self, level: SleepLevel = "kv_cache", mode: PauseMode = "abort", timeout: float | None = None
    ) -> rollout_pb2.SleepResponse:
        """Stops generation as pause_generation does, then gives memory back: that of the KV cache, or also
        that of the weights. Requests that mode "keep" keeps are computed again, with the same bits."""
        return self._unary(self._stub.Sleep, calls.sleep_request(level, mode), timeout)

    def wake_up(self, timeout: float | None = None) -> rollout_pb2.WakeUpResponse:
        """Takes the memory again and continues. Weights that were given back come from an update before, or
        from the directory of those that served."""
        return self._unary(self._stub.WakeUp, rollout_pb2.WakeUpRequest(), timeout)

    def get_load(self, timeout: float | None = CONTROL_TIMEOUT_S) -> rollout_pb2.GetLoadResponse:
        """How full the queues and the KV cache are, and how many prompt tokens were found computed."""
        return self._unary(self._stub.GetLoad, rollout_pb2.GetLoadRequest(), timeout)


class ScorerClient(_ModelServiceClient):
    """Computes logprobs of given tokens."""

    _stub_type = scorer_pb2_grpc.ScorerServiceStub

    @overload
    def score(
        self, sequences: Sequence[tuple[TokenIds, TokenIds]], *, stream: Literal[False] = False,
        logprob_mode: LogprobMode = "processed", prompt_logprobs: bool = False, entropy: bool = False,
        weight_version: int | None = None, timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> list[Score]: ...  # fmt: skip

    @overload
    def score(
        self, sequences: Sequence[tuple[TokenIds, TokenIds]], *, stream: Literal[True],
        logprob_mode: LogprobMode = "processed", prompt_logprobs: bool = False, entropy: bool = False,
        weight_version: int | None = None, timeout: float | None = None,
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
        timeout=None,
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
        request = calls.score_request(
            sequences, logprob_mode, prompt_logprobs, entropy, weight_version, sampling
        )
        scores = self._stream(
            self._stub.Score, request, timeout, lambda response: calls.score_events(request, response)
        )
        return scores if stream else calls.scores_in_order(request, scores)
