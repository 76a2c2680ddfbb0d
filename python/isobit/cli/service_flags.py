"""The flags that a command passes on to services. They are read from the services' own --help, so that the
list is always current.

A flag goes to every service that has it. With a service's name before it, such as --scorer_max_context, it
goes only to that service.
"""

import functools
import importlib.util
import re
import subprocess
import sys
from collections.abc import Collection, Mapping

from isobit import binaries
from isobit.cli.spelling import WrongFlagError

GATEWAY = "gateway"

# "  --max_context (default 0)" of the binaries, "  --scorer HOST:PORT  text" of the gateway.
_OF_BINARY = re.compile(r"^  --(\w+) \(default (.*)\)$", re.M)
_OF_GATEWAY = re.compile(r"^  (?:-\w, )?--(\w+)(?: ([A-Z_\[{]\S*))?", re.M)
# Flags that the command itself gives to the services, or that no service takes.
_TAKEN = {"help", "host", "model", "model_root", "port", "port_file", "version"}

Flags = Mapping[str, bool]  # by name: whether the flag is a switch, which takes no value


def command_of(service: str) -> list[str]:
    """Returns the command that starts `service`: "gateway", or the name of a binary without "isobit-"."""
    if service == GATEWAY:
        return [sys.executable, "-m", "isobit.gateway"]
    return [str(binaries.path(f"isobit-{service}"))]


@functools.cache
def flags_of(service: str) -> Flags:
    """Returns the flags of `service`.

    Raises:
      BinaryNotFoundError, OSError: the service cannot be asked.
    """
    if service == GATEWAY and importlib.util.find_spec("isobit.gateway") is None:
        return {}
    command = [*command_of(service), "--help"]
    text = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout
    if service == GATEWAY:
        return {name: not value for name, value in _OF_GATEWAY.findall(text)}
    return {name: default in ("true", "false") for name, default in _OF_BINARY.findall(text)}


class ServiceFlags:
    """The flags of several services together."""

    def __init__(self, *services: str, taken: Collection[str] = (), only: Mapping[str, str] | None = None):
        """`taken`: flags that the command itself gives to its services, so that a user cannot. `only`: flags
        that go to one service although others have them, too, unless they have a service's name before
        them."""
        self.services = services
        self._taken = {*_TAKEN, *taken}
        self._only = only or {}

    @functools.cached_property
    def _owners(self) -> dict[str, list[tuple[str, str, bool]]]:
        """For each spelling that a user may write: the services, their flag, and whether it is a switch."""
        owners: dict[str, list[tuple[str, str, bool]]] = {}
        for service in self.services:
            for name, switch in flags_of(service).items():
                spellings = [name, f"no{name}"] if switch and service != GATEWAY else [name]
                for flag in spellings:
                    if name in self._taken:
                        continue
                    if self._only.get(name, service) == service:
                        owners.setdefault(flag, []).append((service, flag, switch))
                    owners.setdefault(f"{service}_{flag}", []).append((service, flag, switch))
        return owners

    def names(self) -> Collection[str]:
        return self._owners.keys()

    def split(self, words: list[str], own: Collection[str]) -> tuple[list[str], dict[str, list[str]]]:
        """Returns the words that are not flags of services, and those that are, by service.

        Args:
          own: flags of the command, which it keeps.

        Raises:
          WrongFlagError: a flag has no value.
        """
        end = words.index("--") if "--" in words else len(words)
        kept: list[str] = []
        passed: dict[str, list[str]] = {service: [] for service in self.services}
        rest = iter(words[:end])
        for word in rest:
            name, equals, value = word[2:].partition("=")
            if not word.startswith("--") or name in own:
                kept.append(word)
                continue
            owners = self._owners[name]
            if not equals and not owners[0][2]:
                value = next(rest, "")
                if not value or value.startswith("--"):
                    raise WrongFlagError(f"{word}: expected a value")
            for service, flag, switch in owners:
                passed[service].append(f"--{flag}" if switch and not equals else f"--{flag}={value}")
        return kept + words[end:], passed
