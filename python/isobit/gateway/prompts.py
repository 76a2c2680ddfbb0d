"""Makes prompts of texts, token ids and conversations."""

import asyncio
from typing import Any, Protocol

import msgspec

from isobit.chat_template import Message
from isobit.gateway.core import Core, token_ids
from isobit.gateway.errors import BadRequest
from isobit.gateway.fields import json_of

_MAX_PROMPTS = 8192
_SHORT = 2048  # characters; longer texts are encoded in a thread


async def prompts_of(core: Core, value: Any, add_special_tokens: bool) -> list[list[int]]:
    """Returns the prompts of a completion. `value`: one text, one list of ids, or a list of either."""
    if isinstance(value, str):
        return [await encoded(core, value, add_special_tokens)]
    if not isinstance(value, list) or not value:
        raise BadRequest("prompt: expected a string, token ids, or a list of either", "prompt")
    if isinstance(value[0], int):
        return [token_ids(value, "prompt")]
    if len(value) > _MAX_PROMPTS:
        raise BadRequest(f"prompt has {len(value)} prompts, expected at most {_MAX_PROMPTS}", "prompt")
    found = []
    for index, item in enumerate(value):
        if isinstance(item, str):
            found.append(await encoded(core, item, add_special_tokens))
        else:
            found.append(token_ids(item, f"prompt[{index}]"))
    return found


async def encoded(core: Core, text: str, add_special_tokens: bool) -> list[int]:
    if len(text) <= _SHORT:
        return core.tokenizer.encode(text, add_special_tokens).tolist()
    return (await asyncio.to_thread(core.tokenizer.encode, text, add_special_tokens)).tolist()


class Conversation(Protocol):
    """The fields of a request that describe a conversation."""

    messages: list[dict[str, Any]] | None
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool
    add_special_tokens: bool


async def chat_prompt(core: Core, request: Conversation) -> list[int]:
    """Returns the token ids of a conversation, rendered with the model's chat template.

    Raises:
      BadRequest: it is not a conversation, or the template refuses it.
    """
    conversation = [_message(message, index) for index, message in enumerate(request.messages or ())]
    variables = request.chat_template_kwargs or {}
    for name in variables:
        if name in ("messages", "tools", "documents", "template", "add_generation_prompt"):
            raise BadRequest(
                f"chat_template_kwargs.{name}: expected {name} as a field of the request itself", name
            )

    def encode() -> list[int]:
        text = core.tokenizer.render_chat(
            conversation,
            tools=request.tools or None,
            documents=request.documents or None,
            template=request.chat_template or core.settings.chat_template,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            **variables,
        )
        return core.tokenizer.encode(text, request.add_special_tokens).tolist()

    try:
        return await asyncio.to_thread(encode)
    except (ValueError, TypeError) as error:
        raise BadRequest(f"messages: {error}", "messages") from None
    except RecursionError:
        raise BadRequest("messages are nested too deeply", "messages") from None


def _message(message: dict[str, Any], index: int) -> Message:
    """Returns a message as templates expect it: the parts of the content as one text, the arguments of tool
    calls as objects."""
    place = f"messages[{index}]"
    if not isinstance(message.get("role"), str):
        raise BadRequest(f"{place}.role: expected a string", f"{place}.role")
    found = dict(message)
    if isinstance(content := message.get("content"), list):
        found["content"] = "\n".join(
            _text_of(part, f"{place}.content[{i}]") for i, part in enumerate(content)
        )
    elif not isinstance(content, str | None):
        raise BadRequest(f"{place}.content: expected a string or a list of parts", f"{place}.content")
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return found


def _text_of(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise BadRequest(f"{place}.type is {str(kind)[:64]!r}: the models take only text", f"{place}.type")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise BadRequest(f"{place}.text: expected a string", f"{place}.text")
    return text


def _call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise BadRequest(f"{place}.function: expected an object", f"{place}.function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json_of(arguments.encode()) if arguments.strip() else {}
        except (BadRequest, UnicodeError):
            raise BadRequest(f"{place}.function.arguments: expected JSON", f"{place}.function") from None
    return {**call, "function": {**function, "arguments": arguments}}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's `stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # OpenAI's padding of events, which changes no token
