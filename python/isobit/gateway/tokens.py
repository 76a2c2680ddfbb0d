"""vLLM's paths /tokenize and /detokenize."""

from typing import Any

import msgspec
from starlette.routing import Route

from isobit.gateway.chat import ChatRequest
from isobit.gateway.core import Core, token_ids
from isobit.gateway.errors import BadRequest
from isobit.gateway.fields import checked
from isobit.gateway.http import Answer, Call
from isobit.gateway.prompts import chat_prompt, encoded
from isobit.gateway.status import ANYBODY


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: Any = None


def routes(core: Core) -> list[Route]:
    async def tokenize(call: Call) -> Answer:
        # Clients send the body of a chat; its sampling fields change nothing here.
        request = checked(call.object(), TokenizeRequest, harmless=ChatRequest.__struct_fields__)
        core.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise BadRequest("prompt and messages: expected one of them", "prompt")
        if request.add_special_tokens is None:  # a template writes them itself
            request.add_special_tokens = request.prompt is not None
        if request.prompt is not None:
            ids = await encoded(core, request.prompt, request.add_special_tokens)
        else:
            ids = await chat_prompt(core, request)
        facts = await core.facts()
        names = [core.texts.text_of(token) for token in ids] if request.return_token_strs else None
        return Answer({
            "count": len(ids), "max_model_len": facts.context_length, "tokens": ids, "token_strs": names,
        })  # fmt: skip

    async def detokenize(call: Call) -> Answer:
        request = checked(call.object(), DetokenizeRequest)
        core.check_model(request.model)
        ids = token_ids(request.tokens, "tokens")
        if ids and not 0 <= min(ids) <= max(ids) < 2**32:
            raise BadRequest("tokens: expected token ids", "tokens")
        return Answer({"prompt": core.tokenizer.decode(ids, skip_special_tokens=False)})

    return [
        core.route("/tokenize", tokenize, ("POST",), roles=ANYBODY),
        core.route("/detokenize", detokenize, ("POST",), roles=ANYBODY),
    ]
