"""Text to token ids and back, from a model directory; the services themselves know ids alone."""

import json
from collections.abc import Iterable
from pathlib import Path

import jinja2
import jinja2.sandbox
import numpy as np
import tokenizers
from tokenizers.decoders import DecodeStream

Message = dict[str, str]  # of `role` and `content`


def _raise_template_error(message: str):
    raise jinja2.TemplateError(message)


class TextStream:
    """Turns streamed token ids into text, holding back what is not yet a whole character."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)

    def add(self, token_ids: Iterable[int]) -> str:
        """The text that `token_ids` complete, possibly empty."""
        pieces = (self._stream.step(self._tokenizer, int(token)) for token in token_ids)
        return "".join(piece for piece in pieces if piece)


class Tokenizer:
    """The tokenizer of one Hugging Face model directory."""

    def __init__(self, directory: str | Path):
        """Reads tokenizer.json and, if there, tokenizer_config.json.

        Raises:
          FileNotFoundError: `directory` has no tokenizer.json.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: the directory has no tokenizer")
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        config_path = directory / "tokenizer_config.json"
        self._config = json.loads(config_path.read_text("utf-8")) if config_path.is_file() else {}

    @property
    def vocab_size(self) -> int:
        """Ids that have a token; the model's own vocabulary may be larger, by padding."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        """Token ids of `text`, int32 [tokens]."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids, np.int32)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`."""
        return self._tokenizer.decode(
            [int(token) for token in token_ids], skip_special_tokens=skip_special_tokens
        )

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """A decoder for ids that arrive bit by bit."""
        return TextStream(self._tokenizer, skip_special_tokens)

    def render_chat(self, messages: str | list[Message]) -> str:
        """The prompt text of a conversation by the model's own template, up to the assistant's turn.

        Args:
          messages: the conversation, or the text of one user message.

        Raises:
          ValueError: tokenizer_config.json has no chat template, or the template refuses the messages.
        """
        template = self._config.get("chat_template")
        if not isinstance(template, str):
            raise ValueError("tokenizer_config.json has no chat_template: encode plain text instead")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        # A sandbox, as templates come with downloaded models; they are written for these two options.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_template_error
        try:
            return environment.from_string(template).render(
                messages=messages, add_generation_prompt=True, **self._special_tokens()
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error

    def encode_chat(self, messages: str | list[Message]) -> np.ndarray:
        """Token ids of render_chat, int32 [tokens]. The template writes its special tokens itself."""
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def _special_tokens(self) -> dict[str, str]:
        tokens = {name: self._config.get(name) for name in ("bos_token", "eos_token", "pad_token")}
        # Older files hold each token as an object with its text under `content`.
        return {
            name: token["content"] if isinstance(token, dict) else token
            for name, token in tokens.items()
            if token is not None
        }
