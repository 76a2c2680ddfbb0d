"""Conversations as chat templates get them: what transformers 5 makes of messages before it renders them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# The names of a message's reasoning: the one that templates read, and those of other programs. A template of
# gpt-oss reads `thinking`.
REASONING = ("reasoning_content", "thinking", "reasoning")


def template_messages(conversation: Any) -> Any:
    """The messages of a conversation: objects as dicts, without fields that are None, and the reasoning under
    each name that a template may read. What is no conversation or no message stays as it is."""
    messages = getattr(conversation, "messages", conversation)
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        return messages
    return [_template_message(message) for message in messages]


def plain(value: Any) -> Any:
    """`value` of JSON's types alone: objects as dicts of their fields, what is left as the name of its type.

    A template reads dicts and texts. It gets no object whose methods a sandbox does not know.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # of a class of its own, such as an enum's member
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
