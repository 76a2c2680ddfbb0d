"""What the engines that compute nothing answer: the same tokens and logprobs to every request.

Imports nothing, since vLLM's process reads it too.
"""

VOCABULARY = 458  # at least: of the tokenizer of isobit_tools.gateway_testing
CONTEXT = 2048
_FIRST_PAIR = 258  # tokens from here on are two letters of ASCII


def token_at(position: int) -> int:
    """The token at a position of the completion. Its text is whole characters."""
    return _FIRST_PAIR + position * 37 % 196


def logprob_at(position: int) -> float:
    """A float32 whose shortest decimal has as many digits as most have."""
    return -(1 + (position * 2654435761 & 0x7FFFFF) / (1 << 23)) / (1 << (position % 3))
