"""Plays a hub of models on loopback: the part of its HTTP that huggingface_hub calls to list and fetch files.

    with FakeHub({"org/tiny": Repository({"config.json": b"{}"})}) as hub:
        environment = hub.environment(cache)      # for a process that imports huggingface_hub

Run by itself, it serves a directory's files as one model until it is killed, and prints its address:

    fake_hub.py org/tiny DIRECTORY
"""

import contextlib
import hashlib
import json
import re
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """One model. Every commit has the files of today."""

    files: dict[str, bytes]
    commit: str = "0123456789abcdef0123456789abcdef01234567"
    branches: tuple[str, ...] = ("main",)
    gated: bool = False  # for whoever has no token
    token: str | None = None  # private: others are told that there is no such model
    break_off: set[str] = field(default_factory=set)  # files whose first answer ends in the middle

    def knows(self, revision: str) -> bool:
        return revision in (*self.branches, self.commit)


class FakeHub:
    """Serves `models`, by id, on a free port. `status`: answers everything with it, if set."""

    def __init__(self, models: dict[str, Repository]):
        self.models = models
        self.status: int | None = None
        self.requests: Counter[str] = Counter()  # by "METHOD path"
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def environment(self, home: Path) -> dict[str, str]:
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}

    def __enter__(self) -> "FakeHub":
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _handler_of(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self._answer()

        def do_HEAD(self):
            self._answer()

        def log_message(self, *_):
            pass

        def _answer(self):
            path = unquote(urlsplit(self.path).path)
            hub.requests[f"{self.command} {path}"] += 1
            if hub.status is not None:
                return self._fail(hub.status, "", "down")
            if match := re.fullmatch(r"/api/models/(.+?)(?:/(revision|tree)/([^/]+))?", path):
                return self._tell(match[1], match[2], match[3] or "main")
            if match := re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path):
                return self._send_file(*match.groups())
            return self._fail(404, "", "no such page")

        def _repository(self, model, revision) -> Repository | None:
            """The model, if the caller may have it; else None, and the answer has been sent."""
            repository = hub.models.get(model)
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if repository is None or (repository.token is not None and token != repository.token):
                self._fail(401, "RepoNotFound", "Repository not found")
            elif repository.gated and not token:
                self._fail(401, "GatedRepo", f"Access to model {model} is restricted")
            elif not repository.knows(revision):
                self._fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            else:
                return repository
            return None

        def _tell(self, model, what, revision):
            if (repository := self._repository(model, revision)) is None:
                return
            sizes = {name: len(data) for name, data in repository.files.items()}
            listed = [{"rfilename": name, "size": size} for name, size in sizes.items()]
            answer = {"id": model, "modelId": model, "sha": repository.commit, "siblings": listed}
            if what == "tree":
                answer = [
                    {"type": "file", "path": name, "size": size, "oid": _etag(repository.files[name])}
                    for name, size in sizes.items()
                ]
            self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

        def _send_file(self, model, revision, name):
            if (repository := self._repository(model, revision)) is None:
                return
            if (data := repository.files.get(name)) is None:
                self._fail(404, "EntryNotFound", "Entry not found")
                return
            headers = {
                "ETag": f'"{_etag(data)}"',
                "X-Repo-Commit": repository.commit,
                "Accept-Ranges": "bytes",
            }
            if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
                first = int(match[1])
                headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
                self._send(206, data[first:], headers)
            elif self.command == "GET" and name in repository.break_off:
                repository.break_off.remove(name)
                self._send(200, data, headers, sent=len(data) // 2)
                self.close_connection = True
            else:
                self._send(200, data, headers)

        def _fail(self, status, code, message):
            headers = {"X-Error-Code": code, "X-Error-Message": message} if code else {}
            self._send(status, json.dumps({"error": message}).encode(), headers)

        def _send(self, status, body, headers, sent=None):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                with contextlib.suppress(ConnectionError):  # the caller has gone
                    self.wfile.write(body[:sent])
                    self.wfile.flush()

    return Handler


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def main() -> None:
    model, directory = sys.argv[1:]
    root = Path(directory)
    files = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with FakeHub({model: Repository(files)}) as hub:
        print(hub.url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
