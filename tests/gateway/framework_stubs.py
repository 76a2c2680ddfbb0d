"""Modules that a framework's client imports and does not use: vLLM, which needs GPUs, and others."""

import importlib.abc
import importlib.machinery
import sys
import types
import typing


class _Absent(types.ModuleType):
    """A module whose every name is a class that takes anything."""

    __path__: typing.ClassVar[list[str]] = []

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        kind = type(name, (), {"__init__": lambda self, *a, **k: None})
        kind.__class_getitem__ = classmethod(lambda cls, key: cls)
        setattr(self, name, kind)
        return kind


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: tuple[str, ...]):
        self._names = names

    def find_spec(self, name, path=None, target=None):
        if any(name == own or name.startswith(f"{own}.") for own in self._names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Absent(spec.name)

    def exec_module(self, module) -> None:
        pass


def pretend(*names: str) -> None:
    """Makes `names`, and what is below them, importable and empty."""
    sys.meta_path.insert(0, _Finder(names))


def pretend_vllm(join, broadcast) -> None:
    """As vLLM 0.31 for TRL: join(init_info) opens the trainer's end of a group, broadcast(group, tensors)
    sends over it."""
    pretend("vllm")
    import vllm
    import vllm.distributed.weight_transfer.nccl_common as nccl
    import vllm.distributed.weight_transfer.packed_tensor as packed
    import vllm.utils.network_utils as network

    def producer(iterator, group, src, post_iter_func, **_):
        assert src == 0
        broadcast(group, (post_iter_func(item) for item in iterator))

    vllm.__version__ = "0.31.0"
    nccl.trainer_init = join
    packed.packed_nccl_broadcast_producer = producer
    network.get_ip = lambda: "127.0.0.1"
    network.get_open_port = lambda: 51217


def old_python() -> None:
    """SkyRL asks for Python 3.12, where pydantic takes typing's TypedDict; below, it takes this one."""
    if sys.version_info < (3, 12):
        import typing_extensions

        typing.TypedDict = typing_extensions.TypedDict
