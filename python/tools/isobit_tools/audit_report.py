"""The old name of isobit.audit.report, which works until the next release."""

from isobit.audit.report import *  # noqa: F403
