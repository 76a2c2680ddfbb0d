"""Asks an HTTP server for many completions at once, by raw sockets in one thread, so that it costs little.

OpenAI's /v1/completions with vLLM's fields for token ids. The body is the same for every server.
"""

import json
import math
import select
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from null_tokens import logprob_at, token_at

MODEL = "null"
PROMPT_TOKENS = 16
_TIMEOUT_S = 300.0
_EVENT = b"data: "


def prompt(number: int) -> list[int]:
    return [1 + (number * 7 + i * i) % 200 for i in range(PROMPT_TOKENS)]


def request(number: int, tokens: int, stream: bool) -> bytes:
    fields = {
        "model": MODEL, "prompt": prompt(number), "max_tokens": tokens, "seed": number, "ignore_eos": True,
        "logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True, "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }  # fmt: skip
    body = json.dumps(fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body


@dataclass
class Load:
    """What one load gave."""

    answers: list[bytes]  # heads included, by request
    seconds: float
    client_s: float  # of the client's processor

    @property
    def events(self) -> int:
        return sum(answer.count(_EVENT) for answer in self.answers)


def ask(port: int, requests: int, tokens: int, stream: bool) -> Load:
    """Sends all requests at once, each on a connection of its own, and reads until the server closes it.

    Raises RuntimeError: an answer has another status than 200 or another number of tokens.
    """
    bodies = [request(number, tokens, stream) for number in range(requests)]
    parts: list[list[bytes]] = [[] for _ in bodies]
    poll, sockets = select.epoll(), {}
    start, used = time.perf_counter(), time.process_time()
    try:
        for number, body in enumerate(bodies):
            connection = socket.create_connection(("127.0.0.1", port), _TIMEOUT_S)
            connection.sendall(body)
            connection.setblocking(False)
            sockets[connection.fileno()] = connection, parts[number]
            poll.register(connection.fileno(), select.EPOLLIN)
        while sockets:
            ready = poll.poll(_TIMEOUT_S)
            if not ready:
                raise RuntimeError(f"{len(sockets)} of {requests} answers did not go on in {_TIMEOUT_S:g} s")
            for file, _ in ready:
                connection, own = sockets[file]
                if piece := connection.recv(1 << 18):
                    own.append(piece)
                else:
                    poll.unregister(file)
                    sockets.pop(file)[0].close()
    finally:
        poll.close()
        for connection, _ in sockets.values():
            connection.close()
    seconds, client_s = time.perf_counter() - start, time.process_time() - used
    load = Load([b"".join(own) for own in parts], seconds, client_s)
    for answer in load.answers:
        _check_length(answer, tokens)
    return load


def is_healthy(port: int) -> bool:
    """Whether GET /health is answered with 200."""
    try:
        with socket.create_connection(("127.0.0.1", port), 5.0) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            return connection.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def _check_length(answer: bytes, tokens: int) -> None:
    counted = answer.rpartition(b'"completion_tokens":')[2].split(b",")[0].split(b"}")[0]
    if not answer.startswith(b"HTTP/1.1 200") or counted.strip() != str(tokens).encode():
        raise RuntimeError(f"expected {tokens} tokens, got {answer[:2000]!r} ... {answer[-500:]!r}")


def check_answers(load: Load, tokens: int, stream: bool) -> None:
    """RuntimeError: an answer lacks a token, a name or a logprob of null_tokens, or a bit of one differs."""
    for answer in load.answers:
        ids: list[int] = []
        names: list[str] = []
        logprobs: list[float] = []
        for choice in _choices(answer, stream):
            ids += choice["token_ids"] or ()
            names += (choice["logprobs"] or {}).get("tokens", ())
            logprobs += (choice["logprobs"] or {}).get("token_logprobs", ())
        expected = [token_at(i) for i in range(tokens)]
        if ids != expected or names != [f"token_id:{token}" for token in expected]:
            raise RuntimeError(
                f"expected the tokens {expected[:8]} ..., got {ids[:8]} ... named {names[:8]} ..."
            )
        if _bits(logprobs) != _bits(map(logprob_at, range(tokens))):
            raise RuntimeError(f"logprobs differ: {logprobs[:4]} ...")


def _bits(logprobs: Any) -> list[bytes]:
    return [struct.pack("f", value if value is not None else math.nan) for value in logprobs]


def _choices(answer: bytes, stream: bool) -> Iterator[dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        body = _without_chunks(body)
    if not stream:
        yield from json.loads(body)["choices"]
        return
    for event in body.split(b"\n\n"):
        if event and event != _EVENT + b"[DONE]":
            yield from json.loads(event.removeprefix(_EVENT))["choices"]


def _without_chunks(body: bytes) -> bytes:
    parts, at = [], 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 4 + size
