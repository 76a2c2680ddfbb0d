"""Will a model run on this machine? The answer comes from its config.json, nvidia-smi and the host's memory.

Nothing is loaded; of a model on the hub, only config.json is downloaded. Any config gets an answer, even if
only "no" and the reason. isobit.cli.doctor prints it.
"""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isobit import binaries, hub, machine, models

YES, NO, NOTE = "yes", "no", "note"

_GIB = 1 << 30
_GB = 1e9
# The rollout's defaults: docs/operations.md, Memory.
_GPU_MEMORY_FRACTION = 0.9
_GPU_LATER_BYTES = 2 * _GIB
_CPU_KV_BYTES = _GIB
_CHECK_TIMEOUT_S = 10.0
_NUMERICS_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Verdict:
    """One line of the report: YES (it works), NO (it does not), or NOTE (does not decide)."""

    name: str
    verdict: str
    text: str


@dataclass
class Report:
    """All verdicts, and, for scripts, the numbers behind them."""

    model: str
    config: str | None = None  # the file
    family: str | None = None
    architecture: str | None = None
    context: int | None = None
    dtype: str | None = None
    parameters: int | None = None
    embedding_bytes: int | None = None  # on each GPU; on a CPU once, since its ranks share it
    weight_bytes: list[int] | None = None  # by rank, without the embedding
    kv_bytes_per_token: list[int] | None = None
    tp_size: int = 1
    gpus: list[dict[str, Any]] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    numerics: dict[str, Any] | None = None  # the answer of isobit-numerics

    @property
    def runs(self) -> bool:
        """Whether no verdict is NO."""
        return all(verdict.verdict != NO for verdict in self.verdicts)

    def say(self, name: str, verdict: str, text: str) -> None:
        self.verdicts.append(Verdict(name, verdict, text))


def examine(
    model: str,
    revision: str | None = None,
    tp_size: int = 1,
    ignored_fields: Sequence[str] = (),
) -> Report:
    """Returns the verdicts about `model`: a directory, a config.json, or the id of a model on the hub.

    Raises:
      hub.NotAModelError: `model` is none of the three, or it is a path and `revision` is given.
      ValueError: tp_size is not 1, 2, 4 or 8.
    """
    if tp_size not in models.TP_SIZES:
        raise ValueError(f"tp_size is {tp_size}, expected 1, 2, 4 or 8")
    report = Report(model, tp_size=tp_size)
    config = _read(model, revision, report)
    if config is not None:
        _judge_model(config, report, ignored_fields)
        _judge_context(config, report)
        _judge_dtype(config, report)
    found = judge_gpus(report)
    _judge_memory(report, [gpu for gpu in found if gpu.is_hopper])
    return report


def _read(model: str, revision: str | None, report: Report) -> dict[str, Any] | None:
    """Returns the config. None: there is none, and the report says why."""
    path = Path(model).expanduser()
    try:
        if path.is_file():
            if revision is not None:
                raise hub.NotAModelError(
                    f"revision is {revision!r}, but {model} is a file, which has no revisions"
                )
            file = path
        else:
            file = hub.config_directory(model, revision) / "config.json"
        report.config = str(file)
        return models.read_config(file)
    except hub.NotAModelError:
        raise
    except (hub.HubError, models.ConfigError) as error:
        report.say("model", NO, str(error))
        return None


def _judge_model(config: dict[str, Any], report: Report, ignored_fields: Sequence[str]) -> None:
    report.architecture = models.architecture_of(config)
    row = models.family_of(config)
    report.family = row.family if row else None
    if reason := _refusal(config, row):
        report.say("model", NO, reason)
        return
    try:
        shape = models.shape_of(config)
    except models.ConfigError as error:
        report.say("model", NO, f"config.json: {error}")
        return
    assert row is not None  # otherwise _refusal has returned a reason
    text = f"{row.family} ({report.architecture}), {_count(shape.parameters)} parameters"
    if models.quantisation_of(config) is not None:  # the verdict on dtype explains that
        report.say("model", NOTE, f"{text}; it would run if its weights were not quantised")
        return
    checked = _check(report, ignored_fields)
    if checked:
        report.say("model", NO, checked)
        return
    report.parameters = shape.parameters
    report.embedding_bytes = shape.embedding_bytes
    report.weight_bytes = shape.weight_bytes(report.tp_size)
    report.kv_bytes_per_token = shape.kv_bytes(report.tp_size)
    if checked is None:
        report.say(
            "model",
            NOTE,
            f"{text}; isobit-model is not installed, so not every field of config.json was checked",
        )
    else:
        report.say("model", YES, text)


def _refusal(config: dict[str, Any], row: models.Family | None) -> str | None:
    """Returns why a config belongs to no supported family; None if it belongs to one."""
    architecture = models.architecture_of(config)
    if row is not None and architecture in row.architectures and row.supported:
        return None
    named = architecture or f"model_type {config.get('model_type')!r:.60}"
    if row is not None and not row.supported:
        return f"{named} ({row.family}): {row.why}"
    if architecture is None:
        names = config.get("architectures")
        what = (
            "names no architecture" if not names else f"has architectures {names!r:.100}, expected one name"
        )
        return f"config.json {what}; supported: {models.supported_text()}"
    if architecture.endswith(("ForSequenceClassification", "ForTokenClassification", "ForRewardModel")):
        return f"{architecture} does not have a language model's head: its outputs are not logprobs of tokens"
    text = models.text_config_of(config)
    if text is not config and (inner := models.family_of(text)) is not None:
        reason = "isobit can run the text part only as a separate model" if inner.supported else inner.why
        return f"{architecture} is unknown; its text part is {inner.family}: {reason}"
    return f"{architecture} is unknown; supported: {models.supported_text()}"


def _check(report: Report, ignored_fields: Sequence[str]) -> str | None:
    """Returns what the services' own parser finds wrong with config.json; "" for nothing, None if the parser
    is not installed."""
    assert report.config is not None
    path = Path(report.config)
    if Path(report.model).expanduser().is_dir():
        path = path.parent  # with generation_config.json, and adapters
    try:
        command = [str(binaries.path("isobit-model")), "check", str(path)]
    except binaries.BinaryNotFoundError:
        return None
    if ignored_fields:
        command.append(f"--ignore_config_fields={','.join(ignored_fields)}")
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_CHECK_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if run.returncode == 0:
        return ""
    said = run.stderr.strip().removeprefix("isobit-model: ")
    if run.returncode != 1 or not said:  # such as a binary without `check`, or for another machine
        return None
    code, _, message = said.partition(": ")
    return message if code.isupper() else said


def _judge_context(config: dict[str, Any], report: Report) -> None:
    report.context = models.context_of(config)
    if report.context is None:
        report.say("context", NOTE, "config.json does not give the context length")
        return
    text = f"{report.context:,} tokens"
    window = config.get("sliding_window")
    is_used = report.family == "Mistral" or config.get("use_sliding_window") is True
    if is_used and isinstance(window, int) and not isinstance(window, bool):
        text += f"; a token sees {window:,} of them in layers with a sliding window"
    if report.kv_bytes_per_token:
        token = sum(report.kv_bytes_per_token)
        text += f"; keys and values: {token / 1024:,.0f} KiB a token, {_gb(token * report.context)} in all"
    report.say("context", YES, text)


def _judge_dtype(config: dict[str, Any], report: Report) -> None:
    report.dtype = models.dtype_of(config)
    if (quantised := models.quantisation_of(config)) is not None:
        report.say("dtype", NO, f"weights are quantised ({quantised}), expected bf16, fp32 or fp16")
        return
    match report.dtype:
        case "bfloat16":
            report.say("dtype", YES, "bfloat16")
        case "float16":
            report.say(
                "dtype",
                NOTE,
                "float16: services refuse it without --round_fp16_weights, which rounds it to bf16",
            )
        case "float32":
            report.say("dtype", NOTE, "float32: services round it to bf16 and compute in bf16")
        case None:
            report.say("dtype", NOTE, "config.json names none: the dtype in the weight files decides")
        case other:
            report.say("dtype", NO, f"{other:.60}: expected bfloat16, float32 or float16")


def judge_gpus(report: Report) -> list[machine.Gpu]:
    """Adds the verdicts on GPUs and driver, and returns the GPUs."""
    try:
        found = machine.gpus()
    except machine.NvidiaSmiError as error:
        report.say("gpu", NOTE, f"{error}: services run on the CPU, with the same bits")
        report.say("driver", NOTE, "not known")
        return []
    report.gpus = [
        {
            "name": gpu.name,
            "compute_capability": gpu.compute_capability,
            "total_bytes": gpu.total_bytes,
            "free_bytes": gpu.free_bytes,
            "driver": gpu.driver,
        }
        for gpu in found
    ]
    if not found:
        report.say("gpu", NOTE, "no NVIDIA GPU: services run on the CPU, slower, with the same bits")
        report.say("driver", NOTE, "none needed")
        return []
    names = ", ".join(dict.fromkeys(f"{gpu.name} ({gpu.compute_capability})" for gpu in found))
    hopper = sum(gpu.is_hopper for gpu in found)
    if not hopper:
        text = "the kernels need Hopper, 9.0 (H100, H200): services run on the CPU, with the same bits"
        report.say("gpu", NOTE, f"{len(found)} x {names}: {text}")
        report.say("driver", NOTE, f"{found[0].driver}, not used")
        return found
    report.say("gpu", YES, f"{len(found)} x {names}")
    _judge_driver(found[0].driver, report)
    return found


def _judge_driver(driver: str, report: Report) -> None:
    major = driver.partition(".")[0]
    if not major.isdecimal():
        report.say("driver", NOTE, f"{driver}: expected {machine.MIN_DRIVER} or later, for CUDA 13")
    elif int(major) < machine.MIN_DRIVER:
        report.say("driver", NO, f"{driver}: CUDA 13 needs {machine.MIN_DRIVER} or later")
    else:
        report.say("driver", YES, driver)


def _judge_memory(report: Report, hopper: list[machine.Gpu]) -> None:
    weights, embedding, kv_bytes = report.weight_bytes, report.embedding_bytes, report.kv_bytes_per_token
    if weights is None or embedding is None or kv_bytes is None:
        report.say("memory", NOTE, "not estimated, as the model does not run")
        return
    if hopper:
        _judge_gpu_memory(report, [embedding + weight for weight in weights], kv_bytes, hopper)
    else:
        _judge_host_memory(report, embedding + sum(weights), sum(kv_bytes))


def _judge_gpu_memory(
    report: Report, weights: list[int], kv_bytes: list[int], hopper: list[machine.Gpu]
) -> None:
    size = report.tp_size
    if len(hopper) < size:
        have = f"{len(hopper)} Hopper GPU" + "s" * (len(hopper) > 1)
        report.say("memory", NO, f"--tp_size {size} needs {size} GPUs, but this machine has {have}")
        return
    rooms = [
        int(gpu.free_bytes * _GPU_MEMORY_FRACTION) - _GPU_LATER_BYTES - weight
        for gpu, weight in zip(hopper, weights, strict=False)
    ]
    tokens = min(room // token for room, token in zip(rooms, kv_bytes, strict=True) if token)
    free = min(gpu.free_bytes for gpu in hopper[:size])
    text = f"TP {size}: weights {_gb(max(weights))} of {_gb(free)} that are free on a GPU"
    if tokens <= 0:
        more = (
            f"; a larger --tp_size, up to {models.LEAVES}, puts less on each GPU"
            if size < models.LEAVES
            else ""
        )
        report.say("memory", NO, f"{text}: no room for keys and values{more}")
        return
    room = f"about {tokens // 1000 * 1000 or tokens:,} tokens of keys and values, minus activations"
    report.say(
        "memory", YES, f"{text}; room for {room}. A scorer needs memory for a second copy of the weights"
    )


def _judge_host_memory(report: Report, weights: int, token: int) -> None:
    free, total = machine.host_memory()
    wanted = weights + _CPU_KV_BYTES
    parts = (
        f"weights {_gb(weights)}, and {_CPU_KV_BYTES // token:,} tokens of keys and values (--kv_cache_mb)"
    )
    if total == 0:
        report.say("memory", NOTE, f"CPU, TP {report.tp_size}: {parts}; the free memory is not known")
    elif wanted > free:
        has = f"{_gb(free)} of {_gb(total)} are free"
        report.say("memory", NO, f"CPU, TP {report.tp_size}: needs {_gb(wanted)}, but {has}: {parts}")
    else:
        has = f"{_gb(wanted)} of {_gb(free)} that are free"
        report.say(
            "memory",
            YES,
            f"CPU, TP {report.tp_size}: {has}: {parts}. A scorer needs memory for a second copy",
        )


def missing_services() -> str | None:
    """Where the services were looked for, if none are installed. A verdict does not depend on that."""
    try:
        binaries.path("isobit-model")
    except binaries.BinaryNotFoundError as error:
        return str(error)
    return None


def ask_numerics(report: Report) -> bool | None:
    """Runs isobit-numerics and adds its verdict. Returns whether every GPU computes the contract; None: it
    did not run."""
    try:
        program = binaries.path("isobit-numerics")
    except binaries.BinaryNotFoundError as error:
        where = f"{error} It is part of isobit[cuda]; in a checkout `make build-gpu` builds it"
        report.say("numerics", NO, f"not run: {where if report.gpus else 'this machine has no NVIDIA GPU'}")
        return None
    try:
        run = subprocess.run(
            [str(program), "--json"], capture_output=True, text=True, timeout=_NUMERICS_TIMEOUT_S, check=False
        )
        answer = json.loads(run.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        report.say("numerics", NO, f"not run: {program}: {error}")
        return None
    report.numerics = answer
    if "error" in answer:
        report.say("numerics", NO, f"not run: {answer['error']}")
        return None
    for device in answer["devices"]:
        counts = ", ".join(
            f"{one['different']:,} of {one['steps']:,} steps of {one['instruction']} differ"
            for one in device["instructions"]
        )
        verdict, does = (YES, "computes") if device["computes_contract"] else (NO, "does not compute")
        text = f"GPU {device['device']}, {device['name']}, {does} the contract (C1): {counts}"
        report.say("numerics", verdict, text)
    return answer["computes_contract"]


def _gb(count: int) -> str:
    return f"{count / _GB:,.1f} GB" if count < 1e15 else f"{count / _GB:,.0f} GB"


def _count(parameters: int) -> str:
    if parameters < 1e6:
        return f"{parameters:,}"
    return f"{parameters / 1e9:.2f} billion" if parameters >= 1e9 else f"{parameters / 1e6:.0f} million"
