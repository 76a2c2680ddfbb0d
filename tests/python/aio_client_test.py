"""Tests of the asyncio clients: those of the synchronous clients, run on them. asyncio_test.py has the rest.

python tests/python/aio_client_test.py        (in an environment where the package `isobit` is installed)
"""

import inspect
import unittest

import blocking_aio
import client_test
import connection_test

import isobit
from isobit import aio


class AioClientTest(client_test.ClientTest):
    clients = blocking_aio


class AioConnectionTest(connection_test.ConnectionTest):
    clients = blocking_aio


class InterfaceTest(unittest.TestCase):
    def test_methods_and_arguments_are_those_of_the_synchronous_clients(self):
        self.assertEqual(aio.__all__, [name for name in isobit.__all__ if name.endswith("Client")])
        for name in aio.__all__:
            self.assertEqual(interface(getattr(aio, name)), interface(getattr(isobit, name)))

    def test_what_differs_is_seen(self):
        class Other(aio.RolloutClient):
            async def get_load(self, timeout=1.0): ...

        self.assertNotEqual(interface(Other), interface(isobit.RolloutClient))


def interface(kind) -> dict[str, list]:
    """The public methods of a class, and of each the arguments with their kinds and defaults."""
    methods = inspect.getmembers(kind, inspect.isfunction)
    return {
        name: [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]
        for name, method in methods
        if not name.startswith("_") or name == "__init__"
    }


if __name__ == "__main__":
    unittest.main()
