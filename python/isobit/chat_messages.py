"""Converts conversations for chat templates in the same way as transformers 5 does before it renders them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# The field names for a message's reasoning: the one that templates read, and those of other programs.
# gpt-oss's template reads `thinking`.
REASONING = ("reasoning_content", "thinking", "reasoning")


def template_messages(conversation: Any) -> Any:
    """Returns the messages of a conversation as dicts, without fields that are None, and with the reasoning
    under each name that a template may read. Anything that is not a conversation or not a message is returned
    unchanged."""
    messages = getattr(conversation, "messages", conversation)
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        return messages
    return [_template_message(message) for message in messages]


def plain(value: Any) -> Any:
    """Returns `value` as JSON types only: objects become dicts of their fields; anything else becomes the
    name of its type.

    A template reads dicts and texts. It gets no objects, since the sandbox does not know their methods.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # of a subclass of str, such as an enum's member
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, np.generic):
        return plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):  # a model of pydantic
        return plain(value.model_dump())
    return f"<{type(value).__name__}>"


def _template_message(given: Any) -> Any:
    message = plain(given)
    if not isinstance(message, dict):
        return given
    message = {name: value for name, value in message.items() if value is not None}
    reasoning = next((message[name] for name in REASONING if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning} | message | {"reasoning_content": reasoning}
