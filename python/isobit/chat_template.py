"""Renders conversations by chat templates, as apply_chat_template of Hugging Face transformers 5 does.

This module implements the options; the template itself runs in another process (isobit.bounded_templates).
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from isobit import bounded_templates
from isobit.chat_messages import REASONING, plain, template_messages

# `role` and `content`, and whatever else the template reads; or an object with such fields: a dataclass, a
# pydantic model.
Message = Mapping[str, Any]

# Appended to the text that is to be continued, so that the rendering can be cut there. If the last space is
# missing from the rendering, the template strips the text.
_CUT_HERE = "ISOBIT_CUT_THE_RENDERING_HERE "


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
    """Returns the text of a conversation, and the spans of characters between its {% generation %} tags.

    Args:
      template: the Jinja text.
      messages: the conversation, at least one message.
      tools: JSON schemas of functions.
      documents: documents for retrieval.
      add_generation_prompt: whether to open the assistant's turn.
      continue_final_message: True, or the name of a field: the text ends where `content` (or that field) of
        the last message ends, so that the model continues it.
      variables: further variables of the template, such as special tokens.

    Raises:
      TypeError: messages, tools or documents are of a wrong type.
      ValueError: the template is not valid, fails on the messages, or exceeds a limit of bounded_templates;
        or two options exclude each other.
    """
    messages = _checked_mappings("messages", template_messages(messages))
    if not messages:
        raise ValueError("messages is empty, expected at least one message")
    arguments = {
        **plain(variables),
        "tools": None if tools is None else plain(_checked_mappings("tools", tools)),
        "documents": None if documents is None else plain(_checked_mappings("documents", documents)),
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
    return bounded_templates.render(template, {"messages": messages, **arguments})


def _continued(template: str, messages: list[Message], arguments: dict, field: str) -> str:
    if (final := messages[-1].get(field)) is None:
        raise ValueError(f"continue_final_message: the last message has no {field!r} to continue")
    # The reasoning is there under several names; the template reads one of them.
    fields = (
        [name for name in REASONING if messages[-1].get(name) == final] if field in REASONING else [field]
    )
    if not any(name in template for name in fields):
        raise ValueError(f"continue_final_message: the chat template does not use {field!r}")
    marked = copy.deepcopy(messages[-1])
    if isinstance(final, list | tuple):
        block = next((block for block in reversed(marked[field]) if "text" in block), None)
        if block is None:
            raise ValueError("continue_final_message: the last message has no text to continue")
        final = block["text"]
        block["text"] += _CUT_HERE
    elif isinstance(final, str):
        marked |= dict.fromkeys(fields, final + _CUT_HERE)
    else:
        raise TypeError(
            f"continue_final_message: {field} is of type {type(final).__name__}, expected a string"
        )
    text, _ = _run(template, [*messages[:-1], marked], arguments)
    cut = text.rfind(_CUT_HERE.strip())
    if cut < 0 or final.strip() not in text:
        raise ValueError(
            "continue_final_message: the chat template changes the last message or leaves it out"
        )
    before = text[:cut]
    return before if text.startswith(_CUT_HERE, cut) else before.rstrip()
