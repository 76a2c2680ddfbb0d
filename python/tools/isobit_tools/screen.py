"""The old name of isobit.screen, which works until the next release."""

from isobit.screen import *  # noqa: F403
