"""The old name of isobit.audit.records, which works until the next release."""

from isobit.audit.records import *  # noqa: F403
