"""Request bodies: from JSON to checked fields, with errors that name the field.

A field that isobit does not know is an error, and so is one that asks for something isobit does not have.
Fields that change no token, which many clients send by default, are accepted: HARMLESS.
"""

import difflib
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import msgspec

from isobit.gateway.errors import BadRequest, field_of, not_offered

_Struct = TypeVar("_Struct", bound=msgspec.Struct)

# These fields change no token, whatever their value.
HARMLESS = frozenset((
    "cache_salt", "clear_cache", "detokenize", "extra_key", "flush_cache", "is_checkpoint_format",
    "metadata", "output_kind", "prompt_cache_key", "prompt_cache_retention", "routed_experts_prompt_start",
    "safety_identifier", "service_tier", "session_id", "spaces_between_special_tokens", "store",
    "stream_interval", "torch_empty_cache", "user",
))  # fmt: skip

# These fields ask for nothing if they have one of these values; any other value is refused.
ONLY = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "priority": (0,),
    "structured_outputs": (),
    "response_format": ({"type": "text"},),
    "bad_words": ([],),
    "stop_regex": ([], ""),
    "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (),
    "guided_decoding_backend": (), "guided_whitespace_pattern": (), "structural_tag": (),
    "json_schema": (), "regex": (), "ebnf": (),
    "logits_processors": ([],), "custom_logit_processor": (), "custom_params": ({},),
    "allowed_token_ids": (), "logprob_token_ids": (), "token_ids_logprob": (),
    "trace_decode_token_ids": (),
    "thinking_token_budget": (), "repetition_detection": (), "watermarking": (False,), "beam_width": (1,),
    "vllm_xargs": ({},), "kv_transfer_params": (), "ec_transfer_params": (), "prompt_embeds": (),
    "features": (), "content_parts": (), "mm_processor_kwargs": ({},), "media_io_kwargs": ({},),
    "lora_path": (), "lora_request": (),
    "image_data": ([],), "video_data": ([],), "audio_data": ([],), "input_embeds": (),
    "return_hidden_states": (False,), "return_routed_experts": (False,), "return_sampling_mask": (False,),
    "return_indexer_topk": (False,), "return_top_p_token_ids": (False,),
    "suffix": ("",), "truncate_prompt_tokens": (), "min_length": (0,), "reasoning_effort": (),
    "functions": ([],), "function_call": ("none",), "modalities": (["text"],), "audio": (),
    "prediction": (), "web_search_options": (), "no_repeat_ngram_size": (0,),
}  # fmt: skip


def json_of(body: bytes) -> Any:
    """Returns the value that `body` encodes.

    Raises:
      BadRequest: `body` is not JSON.
    """
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise BadRequest("the request's JSON is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise BadRequest(f"the request is not JSON: {error}") from None


def object_of(body: bytes) -> dict[str, Any]:
    """Returns the JSON object in `body`; for an empty body, an empty object. Fields that are null are left
    out."""
    value = json_of(body) if body.strip() else {}
    return without_nulls(value, "the request")


def without_nulls(value: Any, what: str) -> dict[str, Any]:
    """Returns `value`, which must be an object, without fields that are null."""
    if not isinstance(value, dict):
        raise BadRequest(f"{what}: expected a JSON object, got {type(value).__name__}")
    return {name: item for name, item in value.items() if item is not None}


def checked(
    fields: Mapping[str, Any],
    kind: type[_Struct],
    at: str = "",
    harmless: Collection[str] = (),
) -> _Struct:
    """Returns `fields` as a `kind`, whose field names and types say what is allowed.

    Args:
      at: the place of the object in the request, such as "sampling_params.", for errors.
      harmless: further names that are accepted, whatever their value.

    Raises:
      BadRequest: a field is unknown, not offered, or of a wrong type.
    """
    known = kind.__struct_encode_fields__
    kept = {name: value for name, value in fields.items() if name in known}
    if len(kept) != len(fields):
        for name, value in fields.items():
            if name not in kept and name not in HARMLESS and name not in harmless and value is not None:
                _check_other(name, value, at, known)
    try:
        return msgspec.convert(kept, kind)
    except msgspec.ValidationError as error:
        raise field_of(error, at) from None
    except RecursionError:
        raise BadRequest("the request's JSON is nested too deeply") from None


def _check_other(name: str, value: Any, at: str, known: tuple[str, ...]) -> None:
    if name in ONLY:
        is_bool = isinstance(value, bool)  # checked, since a bool equals 0 or 1
        if not any(value == allowed and isinstance(allowed, bool) == is_bool for allowed in ONLY[name]):
            raise not_offered(f"{at}{name}")
        return
    near = difflib.get_close_matches(name[:64], known, 1, 0.75)
    raise BadRequest(
        f"{at}{name[:64]}: isobit knows no such field" + (f"; did you mean {near[0]}?" if near else ""),
        f"{at}{name[:64]}",
    )
