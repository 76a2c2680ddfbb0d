"""The old name of isobit.audit.state, which works until the next release."""

from isobit.audit.state import *  # noqa: F403
