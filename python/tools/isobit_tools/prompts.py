"""The old name of isobit.prompts, which works until the next release."""

from isobit.prompts import *  # noqa: F403
