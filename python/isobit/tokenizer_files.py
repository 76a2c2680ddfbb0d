"""Reads the tokenizer of a Hugging Face model directory: tokenizer.json and the files that add to it.

Special tokens and chat templates may be in several files. The order of precedence is that of transformers 5.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import tokenizers

from isobit.arguments import file_of_model

_STANDARD_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
DEFAULT_TEMPLATE = "default"

_Token = str | tokenizers.AddedToken


@dataclasses.dataclass(frozen=True)
class TokenizerFiles:
    """The tokenizer of one directory, ready for use."""

    tokenizer: tokenizers.Tokenizer  # with every special token, without truncation and padding
    special_tokens: dict[str, str]  # by name, such as eos_token
    chat_templates: dict[str, str]  # Jinja text by name; one without a name is DEFAULT_TEMPLATE

    @classmethod
    def read(cls, directory: Path) -> "TokenizerFiles":
        """Reads the files in `directory`.

        Raises:
          FileNotFoundError: the directory does not exist, or has no tokenizer.json.
          ValueError: a file is malformed; the message names it.
        """
        path = file_of_model(directory, "tokenizer.json")
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: the directory has no tokenizer")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no more specific class
            raise ValueError(f"{path}: {error}") from error
        config = _read_object(directory / "tokenizer_config.json")
        templates = _read_templates(directory, config.pop("chat_template", None))
        if "additional_special_tokens" in config:  # the name of extra_special_tokens before transformers 5
            config.setdefault("extra_special_tokens", config.pop("additional_special_tokens"))
        stated = config.get("added_tokens_decoder")
        if stated is None:
            config |= _read_object(directory / "special_tokens_map.json")
        named, extra = _special_tokens(config)
        if tokenizer.padding is not None:
            named.setdefault("pad_token", tokenizer.padding["pad_token"])
        # These settings are left over from a training run. A caller expects all ids of a text, and no
        # padding.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
        if stated is None:
            stated = _read_old_tokens(directory, {*map(str, named.values()), *map(str, extra)})
            stated |= tokenizer.get_added_tokens_decoder()
        else:
            stated = {int(token_id): _token(token) for token_id, token in stated.items()}
        _declare_tokens(tokenizer, stated, named, extra)
        return cls(tokenizer, {name: str(token) for name, token in named.items()}, templates)


def _read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in the file `path`; an empty one if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got a {type(value).__name__}")
    return value


def _read_templates(directory: Path, in_config: Any) -> dict[str, str]:
    """Returns the templates in .jinja files; if there are none, those in tokenizer_config.json."""
    files = {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    default = directory / "chat_template.jinja"
    if default.is_file():
        files.setdefault(DEFAULT_TEMPLATE, default)
    if files:
        return {name: path.read_text("utf-8") for name, path in files.items()}
    if in_config is None:
        return {}
    if isinstance(in_config, str):
        return {DEFAULT_TEMPLATE: in_config}
    if isinstance(in_config, dict):
        return in_config
    try:
        return {entry["name"]: entry["template"] for entry in in_config}
    except (TypeError, KeyError) as error:
        raise ValueError(
            f"{directory / 'tokenizer_config.json'}: chat_template is neither a string nor a list of name and"
            " template"
        ) from error


def _special_tokens(config: dict[str, Any]) -> tuple[dict[str, _Token], list[_Token]]:
    """Returns the special tokens with a name, such as eos_token, and those without."""
    extra = config.get("extra_special_tokens", config.get("additional_special_tokens")) or []
    named = {name: config[name] for name in _STANDARD_TOKENS if config.get(name) is not None}
    named |= {
        name: value
        for name, value in config.items()
        if name.endswith("_token")
        and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))
    }
    if isinstance(extra, dict):
        named |= extra
        extra = []
    return {name: _token(token) for name, token in named.items()}, [_token(token) for token in extra]


def _token(token: str | dict) -> _Token:
    """Returns a token from a file: either its text, or an object with its text as `content`."""
    if isinstance(token, str):
        return token
    return tokenizers.AddedToken(**{"special": True} | {k: v for k, v in token.items() if k != "__type"})


def _read_old_tokens(directory: Path, special: set[str]) -> dict[int, tokenizers.AddedToken]:
    """Returns the tokens of added_tokens.json, which is older than tokenizer_config.json's
    added_tokens_decoder."""
    tokens = _read_object(directory / "added_tokens.json")
    return {
        token_id: tokenizers.AddedToken(text, normalized=text not in special, special=text in special)
        for text, token_id in tokens.items()
    }


def _declare_tokens(
    tokenizer: tokenizers.Tokenizer,
    stated: dict[int, tokenizers.AddedToken],
    named: dict[str, _Token],
    extra: list[_Token],
) -> None:
    """Adds the tokens that tokenizer.json does not have. Tokens that it has get the properties in other
    files."""
    tokens = [token for _, token in sorted(stated.items())]
    contents = {token.content for token in (*tokenizer.get_added_tokens_decoder().values(), *tokens)}
    for token in (*named.values(), *extra):
        if str(token) not in contents:
            contents.add(str(token))
            tokens.append(tokenizers.AddedToken(token, special=True) if isinstance(token, str) else token)
    names = {str(token) for token in named.values()}
    for token in tokens:
        token.special = token.special or token.content in names
    tokenizer.add_tokens(tokens)
