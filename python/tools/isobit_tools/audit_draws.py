"""The old name of isobit.audit.draws, which works until the next release."""

from isobit.audit.draws import *  # noqa: F403
