"""Renders conversations by chat templates, in the Jinja environment that templates are written for.

Hugging Face transformers 5 defines that environment; every rendering equals that of its apply_chat_template.
"""

import copy
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

Message = Mapping[str, Any]  # `role` and `content`, and what else the template reads

# The variable that passes a rendering's spans to the extension; its name is one that no template uses.
_SPANS = "_isobit_spans"
# Appended to the text to continue, so that the rendering can be cut there. If the last space is missing
# from the rendering, the template strips the text.
_CUT_HERE = "ISOBIT_CUT_THE_RENDERING_HERE "


class _Spans:
    """Where in a rendering the assistant's own text lies: what stood between {% generation %} tags."""

    def __init__(self):
        self.pieces: list[str] = []  # of the rendering so far
        self.found: list[tuple[int, int]] = []  # first character, and one past the last


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}, which changes nothing in the text."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_note", [jinja2.nodes.ContextReference()])
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _note(self, context, caller):
        text = caller()
        if (spans := context.get(_SPANS)) is not None:
            start = sum(map(len, spans.pieces))
            spans.found.append((start, start + len(text)))
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


@functools.lru_cache(maxsize=64)
def _compile(text: str) -> jinja2.Template:
    # A sandbox, since templates come with downloaded models. They are written for both block options.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is no valid Jinja, line {error.lineno}: {error}") from error


def render(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping] | None,
    documents: Sequence[Mapping] | None,
    add_generation_prompt: bool,
    continue_final_message: bool | str,
    variables: Mapping[str, Any],
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and the spans of characters between its {% generation %} tags.

    Args:
      template: the Jinja text.
      messages: the conversation, at least one message.
      tools: JSON schemas of functions.
      documents: for retrieval.
      add_generation_prompt: whether to open the assistant's turn.
      continue_final_message: ends the text where the last message's `content` ends, or the field of that
        name, so that the model goes on from there.
      variables: further variables of the template, such as special tokens.

    Raises:
      TypeError: messages, tools or documents are of a wrong type.
      ValueError: the template is not valid or fails on the messages; options exclude each other.
    """
    messages = _checked_mappings("messages", messages)
    if not messages:
        raise ValueError("messages is empty, expected one message at least")
    arguments = {
        **variables,
        "tools": None if tools is None else _checked_mappings("tools", tools),
        "documents": None if documents is None else _checked_mappings("documents", documents),
        "add_generation_prompt": add_generation_prompt,
    }
    if not continue_final_message:
        return _run(template, messages, arguments)
    if add_generation_prompt:
        raise ValueError("continue_final_message and add_generation_prompt exclude each other")
    field = continue_final_message if isinstance(continue_final_message, str) else "content"
    return _continued(template, messages, arguments, field), []


def _checked_mappings(name: str, items: Sequence[Mapping]) -> list[Mapping]:
    if isinstance(items, str | Mapping) or not isinstance(items, Sequence):
        raise TypeError(f"{name} is of type {type(items).__name__}, expected a list of dicts")
    for index, item in enumerate(items):
        if name == "tools" and callable(item):
            raise TypeError(f"{name}[{index}] is a function: give its JSON schema, as a dict")
        if not isinstance(item, Mapping):
            raise TypeError(f"{name}[{index}] is of type {type(item).__name__}, expected a dict")
    return list(items)


def _run(template: str, messages: list[Message], arguments: dict) -> tuple[str, list[tuple[int, int]]]:
    compiled, spans = _compile(template), _Spans()
    try:
        for piece in compiled.generate(messages=messages, **arguments, **{_SPANS: spans}):
            spans.pieces.append(piece)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template refuses the messages: {error}") from error
    except Exception as error:  # the template is a program: it may add a number to a text
        raise ValueError(
            f"the chat template fails on the messages: {type(error).__name__}: {error}"
        ) from error
    return "".join(spans.pieces), spans.found


def _continued(template: str, messages: list[Message], arguments: dict, field: str) -> str:
    if (final := messages[-1].get(field)) is None:
        raise ValueError(f"continue_final_message: the last message has no {field!r} to continue")
    if field not in template:
        raise ValueError(f"continue_final_message: the chat template does not use {field!r}")
    marked = copy.deepcopy(messages[-1])
    if isinstance(final, list | tuple):
        block = next((block for block in reversed(marked[field]) if "text" in block), None)
        if block is None:
            raise ValueError("continue_final_message: the last message has no text to continue")
        final = block["text"]
        block["text"] += _CUT_HERE
    elif isinstance(final, str):
        marked[field] += _CUT_HERE
    else:
        raise TypeError(f"continue_final_message: {field} is of type {type(final).__name__}, expected a text")
    text, _ = _run(template, [*messages[:-1], marked], arguments)
    cut = text.rfind(_CUT_HERE.strip())
    if cut < 0 or final.strip() not in text:
        raise ValueError(
            "continue_final_message: the chat template changes the last message or leaves it out"
        )
    before = text[:cut]
    return before if text.startswith(_CUT_HERE, cut) else before.rstrip()
