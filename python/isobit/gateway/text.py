"""The text of tokens: what a single token stands for, and where a stop string appears in a sample's text.

A token stands for bytes. A single one may not be a whole character: then its text has U+FFFD, while its bytes
are exact.
"""

import codecs
import functools
from collections.abc import Sequence

from tokenizers import decoders

from isobit.tokenizer import TextStream, Tokenizer


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """The byte for each character of a byte-level vocabulary. Bytes that are printable characters stand for
    themselves; the others have the characters from 256 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenTexts:
    """The text and bytes of single tokens (each is looked up only once), and decoders for streams of
    tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        library = tokenizer.library
        decoder = b"" if library.decoder is None else library.decoder.__getstate__()
        self.is_byte_level = type(library.decoder) is decoders.ByteLevel
        self._byte_fallback = b"ByteFallback" in decoder
        self._metaspace = "\u2581" in decoder.decode("utf-8", "replace")
        added = library.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._special = frozenset(token for token, what in added.items() if what.special)
        self.bytes_of = functools.lru_cache(maxsize=1 << 18)(self._bytes_of)
        self.text_of = functools.lru_cache(maxsize=1 << 18)(self._text_of)

    def stream(self, skip_special_tokens: bool) -> "ByteStream | TextStream":
        """Returns a decoder whose texts together equal the tokenizer's decode() of all ids."""
        if self.is_byte_level:
            return ByteStream(self, self._special if skip_special_tokens else frozenset())
        return self._tokenizer.stream(skip_special_tokens)

    def _bytes_of(self, token: int) -> bytes:
        piece = self._tokenizer.library.id_to_token(token)
        if piece is None:  # the model's vocabulary may be padded
            return b""
        if self.is_byte_level:
            table = _byte_of_character()
            if all(character in table for character in piece):
                return bytes(table[character] for character in piece)
            return piece.encode()
        if token in self._added:
            return piece.encode()
        if self._byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return (piece.replace("\u2581", " ") if self._metaspace else piece).encode()

    def _text_of(self, token: int) -> str:
        return self.bytes_of(token).decode("utf-8", "replace")


class ByteStream:
    """A TextStream for a byte-level tokenizer, whose tokens are bytes and nothing else."""

    def __init__(self, texts: TokenTexts, skipped: frozenset[int]):
        self._bytes_of = texts.bytes_of
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_ids: Sequence[int]) -> str:
        """Returns the text that `token_ids` complete."""
        found = (self._bytes_of(token) for token in token_ids if token not in self._skipped)
        return self._decoder.decode(b"".join(found))

    def finish(self) -> str:
        """Returns bytes that are not yet a whole character, as U+FFFD."""
        return self._decoder.decode(b"", final=True)


class Stops:
    """Finds the first of several stop strings in a text that comes in pieces. Holds back characters that may
    begin one."""

    def __init__(self, stops: Sequence[str], include: bool):
        self._stops = stops
        self._include = include
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def add(self, piece: str) -> tuple[str, str | None]:
        """Returns the text that can be passed on, and the stop string that ends it, if any."""
        if not self._stops:
            return piece, None
        text = self._held + piece
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda hit: hit[0])
            self._held = ""
            return text[: at + len(stop) if self._include else at], stop
        keep = self._possible_begin(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def finish(self) -> str:
        """Returns the text that was held back, when no more comes."""
        held, self._held = self._held, ""
        return held

    def _possible_begin(self, text: str) -> int:
        """How many of the last characters may begin a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class SampleText:
    """The text of one sample as its tokens come. A token that ends the sample adds no text, unless
    `include_stop`."""

    def __init__(
        self,
        texts: TokenTexts,
        *,
        ends: frozenset[int],
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ):
        self._stream = texts.stream(skip_special_tokens)
        self._stops = Stops(stop, include_stop)
        self._ends = frozenset() if include_stop else ends
        self._min_tokens = min_tokens  # before this many tokens, no stop string ends the sample
        self._count = 0

    def add(self, token_ids: Sequence[int]) -> tuple[str, int, str | None]:
        """Returns the text that can be passed on; how many of `token_ids` the sample has taken; and the stop
        string that ended it there, if any."""
        texts = []
        for taken, token in enumerate(token_ids, 1):
            self._count += 1
            if token in self._ends:
                continue
            piece = self._stream.add((token,))
            if self._count < self._min_tokens:
                texts.append(piece)
                continue
            text, stop = self._stops.add(piece)
            texts.append(text)
            if stop is not None:
                return "".join(texts), taken, stop
        return "".join(texts), len(token_ids), None

    def finish(self) -> tuple[str, str | None]:
        """Returns the text that was held back, and the stop string that its last characters complete, if
        any."""
        text, stop = self._stops.add(self._stream.finish())
        return (text, stop) if stop is not None else (text + self._stops.finish(), None)
