"""The exit status of the command `isobit`; isobit.cli says what each means."""

FINE, DIFFERENT, BAD_USAGE, CANNOT_RUN = range(4)
