"""Plays the service binaries for demo_test.py: same flags, canned answers, and faults on request.

    fake_services.py rollout|scorer|comparator|model [flags]

The environment variable ISOBIT_FAKE_FAULT may name one fault: tree_gap, no_contrast, too_few, flip_unseen,
scorer_dies, comparator_fails or deaf (to SIGTERM).
"""

import os
import signal
import sys
import threading
from concurrent import futures
from pathlib import Path

import grpc
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from isobit.v1 import comparator_pb2, comparator_pb2_grpc, rollout_pb2, rollout_pb2_grpc, types_pb2

FAULT = os.environ.get("ISOBIT_FAKE_FAULT", "")
TOKENS = range(100, 102 if FAULT == "too_few" else 140)
LOGPROB = np.float32(-0.5)
OFF_BY_ONE = np.nextafter(LOGPROB, np.float32(0))


class FakeRollout(rollout_pb2_grpc.RolloutServiceServicer):
    def Generate(self, request, context):
        for token in TOKENS:
            tokens = types_pb2.TokenLogprobs(token_ids=[token], logprobs=[LOGPROB], weight_versions=[1])
            yield rollout_pb2.GenerateResponse(
                request_id="r", chunk=rollout_pb2.GenerateChunk(index=0, tokens=tokens)
            )
        complete = rollout_pb2.GenerateComplete(
            finish_reason=types_pb2.FINISH_REASON_LENGTH, num_completion_tokens=len(TOKENS)
        )
        yield rollout_pb2.GenerateResponse(request_id="r", complete=complete)


class FakeComparator(comparator_pb2_grpc.ComparatorServiceServicer):
    def __init__(self, run: str):
        """`run` is the demo's name for this run: a mode, or "flipped"."""
        self._flipped = run == "flipped"
        equal = {"tree": FAULT != "tree_gap", "flipped": FAULT == "flip_unseen"}
        self._equal = equal.get(run, FAULT == "no_contrast")

    def Compare(self, request, context):
        if FAULT == "comparator_fails":
            context.abort(grpc.StatusCode.INTERNAL, "the logits are not finite")
        if self._flipped and not request.allow_weight_mismatch and FAULT != "flip_unseen":
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "rollout has digest aa, scorer bb")
        scored = LOGPROB if self._equal else OFF_BY_ONE
        gap = comparator_pb2.TokenGap(
            rollout_bits=int(LOGPROB.view(np.uint32)),
            scorer_bits=int(scored.view(np.uint32)),
            equal=self._equal,
        )
        statistics = comparator_pb2.GapStatistics(
            num_tokens=len(TOKENS),
            num_finite=len(TOKENS),
            num_unequal=0 if self._equal else len(TOKENS),
            max_abs_dp=0.0 if self._equal else 1.5e-8,
        )
        for index in reversed(range(len(request.prompts))):
            gaps = comparator_pb2.TokenGaps(sequence_id=f"{index}/0")
            for token in TOKENS:
                gap.token_id = token
                gaps.gaps.append(gap)
            yield comparator_pb2.CompareEvent(gaps=gaps)
            report = comparator_pb2.SequenceReport(
                sequence_id=f"{index}/0", prompt_index=index, statistics=statistics
            )
            yield comparator_pb2.CompareEvent(sequence=report)
        for field in ("num_tokens", "num_finite", "num_unequal"):
            setattr(statistics, field, getattr(statistics, field) * len(request.prompts))
        yield comparator_pb2.CompareEvent(summary=comparator_pb2.CompareSummary(statistics=statistics))


def make_model(arguments: list[str]) -> None:
    output = Path(arguments[2] if arguments[0] == "make" else arguments[-1])
    output.mkdir()
    (output / "config.json").write_text('{"vocab_size": 500}')
    print(" ".join(arguments[:1]), "done")


def serve(role: str, flags: dict[str, str]) -> None:
    print("pid", os.getpid(), flush=True)
    if role == "scorer" and FAULT == "scorer_dies":
        sys.exit("model.safetensors is truncated")
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: None if FAULT == "deaf" else stopping.set())
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    if role == "rollout":
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(FakeRollout(), server)
    run = Path(flags["port_file"]).name.split("-")[0]
    if role == "comparator":
        comparator_pb2_grpc.add_ComparatorServiceServicer_to_server(FakeComparator(run), server)
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port(f"127.0.0.1:{flags['port']}")
    server.start()
    partial = Path(flags["port_file"] + ".partial")
    partial.write_text(f"{port}\n")
    partial.rename(flags["port_file"])
    stopping.wait()
    server.stop(None).wait()


if __name__ == "__main__":
    if sys.argv[1] == "model":
        make_model(sys.argv[2:])
    else:
        serve(sys.argv[1], dict(flag.removeprefix("--").split("=", 1) for flag in sys.argv[2:]))
