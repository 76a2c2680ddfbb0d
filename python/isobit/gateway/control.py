"""What the engines' dialects share of control: weights from directories, labels of versions, sleep by tags.

An update goes on when its client has gone: one that is sent again, after a timeout, then finds it done or
joins it.
"""

import asyncio
import hashlib
import logging
import os
import weakref
from collections.abc import Iterable
from pathlib import Path

from isobit.calls import InFlightMode, PauseMode
from isobit.errors import AbortedError, IsobitError
from isobit.gateway.core import Core
from isobit.gateway.engine import Engine
from isobit.gateway.errors import BadRequest, HttpError, as_http
from isobit.gateway.notes import Notes, Served
from isobit.v1 import types_pb2

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = frozenset((WEIGHTS, KV_CACHE))
_OTHER_UPDATE_S = 600.0  # how long another weight update is waited for
_POLL_S = 0.2
_LOG = logging.getLogger("isobit.gateway")
_OF_ENGINE: "weakref.WeakKeyDictionary[Engine, Control]" = weakref.WeakKeyDictionary()


def control_of(core: Core) -> "Control":
    """The one of the core's engine, which several cores of a process may share."""
    if core.engine not in _OF_ENGINE:
        _OF_ENGINE[core.engine] = Control(core)
    return _OF_ENGINE[core.engine]


class Control:
    """Use control_of."""

    def __init__(self, core: Core):
        self.notes = Notes.of_environment()
        self._rollout = core.engine.rollout
        self._scorer = core.engine.scorer
        self._root = core.settings.model_root
        self._updates: dict[str, asyncio.Task[types_pb2.WeightVersion]] = {}

    async def version(self) -> types_pb2.WeightVersion:
        """Of the weights that serve now."""
        return (await self._rollout.get_server_info()).server.weight_version

    async def label(self) -> str:
        return self.notes.read().label((await self.version()).id)

    def set_label(self, version: int, label: str) -> None:
        with self.notes.changing() as note:
            note.put_label(version, label)

    async def update_from_directory(
        self, given: str, *, field: str, in_flight: InFlightMode | None = None, label: str | None = None
    ) -> types_pb2.WeightVersion:
        """Switches the rollout, then the scorer if there is one, to the weights in the directory `given`.
        The same directory with the same files again is a success at once.

        Args:
          given: absolute, below --model_root, or relative to it.
          field: the request's, for errors.
          in_flight: None: as SGLang, running requests end first; paused ones cannot, and are computed anew.
          label: what clients call these weights from now on.
        """
        path = _below(self._root, given, field)
        task = self._updates.get(path)
        if task is None:
            task = asyncio.create_task(self._update(path, in_flight))
            self._updates[path] = task
            task.add_done_callback(lambda done: self._ended(path, done))
        if label is not None:  # even if this call does not wait for the end
            task.add_done_callback(lambda done: self._label_result(done, label))
        return await asyncio.shield(task)

    def _label_result(self, task: asyncio.Task[types_pb2.WeightVersion], label: str) -> None:
        if not task.cancelled() and task.exception() is None:
            self.set_label(task.result().id, label)

    def _ended(self, path: str, task: asyncio.Task) -> None:
        del self._updates[path]
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.warning("no update from %s: %s", path, as_http(error).message)

    async def _update(self, path: str, in_flight: InFlightMode | None) -> types_pb2.WeightVersion:
        stamp = await asyncio.to_thread(_stamp, self._root, path)
        if in_flight is None:
            in_flight = "recompute_kv" if (await self._rollout.get_load()).paused else "wait"
        clock = asyncio.get_running_loop().time
        latest = clock() + _OTHER_UPDATE_S
        while True:
            if stamp and (present := await self._serving(path, stamp)) is not None:
                return present
            try:
                current = (await self._rollout.update_weights(path, in_flight=in_flight)).current
                break
            except AbortedError:  # of another client; it may be this very one
                if clock() > latest:
                    raise
                await asyncio.sleep(_POLL_S)
        await self._update_scorer(path, current)
        # Files that changed meanwhile are not those that serve.
        is_same = bool(stamp) and stamp == await asyncio.to_thread(_stamp, self._root, path)
        with self.notes.changing() as note:
            note.served = Served(path, stamp, current.id, current.digest) if is_same else None
        return current

    async def _serving(self, path: str, stamp: str) -> types_pb2.WeightVersion | None:
        """The version that serves if its weights came from `path` with the files of `stamp`."""
        served = self.notes.read().served
        if served is None or (served.path, served.stamp) != (path, stamp):
            return None
        present = await self.version()
        return present if (present.id, present.digest) == (served.id, served.digest) else None

    async def _update_scorer(self, path: str, wanted: types_pb2.WeightVersion) -> None:
        if self._scorer is None:
            return
        try:
            present = (await self._scorer.get_server_info()).server.weight_version
            if present.digest == wanted.digest:
                return
            await self._scorer.update_weights(
                path,
                weight_version=wanted.id if wanted.id > present.id else None,
                expected_digest=wanted.digest,
            )
        except IsobitError as error:
            refused = as_http(error)
            raise HttpError(
                refused.status,
                f"the rollout serves version {wanted.id}, but the scorer keeps its old weights: "
                f"{refused.message}",
                headers=refused.headers,
            ) from error

    async def has_directory(self) -> bool:
        """Whether the weights that serve can be read again: they came from a directory."""
        present, served = await self.version(), self.notes.read().served
        return present.id <= 1 or (served is not None and served.id == present.id)

    async def sleep(self, tags: Iterable[str], mode: PauseMode, keep_weights: bool = False) -> None:
        """Gives back the memory that `tags` name. That of the weights has that of the KV cache with it.

        keep_weights: they are to be there again without an update, so they stay if no directory has them.
        """
        tags = set(tags) & TAGS
        if not tags:
            return
        gives_weights = WEIGHTS in tags and not (keep_weights and not await self.has_directory())
        await self._rollout.sleep("kv_cache_and_weights" if gives_weights else "kv_cache", mode)
        with self.notes.changing() as note:
            note.asleep |= tags

    async def resume(self) -> None:
        """Undoes a pause. While the rollout sleeps there is nothing to do: it goes on when it wakes up."""
        if not (await self._rollout.get_load()).asleep:
            await self._rollout.continue_generation()

    async def wake_up(self, tags: Iterable[str] = ()) -> set[str]:
        """Takes back what `tags` name, or all; returns what still sleeps. The rollout wakes up when nothing
        does: until then it takes weight updates, and computes nothing."""
        if not (await self._rollout.get_load()).asleep:
            left: set[str] = set()
        else:
            asleep = self.notes.read().asleep or TAGS
            left = set(asleep) - set(tags or TAGS)
            if not left:
                await self._rollout.wake_up()
        with self.notes.changing() as note:
            note.asleep = set(left)
        return left


def _below(root: Path | None, given: str, field: str) -> str:
    """`given` relative to the services' --model_root. The services check that it does not lead out."""
    if not given or "\0" in given:
        raise BadRequest(f"{field}: expected the path of a directory", field)
    path = os.path.normpath(given)
    if not os.path.isabs(path):
        return path
    if root is None:
        raise BadRequest(
            f"{field} is {given}: the gateway was started without --model_root, so it takes no absolute path",
            field,
        )
    for top, inner in ((os.path.realpath(root), os.path.realpath(path)), (os.path.abspath(root), path)):
        if os.path.commonpath((top, inner)) == top:
            return os.path.relpath(inner, top)
    raise BadRequest(f"{field} is {given}, expected a directory below --model_root, {root}", field)


def _stamp(root: Path | None, path: str) -> str:
    """What changes when a file of the directory does. Empty: the gateway cannot see it."""
    if root is None:
        return ""
    found = hashlib.sha256()
    try:
        for name in sorted(os.listdir(root / path)):
            info = os.stat(root / path / name)
            found.update(repr((name, info.st_ino, info.st_size, info.st_mtime_ns)).encode())
    except OSError:
        return ""
    return found.hexdigest()
