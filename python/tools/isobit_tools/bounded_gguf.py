"""The old name of isobit.convert.bounded_gguf, which works until the next release."""

from isobit.convert.bounded_gguf import *  # noqa: F403
