"""Paths of vLLM, SGLang and their trainers that isobit refuses by name, each with the reason and what to do
instead.

An answer is cheap and always the same, since some clients try again for a minute. The status is 404 where
clients take that as "this server does not have the feature", otherwise 400.
"""

from starlette.routing import Route

from isobit.gateway.core import Core
from isobit.gateway.errors import ErrorBody, HttpError, openai_body
from isobit.gateway.http import Answer, Call

ADAPTERS = "isobit serves no LoRA adapters: merge them into the weights and send these"
_PICKLES = "its data are pickles, which isobit does not read: use a directory"
_PACKED_ROUTING = "dense models have no routing to replay"
_TORCH_GROUP = (
    "it needs PyTorch's process group, which isobit does not have: use a directory,"
    " /update_weights_from_disk (slime: --update-weight-transport disk; AReaL: weight_update_mode disk)"
)

# Path: (methods, status, reason).
VLLM = {
    "/v1/load_lora_adapter": (("POST",), 404, ADAPTERS),
    "/v1/unload_lora_adapter": (("POST",), 404, ADAPTERS),
    "/load_lora_adapter": (("POST",), 400, ADAPTERS),
    "/unload_lora_adapter": (("POST",), 400, ADAPTERS),
    "/skyrl/v1/load_lora_adapter": (("POST",), 404, ADAPTERS),
    "/skyrl/v1/generate": (("POST",), 404, _PACKED_ROUTING),
    "/v1/chat/completions/render": (
        ("POST",),
        404,
        "isobit takes only text; /tokenize renders a conversation",
    ),
    "/fetch_weights": (("POST",), 400, "it updates a part of the weights: send all weights"),
    "/start_draft_weight_update": (("POST",), 400, "isobit has no draft model"),
    "/init_broadcaster": (
        ("POST",),
        404,
        "prime-rl's NCCL transport sends pickles: set weight_broadcast.type = filesystem",
    ),
    "/areal_init_weights_update_group": (("POST",), 400, _TORCH_GROUP),
    "/areal_set_update_weight_meta": (("POST",), 400, _TORCH_GROUP),
    "/areal_update_weights_xccl": (("POST",), 400, _TORCH_GROUP),
    "/areal_set_update_weight_meta_lora": (("POST",), 400, ADAPTERS),
    "/areal_update_weights_lora_xccl": (("POST",), 400, ADAPTERS),
}
SGLANG = {
    "/init_weights_update_group": (("POST",), 400, _TORCH_GROUP),
    "/destroy_weights_update_group": (("POST",), 400, _TORCH_GROUP),
    "/update_weights_from_distributed": (("POST",), 400, _TORCH_GROUP),
    "/begin_weight_update": (("POST",), 400, _TORCH_GROUP),
    "/end_weight_update": (("POST",), 400, _TORCH_GROUP),
    "/update_weights_from_tensor": (("POST",), 400, _PICKLES),
    "/update_weights_from_ipc": (("POST",), 400, _PICKLES),
    "/pull_weights": (("POST",), 404, "it updates a part of the weights: send all weights"),
    "/post_process_weights": (("POST",), 404, "isobit packs weights itself"),
    "/weights_checker": (("POST",), 404, "/model_info has the digest of the weights"),
    "/parallelism_config": (("GET",), 404, "isobit places its ranks itself"),
    "/get_remote_instance_transfer_engine_info": (("GET",), 404, "isobit has no transfer engine"),
    "/start_profile": (("GET", "POST"), 404, "use isobit-bench to measure"),
    "/stop_profile": (("GET", "POST"), 404, "use isobit-bench to measure"),
    "/encode": (("POST",), 404, "isobit serves no embeddings"),
    "/classify": (("POST",), 404, "isobit serves no reward models"),
}


def routes(core: Core, table: dict, roles: tuple[str, ...], errors: ErrorBody = openai_body) -> list[Route]:
    return [
        core.route(path, _refusal(path, status, why), methods, roles=roles, errors=errors)
        for path, (methods, status, why) in table.items()
    ]


def _refusal(path: str, status: int, why: str):
    async def refuse(call: Call) -> Answer:
        raise HttpError(status, f"{path} is not offered by isobit: {why}")

    return refuse
