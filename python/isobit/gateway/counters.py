"""The gateway's own metrics, in Prometheus's text format."""

from collections import Counter


class Counters:
    """Counts of one process since its start."""

    def __init__(self):
        self._requests: Counter[tuple[str, int]] = Counter()
        self._prompt_tokens = 0
        self._completion_tokens = 0

    def request(self, path: str, status: int) -> None:
        """Counts a request that has ended. Status 499: its client disconnected."""
        self._requests[path, status] += 1

    def tokens(self, prompt: int, completion: int) -> None:
        self._prompt_tokens += prompt
        self._completion_tokens += completion

    def page(self, connections: int, body_bytes: int) -> str:
        """Returns the metrics page, with the connections and body bytes held now."""
        lines = [
            "# HELP isobit_gateway_requests_total Requests that have ended; 499: the client disconnected.",
            "# TYPE isobit_gateway_requests_total counter",
        ]
        for (path, status), count in sorted(self._requests.items()):
            lines.append(f'isobit_gateway_requests_total{{path="{path}",status="{status}"}} {count}')
        for name, kind, value, text in (
            ("prompt_tokens_total", "counter", self._prompt_tokens, "Tokens of prompts."),
            ("completion_tokens_total", "counter", self._completion_tokens, "Tokens that samples got."),
            ("connections", "gauge", connections, "Connections that are open."),
            ("body_bytes", "gauge", body_bytes, "Bytes of request bodies held now."),
        ):
            full = f"isobit_gateway_{name}"
            lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full} {value}"]
        return "\n".join(lines) + "\n"
