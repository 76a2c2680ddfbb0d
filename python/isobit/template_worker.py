"""The program of a worker process that renders chat templates (isobit.bounded_templates starts it).

A template is a program from the internet. No check of its text can bound its work: a single filter may take
minutes or gigabytes inside C code. So it runs in a separate process, which the kernel ends at its limits. The
Jinja environment here is the one that templates are written for: Hugging Face transformers 5 defines it, and
every rendering equals that of its apply_chat_template. This module imports only Jinja and the standard
library.
"""

import datetime
import functools
import json
import pickle
import resource
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils

CPU_SECONDS = 0.5  # for one rendering; then SIGPROF ends the process
MEMORY_BYTES = 320 << 20  # of the process, the interpreter's own data included
MAX_CHARACTERS = 16 << 20  # of a rendered text
OUT_OF_MEMORY = 77  # the exit status
_MAX_ERROR = 2000  # characters

# The variable that passes the spans of a rendering to the extension. No template uses this name.
_SPANS = "_isobit_spans"


class Refused(Exception):
    """A template that cannot be rendered; the text says why."""


class _Spans:
    """Finds the assistant's own text in a rendering: what the template wrote between {% generation %}
    tags."""

    def __init__(self):
        self.pieces: list[str] = []  # the rendering so far
        self.length = 0  # the number of characters in all pieces
        self.found: list[tuple[int, int]] = []  # for each span: its first character, and one past its last

    def add(self, piece: str) -> None:
        self.pieces.append(piece)
        self.length += len(piece)
        if self.length > MAX_CHARACTERS:
            raise Refused(f"the chat template writes more than {MAX_CHARACTERS} characters")


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}, which does not change the text."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_note", [jinja2.nodes.ContextReference()])
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _note(self, context, caller):
        text = caller()
        if (spans := context.get(_SPANS)) is not None:
            spans.found.append((spans.length, spans.length + len(text)))
        return text


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Unlike Jinja's own filter, escapes neither HTML nor characters beyond ASCII."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Dict:
    """The global `dict` of templates, without the attributes of the class."""

    def __call__(self, *args, **kwargs):
        return dict(*args, **kwargs)

    def fromkeys(self, *args, **kwargs):
        return dict.fromkeys(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """The global `namespace` of templates, without names that begin with an underscore."""

    def __init__(*args, **kwargs):  # so that a namespace may have the name `self`
        self, *args = args
        values = dict(*args, **kwargs)
        for name in values:
            _Namespace._check(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name, value):
        _Namespace._check(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)

    @staticmethod
    def _check(name) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"namespace: {name!r} begins with an underscore")


@functools.lru_cache(maxsize=64)
def _compile(text: str) -> jinja2.Template:
    # Templates are written for both block options.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment.from_string(text)


def render(template: str, variables: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """Returns the text, and the spans of characters between its {% generation %} tags.

    Raises:
      Refused: the template is not valid, or fails.
      MemoryError: it needs more memory than it may have.
    """
    spans = _Spans()
    try:
        for piece in _compile(template).generate({**variables, _SPANS: spans}):
            spans.add(piece)
        return "".join(spans.pieces), spans.found
    except (Refused, MemoryError):
        raise
    except jinja2.TemplateSyntaxError as error:
        raise Refused(f"the chat template is not valid Jinja, line {error.lineno}: {error}") from error
    except jinja2.TemplateError as error:
        raise Refused(f"the chat template refuses the messages: {error}") from error
    except Exception as error:  # a template is a program, and may fail in any way
        raise Refused(f"the chat template fails on the messages: {type(error).__name__}: {error}") from error


def read_frame(stream: BinaryIO) -> bytes | None:
    """Returns what write_frame wrote, or None at the end of the stream."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    size = int.from_bytes(head)
    body = stream.read(size)
    return body if len(body) == size else None


def write_frame(stream: BinaryIO, *parts: bytes) -> None:
    """Writes `parts` as one message."""
    stream.write(sum(map(len, parts)).to_bytes(8))
    for part in parts:
        stream.write(part)
    stream.flush()


def _answer(request: bytes) -> tuple[bytes, bytes]:
    """Returns the head of an answer, a line of JSON, and the text that follows it."""
    template, variables = pickle.loads(request)  # from the process that owns this one
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        text, spans = render(template, variables)
        head, body = {"spans": spans}, text.encode("utf-8", "surrogatepass")
    except Refused as error:
        head, body = {"refused": str(error)[:_MAX_ERROR]}, b""
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return json.dumps(head).encode() + b"\n", body


def _limit(what: int, value: int) -> None:
    hard = resource.getrlimit(what)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    _limit(resource.RLIMIT_DATA, MEMORY_BYTES)
    # For kernels that count fewer mappings as data. What is mapped already may be large, such as locale
    # files.
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, mapped + MEMORY_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    write_frame(answers)  # ready
    while (request := read_frame(requests)) is not None:
        try:
            answer = _answer(request)
        except MemoryError:  # the free memory may be too fragmented to continue
            sys.exit(OUT_OF_MEMORY)
        except Exception as error:  # the variables cannot be unpickled here
            answer = (json.dumps({"unread": f"{type(error).__name__}: {error}"[:_MAX_ERROR]}).encode(), b"\n")
        write_frame(answers, *answer)


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)
