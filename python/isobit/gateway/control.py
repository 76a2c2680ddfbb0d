"""Control calls that the dialects share: weights from directories, labels of versions, sleep by tags.

An update continues even if its client disconnects. If the client sends it again after a timeout, the second
call joins the first, or finds the update done.
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
_OTHER_UPDATE_S = 600.0  # how long to wait for another weight update
_POLL_S = 0.2
_LOG = logging.getLogger("isobit.gateway")
_OF_ENGINE: "weakref.WeakKeyDictionary[Engine, Control]" = weakref.WeakKeyDictionary()


def control_of(core: Core) -> "Control":
    """Returns the Control of the core's engine. Several cores of a process may share one engine."""
    if core.engine not in _OF_ENGINE:
        _OF_ENGINE[core.engine] = Control(core)
    return _OF_ENGINE[core.engine]


class Control:
    """Control calls for one engine. Use control_of to get it."""

    def __init__(self, core: Core):
        self.notes = Notes.of_environment()
        self._rollout = core.engine.rollout
        self._scorer = core.engine.scorer
        self._root = core.settings.model_root
        self._updates: dict[str, asyncio.Task[types_pb2.WeightVersion]] = {}

    async def version(self) -> types_pb2.WeightVersion:
        """The version of the weights in use."""
        return (await self._rollout.get_server_info()).server.weight_version

    async def label(self) -> str:
        return self.notes.read().label((await self.version()).id)

    def set_label(self, version: int, label: str) -> None:
        with self.notes.changing() as note:
            note.put_label(version, label)

    async def update_from_directory(
        self, given: str, *, field: str, in_flight: InFlightMode | None = None, label: str | None = None
    ) -> types_pb2.WeightVersion:
        """Switches the rollout, and then the scorer if there is one, to the weights in the directory `given`.
        If the same directory with the same files is in use already, returns at once.

        Args:
          given: an absolute path below --model_root, or a path relative to it.
          field: the field of the request that has the path, for errors.
          in_flight: what happens to running requests. None: as in SGLang, they finish first; while generation
            is paused they cannot, so their keys and values are recomputed.
          label: the name that clients give to these weights.
        """
        path = _below(self._root, given, field)
        task = self._updates.get(path)
        if task is None:
            task = asyncio.create_task(self._update(path, in_flight))
            self._updates[path] = task
            task.add_done_callback(lambda done: self._ended(path, done))
        if label is not None:  # a callback, since this call may end before the update does
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
            except AbortedError:  # another client updates, perhaps to these same weights
                if clock() > latest:
                    raise
                await asyncio.sleep(_POLL_S)
        await self._update_scorer(path, current)
        # If the files changed meanwhile, they are not the weights in use.
        is_same = bool(stamp) and stamp == await asyncio.to_thread(_stamp, self._root, path)
        with self.notes.changing() as note:
            note.served = Served(path, stamp, current.id, current.digest) if is_same else None
        return current

    async def _serving(self, path: str, stamp: str) -> types_pb2.WeightVersion | None:
        """Returns the version in use if its weights came from `path` with the files of `stamp`, otherwise
        None."""
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
                f"the rollout uses version {wanted.id}, but the scorer keeps its old weights: "
                f"{refused.message}",
                headers=refused.headers,
            ) from error

    async def has_directory(self) -> bool:
        """Whether the weights in use came from a directory, so that they can be read again."""
        present, served = await self.version(), self.notes.read().served
        return present.id <= 1 or (served is not None and served.id == present.id)

    async def sleep(self, tags: Iterable[str], mode: PauseMode, keep_weights: bool = False) -> None:
        """Frees the memory that `tags` name. The memory of the weights is freed only together with that of
        the KV cache.

        keep_weights: the client expects the same weights after waking up, without an update. So they stay in
        memory unless they can be read from a directory.
        """
        tags = set(tags) & TAGS
        if not tags:
            return
        gives_weights = WEIGHTS in tags and not (keep_weights and not await self.has_directory())
        await self._rollout.sleep("kv_cache_and_weights" if gives_weights else "kv_cache", mode)
        with self.notes.changing() as note:
            note.asleep |= tags

    async def resume(self) -> None:
        """Ends a pause. Does nothing while the rollout sleeps, since it continues when it wakes up."""
        if not (await self._rollout.get_load()).asleep:
            await self._rollout.continue_generation()

    async def wake_up(self, tags: Iterable[str] = ()) -> set[str]:
        """Marks what `tags` name (by default everything) as awake, and returns what is still asleep. The
        rollout wakes up once nothing is asleep; until then it accepts weight updates and computes nothing."""
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
    """Returns `given` relative to the services' --model_root. The services check that it does not lead out of
    it."""
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
    """Returns a text that changes when a file of the directory changes. Empty: the gateway cannot see the
    directory."""
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
