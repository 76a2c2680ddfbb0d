"""vLLM's own API server before an engine that computes nothing. http_servers.py starts it with vLLM's Python.

    VLLM_TARGET_DEVICE=cpu python bench/services/null_vllm.py --model DIR --port_file FILE \
        --engine inside|apart

The server is vLLM's: arguments, application, routes, uvicorn. Tokens and logprobs are null_tokens.py's.
The engine behind the server is one of

    inside  an EngineClient in the server's process. It makes its outputs once for each length, so that only
            the code above vLLM's EngineClient costs anything: it decodes no text and speaks to no process.
    apart   vLLM's own AsyncLLM, and vLLM's engine core with its scheduler in a process of its own, as vLLM
            serves, over an executor that computes nothing.

FILE gets a JSON object: the port, and the processes that are the server's (`servers`), not the engine's.
"""

import argparse
import asyncio
import ctypes
import functools
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop
from null_tokens import CONTEXT, logprob_at, token_at
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.common.startup import cli_env_setup
from vllm.entrypoints.launchers.api_server.entry import build_and_serve, run_server_worker
from vllm.entrypoints.launchers.launcher import setup_server
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers.registry import renderer_from_config
from vllm.sampling_params import RequestOutputKind
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

_PR_SET_PDEATHSIG = 1


class _NullClient:
    """The part of an EngineClient that completions use."""

    is_running = True
    is_stopped = False
    errored = False

    def __init__(self, config: Any):
        self.vllm_config = config
        self.model_config = config.model_config
        self.renderer = renderer_from_config(config)
        self.input_processor = InputProcessor(config, self.renderer)
        self._text_of = functools.cache(lambda token: self.renderer.tokenizer.decode([token]))
        self._whole = functools.cache(lambda length: self._output(0, length, length))
        self._deltas = functools.cache(lambda length: [self._output(i, i + 1, length) for i in range(length)])

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **_: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        ids, length = prompt["prompt_token_ids"], sampling_params.max_tokens
        if sampling_params.output_kind == RequestOutputKind.FINAL_ONLY:
            await asyncio.sleep(0)
            yield self._answer(request_id, ids, self._whole(length))
            return
        for output in self._deltas(length):
            await asyncio.sleep(0)  # other requests have their turn, as between the steps of an engine
            yield self._answer(request_id, ids, output)

    def check_admission(self, *_: Any, **__: Any) -> None:
        pass

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def is_tracing_enabled(self) -> bool:
        return False

    async def check_health(self) -> None:
        pass

    async def do_log_stats(self) -> None:
        pass

    async def abort(self, request_id: Any) -> None:
        pass

    def shutdown(self, timeout: float | None = None) -> None:
        pass

    def _answer(self, request_id: str, ids: list[int], output: CompletionOutput) -> RequestOutput:
        return RequestOutput(
            request_id, None, ids, None, [output], output.finish_reason is not None, num_cached_tokens=0
        )

    def _output(self, begin: int, end: int, length: int) -> CompletionOutput:
        tokens = [token_at(i) for i in range(begin, end)]
        texts = [self._text_of(token) for token in tokens]
        logprobs = [
            {token: Logprob(logprob_at(i), 1, text)}
            for i, token, text in zip(range(begin, end), tokens, texts, strict=True)
        ]
        reason = "length" if end == length else None
        return CompletionOutput(0, "".join(texts), tokens, 0.0, logprobs, finish_reason=reason)


EngineClient.register(_NullClient)


class NullExecutor(Executor):
    """An executor whose every step draws the next tokens of null_tokens.py."""

    def _init_executor(self) -> None:
        self._drawn: dict[str, int] = {}
        self._left: dict[str, int] = {}  # of the prompt, to be computed
        self._tokens = [token_at(i) for i in range(CONTEXT)]
        self._logprobs = np.array([logprob_at(i) for i in range(CONTEXT)], np.float32)

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def check_health(self) -> None:
        pass

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: tuple = (), kwargs: Any = None, non_block: bool = False
    ) -> Any:
        answers = {
            "get_kv_cache_spec": lambda: {
                "layer": FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32)
            },
            "get_supported_kv_cache_layouts": lambda: ["LBNHC"],
            "determine_available_memory": lambda: 1 << 30,
            "get_supported_tasks": lambda: ("generate",),
        }
        found = answers[method]() if method in answers else None
        return [] if method == "compile_or_warm_up_model" else [found]

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        for request in scheduler_output.scheduled_new_reqs:
            self._drawn[request.req_id] = 0
            self._left[request.req_id] = len(request.prompt_token_ids) - request.num_computed_tokens
        for name in scheduler_output.finished_req_ids:
            self._drawn.pop(name, None)
            self._left.pop(name, None)
        self._output = self._draw(scheduler_output.num_scheduled_tokens)
        # The engine asks for the tokens by sample_tokens, unless nothing was scheduled.
        return _given(None if scheduler_output.num_scheduled_tokens else self._output, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return _given(self._output, non_block)

    def _draw(self, scheduled: dict[str, int]) -> ModelRunnerOutput:
        """The next token of each request, except where a part of the prompt is left."""
        positions, sampled = [], []
        for name, count in scheduled.items():
            self._left[name] -= count
            position = self._drawn[name]
            positions.append(position)
            is_drawn = self._left[name] <= 0
            sampled.append([self._tokens[position]] if is_drawn else [])
            self._drawn[name] = position + is_drawn
        tokens = np.array([self._tokens[position] for position in positions], np.int32)
        return ModelRunnerOutput(
            req_ids=list(scheduled),
            req_id_to_index={name: index for index, name in enumerate(scheduled)},
            sampled_token_ids=sampled,
            logprobs=LogprobsLists(
                tokens.reshape(-1, 1),
                self._logprobs[positions].reshape(-1, 1),
                np.ones(len(positions), np.int32),
            ),
        )

    def shutdown(self) -> None:
        pass


def _given(output: Any, as_future: bool) -> Any:
    if not as_future:
        return output
    done: Future = Future()
    done.set_result(output)
    return done


def _arguments(model: Path, requests: int, engine: str) -> argparse.Namespace:
    """Of `vllm serve`. All that is not named has vLLM's default."""
    words = [f"--model={model}", "--served-model-name=null", "--host=127.0.0.1", "--port=0"]
    words += [f"--max-model-len={CONTEXT}", "--disable-uvicorn-access-log"]
    if engine == "apart":
        words += [f"--max-num-seqs={requests}", "--num-gpu-blocks-override=65536", "--block-size=16"]
        words += ["--distributed-executor-backend=null_vllm.NullExecutor"]
    parser = make_arg_parser(FlexibleArgumentParser())
    arguments = parser.parse_args(words)
    validate_parsed_serve_args(arguments)
    return arguments


async def _serve_inside(
    arguments: argparse.Namespace, address: str, sock: Any, loads: Any, index: int
) -> None:
    config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
    peer_loads = None if loads is None else (loads, index)
    ended = await build_and_serve(_NullClient(config), address, sock, arguments, peer_loads)
    await ended


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="tokenizer and config")
    add("--port_file", type=Path, required=True, metavar="FILE", help="gets port and processes")
    add("--engine", choices=("inside", "apart"), default="inside")
    add("--workers", type=int, default=1, metavar="N", help="API servers at one socket; with `inside` alone")
    add("--requests", type=int, default=512, metavar="N", help="in flight at once")
    own = parser.parse_args()
    _die_with_parent()
    cli_env_setup()
    arguments = _arguments(own.model, own.requests, own.engine)
    address, sock = setup_server(arguments, reuse_port=False)
    arguments.port = sock.getsockname()[1]
    # As vLLM's own processes share a socket: APIServerProcessManager.
    loads = multiprocessing.Array("i", [2**31 - 1] * own.workers, lock=False) if own.workers > 1 else None
    servers, index = [os.getpid()], 0
    for other in range(1, own.workers):
        child = os.fork()
        if child == 0:
            _die_with_parent()
            servers, index = [], other
            break
        servers.append(child)
    if servers:
        new = own.port_file.with_suffix(".new")
        new.write_text(json.dumps({"port": arguments.port, "servers": servers}))
        new.rename(own.port_file)
    if own.engine == "inside":
        uvloop.run(_serve_inside(arguments, address, sock, loads, index))
    else:
        uvloop.run(run_server_worker(address, sock, arguments))


if __name__ == "__main__":
    sys.modules["null_vllm"] = sys.modules["__main__"]  # the engine's process gets the executor by this name
    main()
