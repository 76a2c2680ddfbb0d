"""Models by hub id: downloads the files of a repository that isobit reads into huggingface_hub's cache.

Cache, tokens, mirrors and offline mode work as in huggingface_hub: HF_HOME, HF_TOKEN or `hf auth login`,
HF_ENDPOINT, HF_HUB_OFFLINE. No code of a repository is run, and of its weights only safetensors are
downloaded.
"""

import contextlib
import fnmatch
import inspect
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

# Called with the number of bytes downloaded so far and the number of all bytes, from the threads that
# download.
Progress = Callable[[int, int], None]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# The other files besides the weights that the services, the tokenizer and the chat templates read.
_WANTED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", re.ASCII)
_DOWNLOADS_AT_ONCE = 8
_MAX_LISTED = 3


class HubError(OSError):
    """A model cannot be downloaded; the message says which, why, and what would help."""

    status = 3  # the exit status of commands: it cannot run here


class NotAModelError(HubError):
    """The argument is neither a model directory nor the id of a model."""

    status = 2  # bad usage


def resolve(model: str, revision: str | None = None, progress: Progress | None = None) -> Path:
    """Returns the directory of a model: `model` itself if it is a directory, otherwise the downloaded
    snapshot of the model with that id on the hub.

    If the hub cannot be reached, or HF_HUB_OFFLINE is set, a complete snapshot in the cache is used. Services
    take the result as `--model_root=PARENT --model=NAME`. Do not resolve links further: the snapshot's files
    are links into the cache's blobs.

    Args:
      model: a directory, or an id such as Qwen/Qwen3-0.6B.
      revision: a branch, a tag or a commit; None: the hub's `main`.
      progress: called with the bytes so far and all bytes, from the threads that download.

    Raises:
      HubError: the user cannot see such a model, it has no safetensors, it is an adapter, or it is neither
        cached nor can it be downloaded.
      NotAModelError: `model` is neither a directory nor an id, or it is a directory and `revision` is given.
    """
    if (path := _directory(model, revision)) is not None:
        return path
    snapshot = config_directory(model, revision)
    commit = snapshot.name
    with _told(model, revision):
        names = _listed(model, commit)
        if names is None:
            return _complete(snapshot, model)
        files = _files_of(model, commit, names)
        _download(model, commit, {name: names[name] for name in files}, progress)
    return _complete(snapshot, model)


def config_directory(model: str, revision: str | None = None) -> Path:
    """Like resolve(), but of a model on the hub only config.json is downloaded.

    Raises as resolve(), except that weights are not checked.
    """
    if (path := _directory(model, revision)) is not None:
        return path
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    with _told(model, revision):
        try:
            return Path(hf_hub_download(model, "config.json", revision=revision)).parent
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError as error:
            _refuse_adapter(model, _listed(model, revision) or {})
            raise HubError(
                f"{model} has no config.json on the hub: isobit needs models in transformers' format"
            ) from error


def is_id(model: str) -> bool:
    """Whether `model` can be the id of a model on the hub, such as Qwen/Qwen3-0.6B."""
    return bool(_ID.fullmatch(model)) and "--" not in model and ".." not in model


@contextlib.contextmanager
def terminal_bar(label: str) -> Iterator[Progress | None]:
    """Yields a progress callback that draws a bar with sizes and rate on stderr; None if stderr is not a
    terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as drawn:
        task = drawn.add_task(label, total=None)
        yield lambda done, total: drawn.update(task, completed=done, total=total)


def _directory(model: str, revision: str | None) -> Path | None:
    """Returns `model` as a directory; None if it is an id.

    Raises:
      NotAModelError: it is neither, or a directory with a revision.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        if revision is not None:
            raise NotAModelError(
                f"revision is {revision!r}, but {model} is a directory, which has no revisions"
            )
        return path
    if path.is_file() or not is_id(model):
        what = "a file" if path.is_file() else "neither a directory nor the id of a model on the hub"
        raise NotAModelError(
            f"expected a model directory or an id such as Qwen/Qwen3-0.6B, got {model}, {what}"
        )
    return None


def _listed(model: str, revision: str | None) -> dict[str, int] | None:
    """Returns the repository's files and their sizes (0: unknown); None if the hub cannot be reached."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        info = huggingface_hub.HfApi().model_info(model, revision=revision, files_metadata=True)
    except HfHubHTTPError as error:
        if _status(error) < 500:
            raise
        return None
    except OfflineModeIsEnabled:
        return None
    except Exception as error:
        if not _is_of_the_network(error):
            raise
        return None
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}


def _files_of(model: str, commit: str, names: dict[str, int]) -> list[str]:
    """Returns the files that isobit reads. Downloads the index of the weights if there is one."""
    _refuse_adapter(model, names)
    files = [name for name in names if any(fnmatch.fnmatchcase(name, wanted) for wanted in _WANTED)]
    if SINGLE_FILE in names:  # then no index is needed
        return [*files, SINGLE_FILE]
    if INDEX_FILE not in names:
        others = [name for name in names if name.endswith((".bin", ".gguf", ".pt", ".pth", ".safetensors"))]
        shown = f"; it has {_short(others)}" if others else ""
        raise HubError(f"{model} has no safetensors under transformers' file names{shown}")
    from huggingface_hub import hf_hub_download

    shards = _shards(Path(hf_hub_download(model, INDEX_FILE, revision=commit)))
    if missing := [shard for shard in shards if shard not in names]:
        raise HubError(f"{model}: {INDEX_FILE} names {_short(missing)}, which the repository does not have")
    return [*files, INDEX_FILE, *shards]


def _shards(index: Path) -> list[str]:
    """Returns the files that an index names. Each must be a plain file name."""
    try:
        shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HubError(f"{index} is not an index of safetensors: {error!r}") from error
    for shard in shards:
        if (
            not isinstance(shard, str)
            or PurePosixPath(shard).name != shard
            or not shard.endswith(".safetensors")
        ):
            raise HubError(f"{index}: expected names of safetensors files, got {shard!r}")
    return shards


def _refuse_adapter(model: str, names: Sequence[str] | dict[str, int]) -> None:
    if found := [name for name in _ADAPTER if name in names]:
        raise HubError(
            f"{model} is an adapter ({found[0]}), which isobit does not apply: expected weights into"
            " which it is merged"
        )


def _complete(snapshot: Path, model: str) -> Path:
    """Returns `snapshot` if the cache has all files that services read.

    Raises:
      HubError: a file is missing.
    """
    have = {str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()}
    _refuse_adapter(model, sorted(have))
    missing = [] if SINGLE_FILE in have else [INDEX_FILE if INDEX_FILE in have else SINGLE_FILE]
    if INDEX_FILE in have and SINGLE_FILE not in have:
        missing = [shard for shard in _shards(snapshot / INDEX_FILE) if shard not in have]
    if missing:
        raise HubError(f"{model} cannot be downloaded now, and the cache lacks {_short(missing)}: {snapshot}")
    return snapshot


def _download(model: str, commit: str, sizes: dict[str, int], progress: Progress | None) -> None:
    """Downloads these files into the cache. After the first error, the downloads that are running finish, and
    the error is raised."""
    from huggingface_hub import hf_hub_download

    # hf_hub_download of older releases takes no bar from its caller: there a file counts once it is complete.
    follows = "tqdm_class" in inspect.signature(hf_hub_download).parameters
    counter = _Counter(sizes, progress)

    def one(name: str) -> None:
        options = {"tqdm_class": counter.bar_of(name)} if follows and progress is not None else {}
        hf_hub_download(model, name, revision=commit, **options)
        counter.finish(name)

    with ThreadPoolExecutor(_DOWNLOADS_AT_ONCE) as pool:
        runs = [pool.submit(one, name) for name in sizes]
        try:
            for run in runs:
                run.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class _Counter:
    """Adds up the bytes that several threads download, for one callback."""

    def __init__(self, sizes: dict[str, int], progress: Progress | None):
        self._sizes = sizes
        self._done = dict.fromkeys(sizes, 0)
        self._progress = progress
        self._lock = threading.Lock()
        self._tell()

    def finish(self, name: str) -> None:
        self._set(name, self._sizes[name])

    def bar_of(self, name: str) -> type:
        """Returns the class that hf_hub_download uses in place of tqdm. It makes one object for each try of a
        file."""
        counter = self

        from tqdm import tqdm

        class Bar(tqdm):
            def __init__(self, *args: Any, **options: Any):
                options.pop("name", None)
                super().__init__(*args, **{**options, "disable": True})
                self._count = options.get("initial") or 0

            def update(self, n: float | None = 1) -> None:
                self._count += n or 0
                counter._set(name, int(self._count))

        return Bar

    def _set(self, name: str, done: int) -> None:
        with self._lock:
            self._done[name] = min(done, self._sizes[name]) if self._sizes[name] else done
            self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(sum(self._done.values()), sum(self._sizes.values()))


@contextlib.contextmanager
def _told(model: str, revision: str | None) -> Iterator[None]:
    """Turns huggingface_hub's errors into HubErrors."""
    from huggingface_hub import errors

    try:
        yield
    except HubError:
        raise
    except errors.GatedRepoError as error:
        raise HubError(
            f"{model} is gated: accept its terms on the hub, and log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{model} is not a directory here, and the hub has no such model, or one that needs a token"
            " (`hf auth login`, HF_TOKEN)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{model} has no revision {revision} on the hub") from error
    except errors.LocalEntryNotFoundError as error:
        raise HubError(_not_cached(model, revision)) from error
    except errors.HfHubHTTPError as error:
        if _status(error) == 401:
            raise HubError(
                f"{model}: the hub does not accept the token; see `hf auth login`, HF_TOKEN"
            ) from error
        raise HubError(f"{model}: the hub answered {_status(error)}: {_first_line(error)}") from error
    except Exception as error:
        if not _is_of_the_network(error) and not isinstance(error, (OSError, errors.HFValidationError)):
            raise
        raise HubError(f"{model}: {_first_line(error)}") from error


def _not_cached(model: str, revision: str | None) -> str:
    from huggingface_hub import constants

    what = model if revision is None else f"revision {revision} of {model}"
    if constants.HF_HUB_OFFLINE:
        return (
            f"{what} is not in the cache, {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids to download it"
        )
    return f"{what} is not in the cache, {constants.HF_HUB_CACHE}, and {constants.ENDPOINT} cannot be reached"


def _is_of_the_network(error: BaseException) -> bool:
    """Whether an error is one of httpx or requests (which of the two depends on huggingface_hub's release).
    Their errors have no class in common."""
    return type(error).__module__.partition(".")[0] in ("httpx", "httpcore", "requests", "urllib3")


def _status(error: Any) -> int:
    response = getattr(error, "response", None)
    return 0 if response is None else response.status_code


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _short(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
