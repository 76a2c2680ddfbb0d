"""Tool calls in a model's text, in Hermes' form, which Qwen and many others write:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

The chat template shows which form a model writes. Other forms are refused by name.
"""

import dataclasses
import secrets
from typing import Any

import msgspec

from isobit.gateway.errors import BadRequest, not_offered

PARSERS = ("auto", "hermes", "none")
_BEGIN, _END = "<tool_call>", "</tool_call>"
# Texts by which a template shows another form, in the order of the search.
_OTHER_FORMS = (
    ("<function=", "qwen3_coder (<function=NAME>)"),
    ("<arg_key>", "glm (<arg_key>)"),
    ("[TOOL_CALLS]", "mistral ([TOOL_CALLS])"),
    ("<|python_tag|>", "llama3_json (<|python_tag|>)"),
    ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "deepseek (tool calls begin)"),
    ("<|channel|>", "harmony (<|channel|>)"),
    ("<|tool_call|>", "granite or phi4 (<|tool_call|>)"),
    ("<minimax:tool_call>", "minimax"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
)


class _Written(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """One call of a function."""

    name: str
    arguments: str  # JSON, as the model wrote it
    id: str = dataclasses.field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def message(self) -> dict[str, Any]:
        """The call in the form of OpenAI's message."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


def check_parser(setting: str, template: str) -> None:
    """Checks that calls of a model with this chat template can be read.

    Args:
      setting: the value of --tool_call_parser.

    Raises:
      BadRequest: they cannot.
    """
    if setting == "hermes":
        return
    if setting == "none":
        raise not_offered("tools", "the gateway runs with --tool_call_parser none")
    for mark, name in _OTHER_FORMS:
        if mark in template:
            raise not_offered("tools", f"the model writes calls in the form {name}; isobit reads only hermes")
    if _BEGIN not in template:
        raise not_offered(
            "tools", "the model's chat template shows no form of calls; isobit reads only hermes"
        )


def wants_calls(tools: list[dict[str, Any]] | None, choice: Any) -> bool:
    """Whether to read calls from the answer.

    Raises:
      BadRequest: the choice is one that isobit cannot force, or is "auto" without tools.
    """
    if choice not in (None, "none", "auto"):
        what = choice if isinstance(choice, str) else "a named function"
        raise not_offered("tool_choice", f"{what!r} would need constrained decoding; expected auto or none")
    if not tools:
        if choice == "auto":
            raise BadRequest("tool_choice is 'auto', expected tools, too", "tool_choice")
        return False
    return choice != "none"


class ToolCallReader:
    """Separates calls from other text, as the text comes."""

    def __init__(self):
        self._held = ""
        self._in_call = False
        self.count = 0

    def add(self, text: str) -> tuple[str, list[ToolCall]]:
        """Returns the text outside calls, and the calls that are now complete. A call that is not JSON stays
        text."""
        self._held += text
        plain, calls = [], []
        while True:
            if self._in_call:
                body, end, rest = self._held.partition(_END)
                if not end:
                    return "".join(plain), calls
                self._in_call, self._held = False, rest
                call = _parsed(body)
                if call is None:
                    plain.append(_BEGIN + body + _END)
                else:
                    calls.append(call)
                    self.count += 1
                continue
            before, begin, rest = self._held.partition(_BEGIN)
            if begin:
                plain.append(self._between(before))
                self._in_call, self._held = True, rest
                continue
            keep = _possible_begin(self._held)
            ready = self._held[: len(self._held) - keep]
            self._held = self._held[len(self._held) - keep :]
            plain.append(self._between(ready))
            return "".join(plain), calls

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Returns what is still held back, when no more comes."""
        held, self._held = self._held, ""
        if not self._in_call:
            return self._between(held), []
        self._in_call = False
        if (call := _parsed(held)) is None:
            return _BEGIN + held, []
        self.count += 1
        return "", [call]

    def _between(self, text: str) -> str:
        """Text outside calls. Line breaks after a call count as part of the call."""
        return "" if self.count and not text.strip() else text


def _parsed(body: str) -> ToolCall | None:
    try:
        written = msgspec.json.decode(body, type=_Written)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None
    arguments = bytes(written.arguments).strip()
    if arguments.startswith(b'"'):  # the JSON is in a string
        return ToolCall(written.name, msgspec.json.decode(arguments))
    return ToolCall(written.name, arguments.decode())


def _possible_begin(text: str) -> int:
    """How many of the last characters may begin a call."""
    for length in range(min(len(_BEGIN) - 1, len(text)), 0, -1):
        if _BEGIN.startswith(text[-length:]):
            return length
    return 0
