"""Text to token ids and back, with a model directory's tokenizer; the services themselves know only ids.

Ids and chats equal those of Hugging Face transformers 5, whose AutoTokenizer reads the same files.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from isobit import chat_template
from isobit.chat_template import Message
from isobit.tokenizer_files import DEFAULT_TEMPLATE, TokenizerFiles

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # for bytes that are not a character
_LONGEST_RUN = 32  # bytes
_LONGEST_CHARACTER = 4  # in bytes, and so in tokens
_MOST_HELD = _LONGEST_RUN + _LONGEST_CHARACTER


class _Kinds(NamedTuple):
    """Ids that a stream of text treats differently."""

    bytes: frozenset[int]  # ids of single bytes, which are decoded together
    special: frozenset[int]

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer) -> "_Kinds":
        added = tokenizer.get_added_tokens_decoder().items()
        special = frozenset(token for token, what in added if what.special)
        if tokenizer.decoder is None or b"ByteFallback" not in tokenizer.decoder.__getstate__():
            return cls(frozenset(), special)
        ids = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return cls(frozenset(token for token in ids if token is not None), special)


class TextStream:
    """Turns streamed token ids into text. Bytes that are not yet a whole character are held back. The texts
    of add() and, at the end, finish() together are the text that decode() gives for all ids.

    A tokenizer with byte fallback decodes a run of bytes as characters only if the whole run is valid. So the
    run is held back until it ends or has 32 bytes. (For a longer run with an invalid byte, decode() gives no
    character at all.)

    Each token is decoded a bounded number of times, whatever comes: at most 36 tokens are held back.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, skip_special_tokens: bool, kinds: _Kinds | None = None
    ):
        """kinds: the kinds of the tokenizer's ids, if they are known, since finding them takes some time."""
        kinds = kinds or _Kinds.of(tokenizer)
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._skipped = kinds.special if skip_special_tokens else frozenset()
        self._bytes = kinds.bytes
        # The last ids whose text was returned: they can decide on the spaces of the next one.
        self._given: list[int] = []
        self._held: list[int] = []  # ids whose text is held back

    def add(self, token_ids: Iterable[int]) -> str:
        """Returns the text that `token_ids` complete; it may be empty."""
        return "".join(self._add(int(token)) for token in token_ids)

    def finish(self) -> str:
        """Returns the text that is still held back, with U+FFFD for bytes that are not a character. The next
        add() begins a new text."""
        text = self._text_of(self._held)
        self._given, self._held = [], []
        return text

    def _add(self, token: int) -> str:
        if token in self._skipped or self._tokenizer.id_to_token(token) is None:
            return ""  # decode() leaves it out
        self._held.append(token)
        if token in self._bytes and len(self._held) < _LONGEST_RUN:
            return ""
        text = self._text_of(self._held)
        if text and not text.endswith(_REPLACEMENT):
            return self._give(len(self._held), text)
        # There is no text, or the next byte may complete the last character.
        return "" if len(self._held) < _MOST_HELD else self._give_settled(text)

    def _give_settled(self, text: str) -> str:
        """Returns the beginning of `text` (the text of all held ids) that no later id can change."""
        last = len(self._held) - _LONGEST_CHARACTER
        for count in range(last, last - _LONGEST_CHARACTER, -1):
            begin = self._text_of(self._held[:count])
            if text.startswith(begin):  # no character crosses the boundary
                return self._give(count, begin)
        return self._give(len(self._held), text)

    def _give(self, count: int, text: str) -> str:
        self._given, self._held = self._held[:count], self._held[count:]
        return text

    def _text_of(self, held: list[int]) -> str:
        """Returns the text that `held` adds to the text before."""
        before, text = self._decode(self._given), self._decode(self._given + held)
        return text[len(before) :] if text.startswith(before) else self._decode(held)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)


class MaskedChat(NamedTuple):
    """The ids of a conversation, and a mask of the assistant's ids."""

    token_ids: np.ndarray  # int32 [tokens]
    assistant_mask: np.ndarray  # bool [tokens]


class Tokenizer:
    """The tokenizer of one Hugging Face model directory. Threads may share it."""

    def __init__(self, directory: str | Path):
        """Reads tokenizer.json and, if they exist, tokenizer_config.json, special_tokens_map.json,
        chat_template.jinja and additional_chat_templates/.

        Truncation and padding in tokenizer.json are not applied.

        Raises:
          FileNotFoundError: `directory` has no tokenizer.json.
          ValueError: a file is malformed; the message names it.
        """
        self._directory = Path(directory)
        files = TokenizerFiles.read(self._directory)
        self._tokenizer = files.tokenizer
        self._special_tokens = files.special_tokens
        self._templates = files.chat_templates

    @property
    def vocab_size(self) -> int:
        """The number of ids that have a token. The model's vocabulary may be padded to more."""
        return self._tokenizer.get_vocab_size()

    @property
    def library(self) -> tokenizers.Tokenizer:
        """The tokenizer of the library `tokenizers`. Do not change it."""
        return self._tokenizer

    def chat_template(self, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Returns the Jinja text that render_chat uses for a conversation with these tools.

        Raises:
          ValueError: the model has none.
        """
        return self._template(None, tools)

    def encode(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        """Returns the token ids of `text`, int32 [tokens]."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids, np.int32)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of `token_ids`."""
        return self._tokenizer.decode(
            [int(token) for token in token_ids], skip_special_tokens=skip_special_tokens
        )

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """Returns a decoder for ids that arrive a few at a time."""
        return TextStream(self._tokenizer, skip_special_tokens, self._kinds)

    @functools.cached_property
    def _kinds(self) -> _Kinds:
        return _Kinds.of(self._tokenizer)

    def render_chat(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str = False,
        **arguments,
    ) -> str:
        """Returns the prompt text of a conversation, rendered with the model's own chat template, up to the
        assistant's turn.

        Args:
          messages: the conversation, or the text of one user message.
          tools: JSON schemas of the functions that the model may call.
          documents: documents for retrieval, if the template uses them.
          template: the name of one of the model's templates, or Jinja text. None: the model's template for
            tool use if it has one and `tools` are given, otherwise the template without a name.
          add_generation_prompt: whether to open the assistant's turn; None: yes, unless
            continue_final_message is set.
          continue_final_message: True, or the name of a field: the text ends where `content` (or that field)
            of the last message ends, so that the model continues it.
          **arguments: variables of the template, such as enable_thinking.

        Raises:
          TypeError: messages, tools or documents are of a wrong type.
          ValueError: there is no such template, or it refuses the messages.
        """
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        return self._render(
            messages,
            tools=tools,
            documents=documents,
            template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=arguments,
        )[0]

    def encode_chat(self, messages: str | Sequence[Message], **options) -> np.ndarray:
        """Returns the token ids of render_chat, int32 [tokens]. The template itself writes the special
        tokens."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def encode_chat_with_mask(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        **arguments,
    ) -> MaskedChat:
        """Returns the token ids of a finished conversation, and a mask of the assistant's ids.

        The template marks the assistant's text with {% generation %} tags; without tags the mask is all
        False. The arguments are as for render_chat.
        """
        text, spans = self._render(
            messages,
            tools=tools,
            documents=documents,
            template=template,
            add_generation_prompt=False,
            continue_final_message=False,
            variables=arguments,
        )
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        mask = np.zeros(len(encoding.ids), bool)
        first, last = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        is_blank = first == last  # a space; some tokenizers keep only its end
        for start, end in spans:
            if start == end:
                continue
            mask |= np.where(is_blank, (start < first) & (first <= end), (first < end) & (start < last))
        return MaskedChat(np.array(encoding.ids, np.int32), mask)

    def _render(
        self, messages, *, template, tools, variables, **options
    ) -> tuple[str, list[tuple[int, int]]]:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return chat_template.render(
            self._template(template, tools),
            messages,
            tools=tools,
            variables=self._special_tokens | variables,
            **options,
        )

    def _template(self, wanted: str | None, tools) -> str:
        """Returns the Jinja text of the template called `wanted`, or `wanted` itself; None: as in
        render_chat."""
        if wanted is None:
            wanted = "tool_use" if tools is not None and "tool_use" in self._templates else DEFAULT_TEMPLATE
        if wanted in self._templates:
            return self._templates[wanted]
        if "{" in wanted:  # every Jinja text has a brace, and no name has one
            return wanted
        if not self._templates:
            raise ValueError(
                f"{self._directory} has no chat template: pass one, or encode plain text instead"
            )
        names = ", ".join(sorted(self._templates))
        raise ValueError(f"{self._directory} has no chat template called {wanted!r}; there are: {names}")
