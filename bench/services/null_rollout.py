"""A rollout that computes nothing: isobit.v1.RolloutService with answers from memory.

    python bench/services/null_rollout.py --port_file FILE [--step_ms S]

Before it, a gateway costs what it costs by itself. It answers health, GetServerInfo and Generate, and all
else with UNIMPLEMENTED. Tokens and logprobs are those of null_tokens.py. A message has one token, or with
final_only up to 1024, as the rollout's messages do; it comes as soon as the client can read it, and
chunk_interval_ms is ignored. With --step_ms, each sample gets a token every S ms, and messages have as many
tokens as chunk_interval_ms asks for. Messages are made once for each length and sent as bytes. Ends with its
parent, or on SIGTERM.
"""

import argparse
import asyncio
import ctypes
import functools
import itertools
import math
import os
import signal
from pathlib import Path

import grpc
import uvloop
from null_tokens import CONTEXT, VOCABULARY, logprob_at, token_at

from isobit.health import ServingStatus
from isobit.v1 import rollout_pb2, types_pb2

_LARGEST_CHUNK = 1024  # tokens: proto/isobit/v1/rollout.proto, GenerateChunk
_PR_SET_PDEATHSIG = 1


def server_info() -> bytes:
    info = rollout_pb2.RolloutServerInfo(max_n=128)
    info.server.max_logprobs = 20
    info.server.model.vocab_size = VOCABULARY
    info.server.model.context_length = CONTEXT
    info.server.fingerprint.settings = "eos_token_ids=257"
    info.server.weight_version.id = 1
    return info.SerializeToString()


def _chunk(begin: int, end: int) -> bytes:
    response = rollout_pb2.GenerateResponse()
    tokens = response.chunk.tokens
    tokens.token_ids.extend(map(token_at, range(begin, end)))
    tokens.logprobs.extend(map(logprob_at, range(begin, end)))
    tokens.weight_versions.extend([1] * (end - begin))
    response.chunk.index = 0
    return response.SerializeToString()


@functools.cache
def messages(prompt: int, tokens: int, size: int) -> list[tuple[int, bytes]]:
    """All messages of one sample, without the request's id, each with the number of its tokens. The first has
    one token, the others `size`."""
    ends = (
        [*range(1, tokens, size), tokens] if size < _LARGEST_CHUNK else [*range(size, tokens, size), tokens]
    )
    found = [(end - begin, _chunk(begin, end)) for begin, end in itertools.pairwise([0, *ends])]
    complete = rollout_pb2.GenerateComplete(
        finish_reason=types_pb2.FINISH_REASON_LENGTH,
        num_prompt_tokens=prompt,
        num_completion_tokens=tokens,
        logprob_mode=types_pb2.LOGPROB_MODE_PROCESSED,
    )
    complete.weight_version.id = 1
    return [*found, (0, rollout_pb2.GenerateResponse(complete=complete).SerializeToString())]


async def generate(
    step_s: float, request: rollout_pb2.GenerateRequest, context: grpc.aio.ServicerContext
) -> None:
    name = request.request_id or "null"
    # A message is its fields one behind the other, so the id can stand before what was made earlier.
    head = rollout_pb2.GenerateResponse(request_id=name).SerializeToString()
    size = _LARGEST_CHUNK if request.final_only else 1
    if step_s and not request.final_only:
        size = max(1, math.ceil(request.chunk_interval_ms / 1e3 / step_s))
    for count, message in messages(len(request.prompt_token_ids), request.sampling.max_tokens, size):
        if step_s:
            await asyncio.sleep(count * step_s)
        await context.write(head + message)


async def info(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
    return server_info()


async def health(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
    return bytes((1 << 3, ServingStatus.SERVING))  # field 1 of HealthCheckResponse


async def serve(port_file: Path, step_s: float) -> None:
    server = grpc.aio.server(options=[("grpc.max_concurrent_streams", 1 << 16)])
    rollout = {
        "Generate": grpc.unary_stream_rpc_method_handler(
            functools.partial(generate, step_s), rollout_pb2.GenerateRequest.FromString, None
        ),
        "GetServerInfo": grpc.unary_unary_rpc_method_handler(info),
    }
    server.add_generic_rpc_handlers((
        grpc.method_handlers_generic_handler("isobit.v1.RolloutService", rollout),
        grpc.method_handlers_generic_handler(
            "grpc.health.v1.Health", {"Check": grpc.unary_unary_rpc_method_handler(health)}
        ),
    ))  # fmt: skip
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: loop.create_task(server.stop(0)))
    port_file.with_suffix(".new").write_text(str(port))
    port_file.with_suffix(".new").rename(port_file)
    await server.wait_for_termination()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port_file", type=Path, required=True, metavar="FILE", help="gets the port")
    parser.add_argument("--step_ms", type=float, default=0.0, metavar="S", help="between a sample's tokens")
    arguments = parser.parse_args()
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == parent:
        uvloop.run(serve(arguments.port_file, arguments.step_ms / 1e3))


if __name__ == "__main__":
    main()
