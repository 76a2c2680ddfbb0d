"""verl's rollout "isobit": a replica, a server adapter and a checkpoint engine for services that run
separately. Importing this module registers them; verl does that through the entry point group verl.plugins.

The settings are in rollout.engine_kwargs.isobit, and for the checkpoint engine in
rollout.checkpoint_engine.engine_kwargs.isobit: see Settings.
"""

import asyncio
import dataclasses
import functools
import hashlib
import logging
import os
from collections.abc import Iterable
from typing import Any

INSTALL = "verl==0.9.1"

# verl reports a plugin that cannot be imported only at the log level debug.
try:
    from isobit import aio
    from isobit.client import RolloutClient
    from isobit.integrations._context import agenerate
    from isobit.integrations._frameworks import known_options, require
    from isobit.integrations.weights import SharedDirectory, send_weights

    _replica = require("verl.workers.rollout.replica", INSTALL)
    _rollout_base = require("verl.workers.rollout.base", INSTALL)
    _engine_base = require("verl.checkpoint_engine.base", INSTALL)
    ray = require("ray", INSTALL)
except Exception as error:
    logging.getLogger(__name__).error(
        "isobit's plugin for verl cannot be imported, so verl has no rollout.name=isobit: %s: %s",
        type(error).__name__,
        error,
    )
    raise

_OPTIONS = "temperature top_p top_k min_p seed ignore_eos stop_token_ids min_tokens repetition_penalty"
_NAMES = {name: name for name in _OPTIONS.split()}
_STEP_BITS = 32
# Options that change no token with the values that verl sets. verl requests logprobs by a flag; isobit always
# returns them.
_IGNORED = {"logprobs": ..., "n": 1, "detokenize": ..., "skip_special_tokens": ..., "stop": []}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Where the services are.

    Attributes:
      targets: host:port of the rollouts, one for each replica, in order.
      model_root, model: see SharedDirectory; without them weights go over gRPC.
      security: further arguments of the clients, such as tls_ca and token_file.
    """

    targets: tuple[str, ...]
    model_root: str | None = None
    model: str = ""
    security: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, values: dict[str, Any] | None, where: str) -> "Settings":
        """Returns the settings in a config.

        Raises:
          ValueError: an unknown name, or no targets.
        """
        values = dict(values or {})
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"{where}: expected {', '.join(sorted(known))}, got {', '.join(unknown)}")
        targets = tuple(values.pop("targets", None) or ())
        if not targets:
            raise ValueError(f"{where}.targets: expected the addresses of rollouts, such as [127.0.0.1:7001]")
        return cls(targets, **values)

    @property
    def directory(self) -> SharedDirectory | None:
        return None if self.model_root is None else SharedDirectory(self.model_root, self.model)

    def target(self, replica_rank: int) -> str:
        """Returns the rollout of a replica.

        Raises:
          ValueError: there are more replicas than rollouts.
        """
        if replica_rank >= len(self.targets):
            raise ValueError(
                f"replica {replica_rank}: expected a target for each replica, got only {len(self.targets)}"
            )
        return self.targets[replica_rank]


def version_of_step(step: int | None, present: int) -> int:
    """Returns the weight version for a step of verl, if the service now has the version `present`.

    Versions must grow, but steps need not: fit() begins with step 0, may repeat a step, and continues from an
    earlier step after a crash. So the lower 32 bits of a version are the step, and the upper bits count how
    often the step did not grow. None means the step of the present weights.

    Raises:
      ValueError: the step is outside 0 to 2^32 - 1.
    """
    if step is None:
        step = step_of_version(present)
    if not 0 <= step < 1 << _STEP_BITS:
        raise ValueError(f"global_steps: expected 0 to {(1 << _STEP_BITS) - 1}, got {step}")
    turn = present >> _STEP_BITS
    return ((turn if step > step_of_version(present) else turn + 1) << _STEP_BITS) | step


def step_of_version(version: int) -> int:
    """Returns the step of a version made by version_of_step."""
    return version & ((1 << _STEP_BITS) - 1)


def _settings(config) -> Settings:
    return Settings.of((config.engine_kwargs or {}).get("isobit"), "rollout.engine_kwargs.isobit")


class Server:
    """The server that verl's clients call to generate: one for each replica, a Ray actor without a GPU."""

    def __init__(self, config, replica_rank: int):
        self._config = config
        settings = _settings(config)
        self._target = settings.target(replica_rank)
        self._client = aio.RolloutClient(self._target, **settings.security)
        self._rejecting = False

    async def wait_until_serving(self) -> str:
        """Returns the rollout's host:port once the rollout serves."""
        await self._client.wait_until_serving()
        return self._target

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list | None = None,
        video_data: list | None = None,
        audio_data: list | None = None,
        mm_processor_kwargs: dict | None = None,
    ):
        """Returns a TokenOutput: token ids, and their logprobs with the scorer's bits.

        global_steps is the step of the weights of the last token; min_global_steps and max_global_steps are
        over all tokens (see version_of_step).

        Raises:
          ValueError: images, video or audio; a sampling option that isobit does not have; or a prompt that
            leaves no room for a completion.
        """
        if image_data or video_data or audio_data or mm_processor_kwargs:
            raise ValueError("expected only text: isobit takes no images, video or audio")
        if self._rejecting:
            return _replica.TokenOutput(token_ids=[], log_probs=[], stop_reason="aborted")
        (sample,) = await agenerate(
            self._client,
            prompt_ids,
            request_id=request_id,
            **self._options(len(prompt_ids), sampling_params, request_id),
        )
        steps = [step_of_version(version) for version in sample.tokens.weight_versions.tolist()]
        return _replica.TokenOutput(
            token_ids=sample.tokens.token_ids.tolist(),
            log_probs=sample.tokens.logprobs.tolist(),
            stop_reason="aborted" if sample.finish_reason == "abort" else "completed",
            num_preempted=sample.num_preemptions,
            extra_fields={
                "global_steps": step_of_version(sample.weight_version.id),
                "num_cached_tokens": sample.num_cached_tokens,
            }
            | ({"min_global_steps": min(steps), "max_global_steps": max(steps)} if steps else {}),
        )

    def _options(self, prompt_tokens: int, sampling: dict[str, Any], request_id: str) -> dict[str, Any]:
        config = self._config
        sampling = dict(sampling)
        limits = [sampling.pop(name, None) for name in ("max_tokens", "max_new_tokens")]
        total = config.prompt_length + config.response_length
        most = next((n for n in limits if n is not None), min(config.response_length, total - prompt_tokens))
        if config.max_model_len is not None:
            most = min(most, config.max_model_len - prompt_tokens)
        if most < 1:
            raise ValueError(f"a prompt of {prompt_tokens} tokens leaves no room for a completion")
        defaults = {"repetition_penalty": config.repetition_penalty, "ignore_eos": config.ignore_eos}
        if config.full_determinism:  # the same request draws the same tokens, at any replica
            digest = hashlib.sha256(f"{config.seed} {request_id}".encode()).digest()
            defaults["seed"] = int.from_bytes(digest[:8])
        return known_options(defaults | sampling, _NAMES, _IGNORED) | {"max_tokens": most}

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Ends all requests in flight and stops generation. Later requests wait; with reject_request they end
        at once as aborted."""
        self._rejecting = reject_request
        await self._client.pause_generation("abort")
        return {}

    async def resume_generation(self) -> None:
        """Ends the pause of abort_all_requests."""
        self._rejecting = False
        await self._client.continue_generation()

    async def nothing(self, *_, **__) -> None:
        """Does nothing. verl calls it for servers that share the trainer's GPUs or keep old keys and values,
        and for the workers beside them that receive weights."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = nothing
    start_profile = stop_profile = set_global_steps = nothing
    execute_checkpoint_engine = update_weights = nothing


class Replica(_replica.RolloutReplica):
    """A rollout of isobit that was started beforehand and has its own devices."""

    async def launch_servers(self) -> None:
        """Starts the actor in front of the rollout. Returns once the rollout serves."""
        if self.is_reward_model or self.is_teacher_model:
            raise ValueError("rollout.name=isobit: expected the policy, got a reward or teacher model")
        actor = ray.remote(Server).options(
            name=f"isobit_server_{self.replica_rank}_0{self.name_suffix}",
            num_cpus=0,
            max_concurrency=self.max_concurrency,
        )
        server = actor.remote(self.config, self.replica_rank)
        self._server_address = await server.wait_until_serving.remote()
        self._server_handle = server
        self.servers = [server]

    async def init_standalone(self) -> None:
        """Takes no Ray resources, since the services have their own."""
        self.rollout_mode = _replica.RolloutMode.STANDALONE
        await self.launch_servers()
        self.workers = self.servers  # verl's weight manager requires workers; isobit does not need any

    async def init_colocated(self, resource_pool) -> None:
        raise ValueError("rollout.name=isobit: expected hybrid or standalone mode, got colocated")


class ServerAdapter(_rollout_base.BaseRollout):
    """Sends a hybrid trainer's weights to the rollout of its replica."""

    def __init__(self, config, model_config, device_mesh, replica_rank: int = -1):
        super().__init__(config, model_config, device_mesh)
        c = self.config
        ranks = c.tensor_model_parallel_size * c.data_parallel_size * c.pipeline_model_parallel_size
        rank = int(os.environ["RANK"])
        self.replica_rank = rank // ranks if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % ranks == 0
        self._settings = _settings(c)

    async def resume(self, tags: list[str]) -> None:
        """Does nothing: the services keep their memory."""

    async def release(self) -> None:
        """Does nothing, like resume."""

    async def update_weights(
        self, weights, wire_format: str = "named_tensors", global_steps: int | None = None, **options
    ) -> None:
        """Sends the weights. Every rank iterates over them, since that may need all ranks; the first rank of
        a replica sends them.

        Raises:
          ValueError: deltas or an adapter, which isobit does not take.
        """
        if wire_format != "named_tensors":
            raise ValueError(f"wire_format: expected named_tensors, got {wire_format}")
        if options.get("peft_config") is not None:
            raise ValueError("peft_config: expected none: isobit serves no adapters; set lora.merge")
        tensors = await _taken(weights, keep=self.is_leader_rank)
        if self.is_leader_rank:
            await asyncio.to_thread(
                _send, self._settings, [self._settings.target(self.replica_rank)], tensors, global_steps
            )


@_engine_base.CheckpointEngineRegistry.register("isobit")
class CheckpointEngine(_engine_base.CheckpointEngine):
    """Sends the weights of the trainer's first rank to every rollout. The rollouts need no verl workers.

    Args:
      bucket_size, is_master: verl passes them; they are not used.
      settings: see Settings.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, **settings):
        self._is_master = is_master
        self._settings = Settings.of(settings, "rollout.checkpoint_engine.engine_kwargs.isobit")

    def prepare(self) -> dict[str, Any]:
        """Does nothing."""
        return {}

    @classmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]):
        """No rank needs to know the others."""
        return {}, {}

    def init_process_group(self) -> None:
        """Does nothing: there is no group."""

    def finalize(self) -> None:
        """Does nothing."""

    async def send_weights(self, weights, global_steps: int | None = None) -> dict[str, float]:
        """Sends the weights. Every rank iterates over them, the first sends them. After that the outputs of
        rollouts have `global_steps` (see version_of_step)."""
        tensors = await _taken(weights, keep=self._is_master)
        if self._is_master:
            await asyncio.to_thread(_send, self._settings, self._settings.targets, tensors, global_steps)
        return {}

    async def receive_weights(self, global_steps: int | None = None):
        """Must not be called: the services receive the weights, not verl's workers.

        Raises:
          RuntimeError: always.
        """
        raise RuntimeError("the checkpoint engine isobit has no receivers: use it with rollout.name=isobit")
        yield  # an asynchronous iterator, as verl expects


async def _taken(weights, *, keep: bool) -> list[tuple[str, Any]]:
    """Returns the tensors in host memory. They are copied in this thread, since its device is the rank's."""
    kept = []
    async for name, tensor in require("verl.workers.rollout.utils", INSTALL).ensure_async_iterator(weights):
        if keep:
            kept.append((name, tensor.detach().cpu()))
    return kept


def _send(settings: Settings, targets: Iterable[str], tensors, global_steps: int | None) -> None:
    clients = [RolloutClient(target, **settings.security) for target in targets]
    try:
        version = functools.partial(version_of_step, global_steps)
        send_weights(clients, tensors, directory=settings.directory, weight_version=version)
    finally:
        for client in clients:
            client.close()


_replica.RolloutReplicaRegistry.register("isobit", lambda: Replica)
_rollout_base._ROLLOUT_REGISTRY["isobit", "async"] = f"{__name__}.{ServerAdapter.__name__}"
