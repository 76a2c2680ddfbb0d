"""slime's hooks for isobit: `generate` for --custom-generate-function-path, `update_weights` for
--custom-update-weight-post-write-path. This module does not import slime.

Both read their settings from slime's args, which --custom-config-path fills from a YAML file:
  isobit_rollout: host:port of the rollout.
  isobit_others: host:port of scorers that get the weights, too; optional.
  isobit_security: further arguments of the clients, such as tls_ca and token_file; optional.
"""

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

from isobit import aio
from isobit.client import RolloutClient, ScorerClient
from isobit.errors import InvalidArgumentError
from isobit.integrations._context import NO_LIMIT, agenerate, is_of_prompt
from isobit.integrations._frameworks import known_options
from isobit.results import Sample
from isobit.tokenizer import Tokenizer

_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "min_p": "min_p",
    "sampling_seed": "seed",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
}
_IGNORED = {
    "skip_special_tokens": ...,  # concerns only the text
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
    "stop": [],
    # With top_p, slime's trainer would need the tokens that it keeps, to divide by their probability.
    "top_p": 1.0,
}


async def generate(args, sample, sampling_params: dict[str, Any]):
    """Appends a completion to slime's Sample: token ids, text, and logprobs with the scorer's bits.

    An aborted sample continues where it ended: max_new_tokens and min_new_tokens count the whole response.
    Without max_new_tokens, or with more than fit, the response ends where the context does.
    `sample.weight_versions` gets the version of the last weights.

    Raises:
      AttributeError: args has no isobit_rollout.
      TypeError: the prompt is not text, or there are images.
      ValueError: a sampling option that isobit does not have, or that slime's loss does not handle; or a
        prompt that the rollout refuses, such as one that leaves no room for a response.
    """
    _check(args, sample)
    tokenizer = _tokenizer(args.hf_checkpoint)
    if not sample.tokens:
        sample.tokens = tokenizer.encode(sample.prompt, add_special_tokens=False).tolist()
    options = known_options(sampling_params, _NAMES, _IGNORED)
    if options.get("max_tokens") is None:
        options["max_tokens"] = NO_LIMIT
    options["max_tokens"] -= sample.response_length
    options["min_tokens"] = max(0, (options.get("min_tokens") or 0) - sample.response_length)
    drawn = await _drawn(args, sample, options)
    if drawn is None:
        sample.status = type(sample).Status.TRUNCATED
        return sample
    sample.append_response_tokens(
        args,
        tokens=drawn.tokens.token_ids.tolist(),
        log_probs=drawn.tokens.logprobs.tolist(),
        trainable=True,
        meta_info={
            "finish_reason": {"type": drawn.finish_reason},
            "weight_version": str(drawn.weight_version.id),
            "prompt_tokens": drawn.num_prompt_tokens,
            "cached_tokens": drawn.num_cached_tokens,
            "completion_tokens": len(drawn.tokens.token_ids),
        },
        text=tokenizer.decode(
            drawn.tokens.token_ids, skip_special_tokens=bool(sampling_params.get("skip_special_tokens"))
        ),
    )
    return sample


def update_weights(args, version_dir: str, rollout_engines) -> None:
    """Switches the services to a checkpoint that slime has written (--update-weight-transport disk, full).

    The first rank of the trainer does it. --update-weight-disk-dir must be the services' --model_root.

    Raises:
      isobit.errors.IsobitError: a service refused; it keeps its old weights.
    """
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_rank() != 0:
        return
    security = getattr(args, "isobit_security", None) or {}
    clients = [RolloutClient(args.isobit_rollout, **security)]
    clients += [ScorerClient(target, **security) for target in getattr(args, "isobit_others", None) or ()]
    try:
        for client in clients:
            client.update_weights(Path(version_dir).name)
    finally:
        for client in clients:
            client.close()


async def _drawn(args, sample, options: dict[str, Any]) -> Sample | None:
    """Returns the next part of the response; None if there is no room for one."""
    if options["max_tokens"] < 1:
        return None
    try:
        (drawn,) = await agenerate(_client(args), sample.tokens, **options)
    except InvalidArgumentError as error:
        if sample.response_length and is_of_prompt(error):
            return None
        raise
    return drawn


def _check(args, sample) -> None:
    if not isinstance(sample.prompt, str):
        got = type(sample.prompt).__name__
        raise TypeError(f"sample.prompt: expected text, got {got}: use --apply-chat-template")
    if sample.multimodal_inputs and any(value is not None for value in sample.multimodal_inputs.values()):
        raise TypeError("sample.multimodal_inputs: expected none: isobit takes only text")
    if getattr(args, "use_rollout_routing_replay", False):
        raise ValueError("use_rollout_routing_replay: expected False: isobit's models have no experts")


@cache
def _tokenizer(directory: str) -> Tokenizer:
    return Tokenizer(directory)


# One client for each event loop, since a connection belongs to one.
_clients: dict[tuple[asyncio.AbstractEventLoop, str], aio.RolloutClient] = {}


def _client(args) -> aio.RolloutClient:
    key = asyncio.get_running_loop(), args.isobit_rollout
    if key not in _clients:
        for old in [old for old in _clients if old[0].is_closed()]:
            del _clients[old]
        _clients[key] = aio.RolloutClient(key[1], **(getattr(args, "isobit_security", None) or {}))
    return _clients[key]
