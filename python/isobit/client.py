# Made from aio/client.py by isobit_tools.sync_clients: change that, then run `make format`.
"""Typed synchronous clients of rollout and scorer: token ids in, NumPy arrays out.

    with RolloutClient("localhost:7001") as rollout, ScorerClient("localhost:7002") as scorer:
        rollout.wait_until_serving()
        (sample,) = rollout.generate(prompt_ids, max_tokens=64, seed=1)
        (score,) = scorer.score([(prompt_ids, sample.tokens.token_ids)])
        assert (sample.tokens.logprobs.view("u4") == score.tokens.logprobs.view("u4")).all()

A failed call raises a class of isobit.errors. `timeout` is in seconds, and ends the call on the server, too;
None or infinity: no limit. Calls that control a service return messages of isobit.v1.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Unpack, overload

from isobit import calls
from isobit.batches import generate_batch
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
    """What the clients of rollout and scorer have in common."""

    def update_weights(
        self,
        model_path: str,
        *,
        weight_version: int | None = None,
        expected_digest: str = "",
        in_flight: InFlightMode | None = None,
        timeout: float | None = None,
    ) -> types_pb2.UpdateWeightsResponse:
        """Switches to the weights in a directory. After an error the old weights stay in use.

        Args:
          model_path: the directory, relative to the service's --model_root.
          weight_version: the version id of the new weights; None: the current id plus 1.
          expected_digest: the weight digest (64 hex digits) that the new weights must have; empty skips the
            check.
          in_flight: what happens to requests in flight: "abort", "wait" or "recompute_kv"; None: the
            service's default.
          timeout: in seconds; None: no limit.

        Raises:
          NotFoundError: the directory, or a file of it, does not exist.
          InvalidArgumentError: the weights are of another model, damaged or not finite.
          FailedPreconditionError: the weights have another digest than `expected_digest`.
          AbortedError: another update is in progress.
        """
        request = calls.update_weights_request(model_path, weight_version, expected_digest, in_flight)
        return self._unary("UpdateWeights", request, timeout)

    def update_weights_from_stream(
        self,
        tensors: Weights,
        *,
        weight_version: int | None = None,
        expected_digest: str | None = None,
        in_flight: InFlightMode | None = None,
        timeout: float | None = None,
    ) -> types_pb2.UpdateWeightsResponse:
        """Switches to weights that this call sends; no file is written. After an error the old weights stay
        in use.

        Args:
          tensors: a mapping or pairs of names (as in a checkpoint) and NumPy arrays or torch tensors; see
            isobit.weights.Weights. They must not change until the call returns. If reading them raises an
            exception, the call ends and raises it.
          weight_version, in_flight: as for update_weights.
          expected_digest: the digest that the service must have received. None: the digest of the tensors,
            computed while they are sent. Empty skips the check.
          timeout: in seconds; None: no limit.

        Raises:
          AbortedError: another update is in progress.
          InvalidArgumentError: a tensor is wrong; the message names it.
          FailedPreconditionError: the service received weights of another digest.
        """
        chunks = calls.weight_chunks(tensors, weight_version, expected_digest, in_flight)
        return self._upload("UpdateWeightsFromStream", chunks, timeout, calls.WEIGHTS_ACCEPTED)

    def update_weights_from_tensor(
        self,
        weights: HeldWeights,
        *,
        weight_version: int | None = None,
        expected_digest: str | Callable[[], str] = "",
        in_flight: InFlightMode | None = None,
        timeout: float | None = None,
    ) -> types_pb2.UpdateWeightsResponse:
        """Switches to weights in the GPU memory of processes on the service's host (CUDA IPC). After an error
        the old weights stay in use.

        Args:
          weights: where the weights are. They must not change or be freed until the call returns, and the GPU
            work that computes them must have ended before the call.
          weight_version, expected_digest, in_flight: as for update_weights. `expected_digest` may be a
            function; it is called while the service reads the weights, and returns the digest.
          timeout: in seconds; None: no limit.

        Raises:
          UnimplementedError: the service computes on CPUs, or is a scorer of several processes.
          InvalidArgumentError: values are missing, or the service cannot reach the memory.
          Others as for update_weights_from_stream.
        """
        chunks = calls.held_weight_chunks(weights, weight_version, expected_digest, in_flight)
        return self._upload("UpdateWeightsFromStream", chunks, timeout, calls.WEIGHTS_ACCEPTED)

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
        """Switches to weights that a trainer's processes send from GPU to GPU (NCCL) during this call.
        isobit.torch.update_weights makes this call, and sends. After an error the old weights stay in use.

        Args:
          weights: which sender holds which part.
          weight_version, expected_digest, in_flight: as for update_weights.
          has_sent: returns whether the senders in this process are done. It is called repeatedly; if it
            raises an exception, the call ends and raises it.
          timeout: in seconds; None: no limit.

        Raises:
          UnimplementedError: the service computes on CPUs, or is a scorer of several processes.
          FailedPreconditionError: the service has another version of NCCL, or has left the group.
          DeadlineExceededError: a sender was silent for too long.
          Others as for update_weights_from_stream.
        """
        chunks = calls.held_weight_chunks(weights, weight_version, expected_digest, in_flight, has_sent)
        return self._upload("UpdateWeightsFromStream", chunks, timeout, calls.WEIGHTS_ACCEPTED)

    def probe(
        self,
        token_ids: TokenIds,
        *,
        site: tuple[int, int] | None = None,
        row: int | None = None,
        timeout: float | None = None,
    ) -> types_pb2.ProbeResponse:
        """Asks the service to compute a sequence and to return a digest of each op's result. Needs the role
        admin.

        Args:
          token_ids: prompt and completion, one row of integers.
          site: (layer, ProbeOp): also return a digest of each row of this op's result.
          row: also return the values of this row of `site`.
          timeout: in seconds; None: no limit.
        """
        return self._unary("Probe", calls.probe_request(token_ids, site, row), timeout)

    def get_server_info(self, timeout: float | None = CONTROL_TIMEOUT_S):
        """RolloutServerInfo or ScorerServerInfo: model, numerics, weights and limits."""
        return self._unary("GetServerInfo", types_pb2.GetServerInfoRequest(), timeout)


class RolloutClient(_ModelServiceClient, WeightTransferCalls):
    """The client of a rollout, which samples completions."""

    _stub_type = rollout_pb2_grpc.RolloutServiceStub

    @overload
    def generate(
        self, prompt_token_ids: TokenIds, *, stream: Literal[False] = False, request_id: str = "",
        logprob_mode: LogprobMode = "processed", timeout_ms: int | None = None,
        draft_token_ids: DraftTokenIds = (), speculation: bool | None = None,
        determinism: Determinism = "required", chunk_interval_ms: int = 0,
        timeout: float | None = None, **sampling: Unpack[SamplingOptions],
    ) -> list[Sample]: ...  # fmt: skip

    @overload
    def generate(
        self, prompt_token_ids: TokenIds, *, stream: Literal[True], request_id: str = "",
        logprob_mode: LogprobMode = "processed", timeout_ms: int | None = None,
        draft_token_ids: DraftTokenIds = (), speculation: bool | None = None,
        determinism: Determinism = "required", chunk_interval_ms: int = 0,
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
        chunk_interval_ms=0,
        timeout=None,
        **sampling,
    ):
        """Samples `n` completions of one prompt.

        Args:
          prompt_token_ids: one row of integers.
          stream: True returns an iterator that yields each Chunk as it comes, and each whole
            Sample when it ends. The request is sent when the first item is requested; closing the iterator
            cancels it.
          request_id: the request's name, for abort(); if empty, the server chooses one.
          logprob_mode: "processed": logprobs of the distribution that the tokens were drawn from; "raw": of
            the model's own.
          timeout_ms: after this many milliseconds the request ends, and its samples keep the tokens they
            have.
          draft_token_ids: a text that the samples may repeat, such as a sample of the same prompt with
            earlier weights, or up to n such texts; with t texts, sample i follows text i % t first. At most n
            * max_tokens ids. They change the time of the answer, not a bit of it.
          speculation: False: the server guesses no tokens for this request, and takes no guesses for other
            requests from its samples.
          determinism: "none": the server may draw the tokens with numerics that do not promise equal bits, if
            it speculates with such numerics.
          chunk_interval_ms: with stream, the least milliseconds between two chunks of a sample. A client
            that reads many streams gets fewer and larger chunks. The first token and the end come at once.
          timeout: after this many seconds the call ends with DeadlineExceededError and returns no tokens;
            None: no limit.
          **sampling: see SamplingOptions.

        Returns:
          The samples, by index; or the iterator.

        Raises:
          InvalidArgumentError: an argument is out of bounds; the message names it.
          ResourceExhaustedError: the queue is full or a quota is used up, and the client does not wait.
          AlreadyExistsError: a request of the same id is in flight.
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
            chunk_interval_ms,
            sampling,
        )
        events = self._stream("Generate", request, timeout, calls.SampleAssembly().events)
        return events if stream else self._whole(events, lambda found: calls.samples_in_order(request, found))

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
        """Samples completions of many prompts at the same time. Arguments not listed here are as for
        generate.

        Args:
          prompts: rows of token ids.
          max_concurrency: the largest number of requests in flight.
          timeout: in seconds, for all prompts together; None: no limit.

        Returns:
          The samples of each prompt, in the order of `prompts`.

        Raises:
          IsobitError: the first request that failed. The requests that are still in flight are cancelled.
        """
        return generate_batch(
            self,
            prompts,
            max_concurrency,
            timeout,
            logprob_mode=logprob_mode,
            timeout_ms=timeout_ms,
            **sampling,
        )

    def abort(self, request_ids: str | Sequence[str], timeout: float | None = CONTROL_TIMEOUT_S) -> list[str]:
        """Ends requests early; each returns the tokens it has. Returns the ids of those that were in
        flight."""
        response = self._unary("Abort", calls.abort_request(request_ids), timeout)
        return list(response.request_ids)

    def abort_all(self, timeout: float | None = CONTROL_TIMEOUT_S) -> list[str]:
        """Ends every request in flight; returns their ids."""
        response = self._unary("Abort", rollout_pb2.AbortRequest(all=True), timeout)
        return list(response.request_ids)

    def pause_generation(
        self, mode: PauseMode = "abort", timeout: float | None = None
    ) -> rollout_pb2.PauseGenerationResponse:
        """Stops generation, and returns once no step runs. `mode`: "abort" ends requests in flight, "wait"
        lets them finish first, "keep" keeps them until continue_generation."""
        return self._unary("PauseGeneration", calls.pause_request(mode), timeout)

    def continue_generation(
        self, timeout: float | None = CONTROL_TIMEOUT_S
    ) -> rollout_pb2.ContinueGenerationResponse:
        """Ends a pause. It is not an error if generation is not paused."""
        return self._unary("ContinueGeneration", rollout_pb2.ContinueGenerationRequest(), timeout)

    def sleep(
        self, level: SleepLevel = "kv_cache", mode: PauseMode = "abort", timeout: float | None = None
    ) -> rollout_pb2.SleepResponse:
        """Stops generation as pause_generation does, then frees memory: that of the KV cache (level
        "kv_cache"), or also that of the weights ("kv_cache_and_weights"). Requests kept by the mode "keep"
        are computed again after wake_up, with the same bits."""
        return self._unary("Sleep", calls.sleep_request(level, mode), timeout)

    def wake_up(self, timeout: float | None = None) -> rollout_pb2.WakeUpResponse:
        """Allocates the memory again and continues. If sleep() freed the weights and no update has brought
        others since, the service reads the last directory again.

        Raises:
          ResourceExhaustedError: the memory is not available; the rollout stays asleep.
          FailedPreconditionError: there are no new weights, and the last ones did not come from a directory.
        """
        return self._unary("WakeUp", rollout_pb2.WakeUpRequest(), timeout)

    def get_load(self, timeout: float | None = CONTROL_TIMEOUT_S) -> rollout_pb2.GetLoadResponse:
        """How full the queues and the KV cache are, and how many prompt tokens were already computed."""
        return self._unary("GetLoad", rollout_pb2.GetLoadRequest(), timeout)


class ScorerClient(_ModelServiceClient):
    """The client of a scorer, which computes the logprobs of given tokens."""

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
        """Scores sequences, all with the same sampling parameters.

        Args:
          sequences: pairs of prompt and completion token ids.
          stream: True returns an iterator that yields each Score as soon as it is ready, in any
            order.
          logprob_mode: "processed": logprobs of the distribution that the parameters give; "raw": of the
            model's own.
          prompt_logprobs: also scores the prompt tokens, except the first.
          entropy: also computes the entropy, in nats, of the distribution at each completion token.
          weight_version: the version id that must be in use; None accepts any.
          timeout: in seconds; None: no limit.
          **sampling: the parameters that the tokens were drawn with; see SamplingOptions.

        Returns:
          The scores, in the order of `sequences`; or the iterator.

        Raises:
          FailedPreconditionError: other weights than `weight_version` are in use.
          InvalidArgumentError: a sequence is wrong; then nothing is computed.
          AbortedError: a weight update ended the call.
        """
        request = calls.score_request(
            sequences, logprob_mode, prompt_logprobs, entropy, weight_version, sampling
        )
        scores = self._stream(
            "Score", request, timeout, lambda response: calls.score_events(request, response)
        )
        return scores if stream else self._whole(scores, lambda found: calls.scores_in_order(request, found))
