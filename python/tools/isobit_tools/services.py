"""The old name of isobit.launch, which works until the next release."""

from isobit.launch import *  # noqa: F403
