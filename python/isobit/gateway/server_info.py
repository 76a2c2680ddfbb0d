"""/server_info and /model_info: one object with the fields that clients of vLLM and of SGLang look for."""

from typing import Any

from isobit.gateway.control import control_of
from isobit.gateway.core import Core

_DTYPE = "bfloat16"  # of the weights, whatever the checkpoint has


async def server_info(core: Core) -> dict[str, Any]:
    """vLLM's `vllm_config`, together with SGLang's server arguments."""
    info = await core.engine.rollout.get_server_info()
    load = await core.engine.rollout.get_load()
    on_gpus = info.server.instruction_set.partition("/")[0] == "cuda"
    return {
        "vllm_config": {
            "model_config": {
                "model": core.names[0],
                "dtype": f"torch.{_DTYPE}",
                "max_model_len": info.server.model.context_length,
            },
            "parallel_config": {
                # In a trainer's group the rollout is one rank.
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "data_parallel_size": 1,
                "world_size": 1,
            },
            # Without a GPU there is no NCCL. A trainer that took null for a service that has it would join
            # its own end of the group, and wait there for ever.
            "weight_transfer_config": {"backend": "nccl"} if on_gpus else None,
            "lora_config": None,
        },
        **_model(core),
        "version": info.server.version,
        "dtype": _DTYPE,
        "context_length": info.server.model.context_length,
        "tp_size": info.tensor_parallel_size,
        "pp_size": 1,
        "dp_size": 1,
        "ep_size": 1,
        "num_gpus": info.tensor_parallel_size,
        "num_gpus_per_engine": info.tensor_parallel_size,
        "disaggregation_mode": "null",
        "encoder_only": False,
        "enable_memory_saver": False,
        "max_running_requests": info.max_running_requests,
        "max_total_num_tokens": info.page_size * info.num_pages,
        "weight_version": control_of(core).notes.read().label(info.server.weight_version.id),
        "internal_states": [{"num_running_reqs": load.num_running_requests}],
        "isobit": _isobit(info),
    }


async def model_info(core: Core) -> dict[str, Any]:
    info = await core.engine.rollout.get_server_info()
    return {
        **_model(core),
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": control_of(core).notes.read().label(info.server.weight_version.id),
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": None,
        "architectures": [info.server.model.architecture],
        "isobit": _isobit(info),
    }


def _model(core: Core) -> dict[str, Any]:
    path = str(core.settings.model)
    return {"model_path": path, "tokenizer_path": path, "served_model_name": core.names[0]}


def _isobit(info: Any) -> dict[str, Any]:
    """What identifies the arithmetic and the weights."""
    return {
        "fingerprint": info.server.fingerprint.hex,
        "settings": info.server.fingerprint.settings,
        "weight_version": info.server.weight_version.id,
        "weight_digest": info.server.weight_version.digest,
        "backend": info.server.instruction_set,
    }
