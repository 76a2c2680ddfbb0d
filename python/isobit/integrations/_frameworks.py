"""What the integrations share: the import of a framework, and sampling options under the names of other
engines."""

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def require(module: str, install: str) -> ModuleType:
    """Imports and returns a module.

    Raises:
      ImportError: it cannot be imported; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module} cannot be imported ({error}): pip install '{install}' (docs/integrations.md)"
        ) from error


def known_options(options: Mapping[str, Any], names: Mapping[str, str], ignored: Mapping[str, Any]) -> dict:
    """Returns `options` under isobit's names.

    Args:
      names: isobit's name of each option that isobit has.
      ignored: options that change no token as long as they have the given value; `...` means any value.

    Raises:
      ValueError: another option, which could change tokens or text.
    """
    found = {}
    for name, value in options.items():
        if name in names:
            found[names[name]] = value
        elif value is not None and (name not in ignored or ignored[name] not in (..., value)):
            expected = f" other than {ignored[name]!r}" if name in ignored else ""
            raise ValueError(f"sampling option {name}={value!r}: isobit has none{expected}")
    return found
