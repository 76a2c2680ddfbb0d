"""A hub of one model on loopback, for HF_ENDPOINT: as much of the protocol as a download needs."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = hashlib.sha1(b"the only commit").hexdigest()


@contextmanager
def serve(model_id: str, directory: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub that has `directory` as `model_id`, and the paths that it was asked for."""
    files = {path.name: path for path in directory.iterdir() if path.is_file()}
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, with_body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            asked.append(path)
            if path in (f"/api/models/{model_id}", f"/api/models/{model_id}/revision/main",
                        f"/api/models/{model_id}/revision/{COMMIT}"):  # fmt: skip
                siblings = [{"rfilename": name} for name in files]
                about = {
                    "id": model_id,
                    "modelId": model_id,
                    "sha": COMMIT,
                    "private": False,
                    "siblings": siblings,
                }
                return self.send(json.dumps(about).encode(), "application/json", with_body)
            if path.startswith(f"/api/models/{model_id}/tree/"):
                tree = [
                    {"type": "file", "path": name, "size": file.stat().st_size, "oid": etag(file)}
                    for name, file in files.items()
                ]
                return self.send(json.dumps(tree).encode(), "application/json", with_body)
            for revision in ("main", COMMIT):
                prefix = f"/{model_id}/resolve/{revision}/"
                if path.startswith(prefix) and (name := path.removeprefix(prefix)) in files:
                    return self.send(
                        files[name].read_bytes(), "application/octet-stream", with_body, etag(files[name])
                    )
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if f"/{model_id}/" in path else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def send(self, body: bytes, kind: str, with_body: bool, tag: str | None = None) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            if tag is not None:
                self.send_header("ETag", f'"{tag}"')
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def do_GET(self):
            self.answer(with_body=True)

        def do_HEAD(self):
            self.answer(with_body=False)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def etag(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
