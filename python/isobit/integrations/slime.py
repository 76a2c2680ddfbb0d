"""slime's hooks for isobit: `generate` for --custom-generate-function-path, `update_weights` for
--custom-update-weight-post-write-path. slime itself is not imported.

Both read their settings from slime's args, which --custom-config-path fills from a YAML file:
  isobit_rollout: host:port of the rollout.
  isobit_others: host:port of scorers that shall have the weights too; optional.
  isobit_security: further arguments of the clients, such as tls_ca and token_file; optional.
"""

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

from isobit import aio
from isobit.client import RolloutClient, ScorerClient
from isobit.integrations._frameworks import known_options
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
    "skip_special_tokens": ...,  # for the text alone
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
    "stop": [],
    # slime's trainer would need the tokens that top_p keeps, to divide by their probability.
    "top_p": 1.0,
}


async def generate(args, sample, sampling_params: dict[str, Any]):
    """Appends a completion to slime's Sample: token ids, text, and logprobs with the scorer's bits.

    An aborted sample goes on where it ended. `sample.weight_versions` gets the version of the last weights.

    Raises:
      AttributeError: args lack isobit_rollout.
      TypeError: the prompt is not text, or there are images.
      ValueError: a sampling option that isobit does not have, or that slime's loss does not know of.
    """
    _check(args, sample)
    tokenizer = _tokenizer(args.hf_checkpoint)
    if not sample.tokens:
        sample.tokens = tokenizer.encode(sample.prompt, add_special_tokens=False).tolist()
    options = known_options(sampling_params, _NAMES, _IGNORED)
    options["max_tokens"] -= sample.response_length
    if options["max_tokens"] < 1:
        sample.status = type(sample).Status.TRUNCATED
        return sample
    (drawn,) = await _client(args).generate(sample.tokens, **options)
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

    The first rank of the trainer does it. --update-weight-disk-dir is the services' --model_root.

    Raises:
      isobit.errors.IsobitError: a service refused; it goes on with its old weights.
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


def _check(args, sample) -> None:
    if not isinstance(sample.prompt, str):
        got = type(sample.prompt).__name__
        raise TypeError(f"sample.prompt: expected text, got {got}: use --apply-chat-template")
    if sample.multimodal_inputs and any(value is not None for value in sample.multimodal_inputs.values()):
        raise TypeError("sample.multimodal_inputs: expected none: isobit serves text alone")
    if getattr(args, "use_rollout_routing_replay", False):
        raise ValueError("use_rollout_routing_replay: expected False: isobit's models have no experts")


@cache
def _tokenizer(directory: str) -> Tokenizer:
    return Tokenizer(directory)


# Of each event loop: a connection cannot change it.
_clients: dict[tuple[asyncio.AbstractEventLoop, str], aio.RolloutClient] = {}


def _client(args) -> aio.RolloutClient:
    key = asyncio.get_running_loop(), args.isobit_rollout
    if key not in _clients:
        _clients[key] = aio.RolloutClient(key[1], **(getattr(args, "isobit_security", None) or {}))
    return _clients[key]
