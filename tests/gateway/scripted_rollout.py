"""A rollout that says what a test wants: the gateway's peer where a random model would not do.

with ScriptedRollout(lambda request: [[ids of sample 0 in pieces], ...]) as rollout:
    ... rollout.target
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from isobit.v1 import rollout_pb2, rollout_pb2_grpc, types_pb2

CONTEXT_LENGTH = 4096
VOCAB_SIZE = 499
EOS = 257


class Refusal(Exception):
    """Ends a call with a status, and perhaps trailing metadata."""

    def __init__(self, code: grpc.StatusCode, details: str, **trailing: str):
        super().__init__(details)
        self.code = code
        self.details = details
        self.trailing = [(name.replace("_", "-"), value) for name, value in trailing.items()]


class ScriptedRollout(rollout_pb2_grpc.RolloutServiceServicer):
    """Serves while its `with` block runs.

    `script` gets a request, and gives the pieces of its one sample: each a list of token ids, or an exception
    to end the call with. A sample whose last token is EOS or one of stop_token_ids stops; others have reached
    their length.
    """

    def __init__(self, script: Callable[[rollout_pb2.GenerateRequest], Sequence[list[int] | Exception]]):
        self.script = script
        self.logprob = -0.5  # of every token
        self.backend = "cpu/avx512"
        self.requests: list[rollout_pb2.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.ended = threading.Event()  # a call has ended before its sample
        self.may_go_on = threading.Event()  # what a piece of None waits for
        self.info_error: Refusal | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> "ScriptedRollout":
        self._server = grpc.server(futures.ThreadPoolExecutor(64))
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self, self._server)
        self.health = health.HealthServicer()
        self.health.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        return self

    def __exit__(self, *_) -> None:
        self.may_go_on.set()
        self._server.stop(0).wait()

    def GetServerInfo(self, request, context):
        if self.info_error is not None:
            self._abort(context, self.info_error)
        info = rollout_pb2.RolloutServerInfo(max_n=64)
        info.server.model.context_length = CONTEXT_LENGTH
        info.server.model.vocab_size = VOCAB_SIZE
        info.server.max_logprobs = 20
        info.server.instruction_set = self.backend
        info.server.fingerprint.settings = f"eos_token_ids={EOS} max_position_embeddings={CONTEXT_LENGTH}"
        return info

    def GetLoad(self, request, context):
        return rollout_pb2.GetLoadResponse(num_running_requests=3, num_used_pages=1, num_free_pages=3)

    def Generate(self, request, context) -> Iterator[rollout_pb2.GenerateResponse]:
        with self._lock:
            self.requests.append(request)
            self.metadata.append(dict(context.invocation_metadata()))
        is_whole = threading.Event()
        context.add_callback(lambda: is_whole.is_set() or self.ended.set())
        count, last = 0, None
        for piece in self.script(request):
            if isinstance(piece, Refusal):
                self._abort(context, piece)
            if piece is None:
                self.may_go_on.wait()
                continue
            count, last = count + len(piece), piece[-1]
            yield self._chunk(request, piece)
        complete = rollout_pb2.GenerateComplete(num_completion_tokens=count, num_prompt_tokens=1)
        complete.finish_reason = types_pb2.FINISH_REASON_LENGTH
        if last == EOS or last in request.sampling.stop_token_ids:
            complete.finish_reason, complete.stop_token_id = types_pb2.FINISH_REASON_STOP, last
        is_whole.set()
        yield rollout_pb2.GenerateResponse(request_id=request.request_id, complete=complete)

    def _chunk(self, request, piece: list[int]) -> rollout_pb2.GenerateResponse:
        tokens = types_pb2.TokenLogprobs(
            token_ids=piece, logprobs=[self.logprob] * len(piece), weight_versions=[1] * len(piece)
        )
        return rollout_pb2.GenerateResponse(
            request_id=request.request_id, chunk=rollout_pb2.GenerateChunk(index=0, tokens=tokens)
        )

    @staticmethod
    def _abort(context, refusal: Refusal) -> None:
        context.set_trailing_metadata(refusal.trailing)
        with contextlib.suppress(ValueError):
            context.abort(refusal.code, refusal.details)
