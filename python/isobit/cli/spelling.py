"""Flags in users' spellings: dashes or underscores, the names of vLLM and SGLang, unambiguous prefixes.

No flag is ignored. A flag that has another meaning here, or does not exist, is an error that names the right
one.
"""

import difflib
from collections.abc import Collection
from dataclasses import dataclass, field

from isobit.command_line import OTHER_NAMES


@dataclass(frozen=True)
class Other:
    """The flag of ours that corresponds to an engine's flag."""

    flag: str  # ours, without dashes
    note: str = ""  # what is different; shown whenever the flag is used
    whole: str = ""  # our flag with its value, if the engine's flag takes none


# By name with underscores. Flags with the same meaning have no note.
ENGINE_FLAGS = {
    "tensor_parallel_size": Other("tp_size"),
    "tp": Other("tp_size"),
    "max_model_len": Other("max_context"),
    "context_length": Other("max_context"),
    "max_num_seqs": Other("max_running"),
    "max_running_requests": Other("max_running"),
    "block_size": Other("page_size"),
    "num_gpu_blocks_override": Other("num_pages"),
    "ssl_certfile": Other("tls_cert"),
    "ssl_keyfile": Other("tls_key"),
    "model_path": Other("model"),
    "enforce_eager": Other("cuda_graphs", whole="--nocuda_graphs"),
    "disable_cuda_graph": Other("cuda_graphs", whole="--nocuda_graphs"),
    "no_enable_prefix_caching": Other("prefix_cache_fraction", whole="--prefix_cache_fraction=0"),
    "enable_prefix_caching": Other("prefix_sharing", whole="--prefix_sharing"),
    "gpu_memory_utilization": Other(
        "gpu_memory_fraction", "it is a fraction of the memory that is free at the start, not of all memory"
    ),
    "mem_fraction_static": Other(
        "gpu_memory_fraction",
        "it is a fraction of the memory that is free at the start, and bounds activations too",
    ),
    "max_num_batched_tokens": Other(
        "max_batch_tokens",
        "prompts are computed whole, so it also bounds prompt plus max_tokens of a request",
    ),
}

# Flags of engines that isobit does not have, each with the reason or what to do instead.
NOT_HERE = {
    "api_key": "use --access_file, a file with the bearer tokens and roles of callers (docs/operations.md)",
    "chat_template_content_format": "the format of messages follows the model's own template",
    "cpu_offload_gb": "weights are never offloaded",
    "data_parallel_size": "start one `isobit serve` for each replica (docs/scale.md)",
    "enable_lora": "adapters are not served: merge them into the weights",
    "hf_token": "set the environment variable HF_TOKEN",
    "kv_cache_dtype": "keys and values are always bf16: another type would be another contract",
    "pipeline_parallel_size": "use --tp_size",
    "quantization": "weights are always bf16: quantised ones would be another contract",
    "swap_space": "sequences that lose their pages are computed again, with the same bits",
    "tokenizer": "the tokenizer in the model directory is used",
    "tokenizer_mode": "the model's tokenizer.json is used",
    "trust_remote_code": "leave it out: isobit never runs code of a model",
}

_SEED = "each request has its own seed"
_DTYPES = {"auto", "bfloat16", "bf16"}
_NEAR = 0.75
_SHORTEST_BEGINNING = 3  # letters


class WrongFlagError(Exception):
    """A flag that is not accepted; the message says why, and which one may be meant."""


@dataclass
class Line:
    """A command line in our own spelling."""

    words: list[str]
    notes: list[str] = field(default_factory=list)


def respell(words: Collection[str], known: Collection[str]) -> Line:
    """Returns `words` with each --flag in the spelling of `known` (names without dashes).

    Raises:
      WrongFlagError: a flag is not known, or has another meaning in isobit.
    """
    line = Line([])
    words = list(words)
    end = words.index("--") if "--" in words else len(words)
    words[:end] = [f"--tp_size{word[3:]}" if _is_short_tp(word, known) else word for word in words[:end]]
    at = 0
    while at < end:
        word = words[at]
        if not word.startswith("--"):
            line.words.append(word)
        else:
            at += _respell_flag(words[at:end], known, line)
        at += 1
    line.words += words[end:]
    return line


def _is_short_tp(word: str, known: Collection[str]) -> bool:
    return (word == "-tp" or word.startswith("-tp=")) and "tp_size" in known


def _respell_flag(words: list[str], known: Collection[str], line: Line) -> int:
    """Adds words[0], a flag, to `line`. Returns how many of the following words it used."""
    flag, equals, value = words[0].partition("=")
    name = flag[2:].replace("-", "_")
    if name in known:
        line.words.append(f"--{name}{equals}{value}")
        return 0
    if name.lower() in ("dtype", "seed") and "tp_size" in known:
        return _check_fixed(name.lower(), flag, value if equals else "".join(words[1:2]), not equals)
    other = ENGINE_FLAGS.get(name.lower())
    if other is not None and other.flag in known:
        if other.note:
            line.notes.append(f"{flag} is taken as --{other.flag}: {other.note}")
        if other.whole and equals:
            raise WrongFlagError(f"{flag}: expected no value, got {value}")
        line.words.append(other.whole or f"--{other.flag}{equals}{value}")
        return 0
    begun = [one for one in known if one.startswith(name)]
    if len(begun) == 1 and len(name) >= _SHORTEST_BEGINNING:
        line.words.append(f"--{begun[0]}{equals}{value}")
        return 0
    if name.lower() in NOT_HERE and "tp_size" in known:
        raise WrongFlagError(f"{flag}: {NOT_HERE[name.lower()]}")
    raise WrongFlagError(f"unknown flag {flag}{_hint(name, known, begun)}")


def _check_fixed(name: str, flag: str, value: str, takes_next: bool) -> int:
    """Checks flags that engines let a user choose and that the contract fixes."""
    if name == "seed":
        raise WrongFlagError(f"{flag}: {_SEED}")
    if value not in _DTYPES:
        raise WrongFlagError(f"{flag}: expected bfloat16 or auto, got {value}: the contract computes in bf16")
    return int(takes_next)


def _hint(name: str, known: Collection[str], begun: Collection[str]) -> str:
    """A hint such as "; did you mean --model?"."""
    plain = OTHER_NAMES.get(name.lower(), name.lower())
    taken = [*known, *(theirs for theirs, ours in ENGINE_FLAGS.items() if ours.flag in known)]
    near = [plain] if plain in known else difflib.get_close_matches(plain, taken, 1, _NEAR)
    near = near or sorted(begun)[:3]
    return f"; did you mean {' or '.join(f'--{one}' for one in near)}?" if near else ""
