"""TRL's trainers with isobit's rollout: AsyncGRPOTrainer through RolloutWorker and WeightTransfer,
GRPOTrainer through RolloutFunction. With trl_model.patch_trainer, both compute logprobs that equal the
rollout's in every bit."""

import itertools
import logging
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from isobit.calls import InFlightMode
from isobit.client import RolloutClient, ScorerClient
from isobit.errors import InvalidArgumentError
from isobit.integrations._context import NO_LIMIT, generate, is_of_prompt
from isobit.integrations._frameworks import require
from isobit.integrations._rewards import Rewards
from isobit.integrations.weights import SharedDirectory, send_weights
from isobit.results import Sample

INSTALL = "trl==1.16.0"
# isobit's sampling parameters, under the names of TRL's configs.
_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
_POLL_S = 0.2
_GAP = "sampling/sampling_logp_difference"

logger = logging.getLogger(__name__)


def sampling_of(args) -> dict[str, Any]:
    """Returns the sampling parameters of a GRPOConfig or AsyncGRPOConfig, as arguments of
    RolloutClient.generate. Without max_completion_length, max_tokens is NO_LIMIT: more than any context has
    room for.

    Raises:
      ValueError: the config has a parameter that the trainer's loss does not handle.
    """
    if args.repetition_penalty != 1.0:
        raise ValueError(
            f"repetition_penalty: expected 1, got {args.repetition_penalty}: a trainer computes logprobs"
            " without it"
        )
    if getattr(args, "generation_kwargs", None):
        raise ValueError(f"generation_kwargs: expected none, got {args.generation_kwargs}")
    options = {ours: getattr(args, theirs) for theirs, ours in _SAMPLING.items()}
    most = args.max_completion_length
    return options | {"max_tokens": NO_LIMIT if most is None else most}


class WeightTransfer:
    """TRL's WeightTransferProtocol: sends the trainer's weights every `weight_sync_steps` steps.

    Args:
      clients: the rollout, and any others that need the weights, such as the scorer.
      directory: see send_weights.
      in_flight: what happens to the rollout's requests. With "recompute_kv" they continue with the new
        weights, and each token has the logprob and version of the weights that drew it.
    """

    def __init__(
        self,
        clients: Sequence[RolloutClient | ScorerClient],
        *,
        directory: SharedDirectory | None = None,
        in_flight: InFlightMode = "recompute_kv",
    ):
        self._clients = list(clients)
        self._directory = directory
        self._in_flight = in_flight

    def init_weight_transfer(self) -> None:
        """Returns once all services serve."""
        for client in self._clients:
            client.wait_until_serving()

    def pause(self) -> None:
        """Does nothing: a service itself stops its requests, and only for the switch."""

    def send_weights(self, iterator: Iterable[tuple[str, Any]]) -> None:
        """Switches the services to these weights. A service that refuses them keeps the old ones."""
        send_weights(self._clients, iterator, directory=self._directory, in_flight=self._in_flight)

    def resume(self) -> None:
        """Does nothing, like pause."""

    def destroy(self) -> None:
        """Does nothing: the clients belong to the caller."""


class RolloutWorker:
    """TRL's RolloutWorkerProtocol: samples groups of completions, scores them with reward functions and
    queues them.

    Groups are queued in the order of the prompts. The seed of a group is `seed` plus the group's number. The
    model_version of a sample is that of its oldest token. A completion ends where the context does. A prompt
    that the rollout refuses, such as one that fills the context, is skipped with a warning. If a pass over
    all prompts gives no sample, the worker fails.

    Args:
      client: a client of the rollout. Only one trainer may send weights to it.
      tokenizer: the trainer's processing_class.
      prompts: rows with a "prompt", text or messages, and columns for the reward functions; they are repeated
        without end.
      reward_functions: called with prompts=, completions=, completion_ids= and the columns, each a list with
        one item for each completion. They return one float for each completion, or None where they do not
        apply; the floats are added. Threads of several groups call them at the same time; asynchronous ones
        run in one event loop. A completion with an infinite reward counts as not scored, with a warning.
      args: the AsyncGRPOConfig.
      groups_ahead: how many groups are sampled at the same time, and how many may wait for the trainer.
    """

    def __init__(
        self,
        client: RolloutClient,
        tokenizer,
        prompts: Iterable[dict[str, Any]],
        reward_functions: Callable[..., list] | Sequence[Callable[..., list]],
        args,
        *,
        seed: int = 0,
        groups_ahead: int = 4,
    ):
        if groups_ahead < 1:
            raise ValueError(f"groups_ahead: expected at least 1, got {groups_ahead}")
        self._sample_type = _async_grpo().async_rollout_worker.RolloutSample
        self._client = client
        self._tokenizer = tokenizer
        self._prompts = prompts
        functions = reward_functions if isinstance(reward_functions, Sequence) else [reward_functions]
        self._stopping = threading.Event()
        self._rewards = Rewards(functions, self._stopping)
        self._sampling = sampling_of(args)
        self._chat_options = args.chat_template_kwargs or {}
        self._generations = args.num_generations
        self._seed = seed
        self._ahead = groups_ahead
        self._version_offset = 0
        self._requests: set[str] = set()  # ids of requests in flight
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._last_sign = 0.0
        self.rollout_buffer: queue.Queue = queue.Queue(maxsize=groups_ahead * self._generations)
        self.metrics_queue: queue.Queue = queue.Queue()

    def start(self) -> None:
        """Starts sampling."""
        if self._thread is not None:
            raise RuntimeError("RolloutWorker: already started")
        self._last_sign = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="isobit-rollout-worker", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops sampling. Requests in flight end early; returns once none is left."""
        self._stopping.set()
        if self._thread is not None:
            while self._thread.is_alive():
                if requests := list(self._requests):
                    self._client.abort(requests)
                self._thread.join(_POLL_S)

    def update_model_version(self, model_version: int) -> None:
        """Tells the worker which of the trainer's versions the rollout has now."""
        served = self._client.get_server_info().server.weight_version.id
        self._version_offset = served - model_version

    def check_health(self, stale_after_s: float) -> None:
        """Checks that sampling goes on.

        Raises:
          RuntimeError: sampling has failed, or no group was finished for `stale_after_s` seconds.
        """
        if self._error is not None:
            raise RuntimeError("the rollout worker has failed") from self._error
        age = time.monotonic() - self._last_sign
        if self._thread is not None and age > stale_after_s:
            raise RuntimeError(
                f"no group was finished for {age:.0f} s, expected one within {stale_after_s:.0f} s"
            )

    def _run(self) -> None:
        try:
            with self._rewards.running(), ThreadPoolExecutor(self._ahead) as pool:
                self._produce(pool)
        except BaseException as error:
            self._error = error
            logger.exception("the rollout worker has failed")

    def _produce(self, pool: ThreadPoolExecutor) -> None:
        rows = enumerate(_endless(self._prompts))
        drawn: deque[tuple[int, Future]] = deque()
        last_fruitful = -1  # the last pass over the prompts that gave a sample
        while not self._stopping.is_set():
            while len(drawn) < self._ahead:
                group, (turn, row) = next(rows)
                drawn.append((turn, pool.submit(self._group, group, row)))
            turn, future = drawn.popleft()
            try:
                samples = future.result()
            except InvalidArgumentError as error:
                if not is_of_prompt(error) or last_fruitful < turn - 1:
                    raise
                self._last_sign = time.monotonic()
                logger.warning("a prompt is skipped, since the rollout refuses it: %s", error.details)
                continue
            last_fruitful = turn
            for sample in samples:
                self._put(sample)

    def _put(self, sample) -> None:
        while not self._stopping.is_set():
            self._last_sign = time.monotonic()  # a full queue is not the worker's fault
            try:
                return self.rollout_buffer.put(sample, timeout=_POLL_S)
            except queue.Full:
                continue

    def _group(self, group: int, row: dict[str, Any]) -> list:
        """Returns the group's samples; none if the worker is stopped meanwhile."""
        prompt = row["prompt"]
        prompt_ids = _prompt_ids(self._tokenizer, prompt, self._chat_options)
        samples = None
        while samples is None or any(sample.finish_reason == "abort" for sample in samples):
            if self._stopping.is_set():
                return []
            samples = self._generate(group, prompt_ids)
        completion_ids = [sample.tokens.token_ids.tolist() for sample in samples]
        completions = _completions(self._tokenizer, prompt, completion_ids)
        scores = self._rewards.score(row, completions, completion_ids)
        if scores is None:
            return []
        return [
            self._training_sample(group, prompt, prompt_ids, *parts)
            for parts in zip(samples, completions, *scores, strict=True)
        ]

    def _generate(self, group: int, prompt_ids: list[int]) -> list[Sample]:
        request = str(uuid.uuid4())
        self._requests.add(request)
        try:
            return generate(
                self._client,
                prompt_ids,
                request_id=request,
                n=self._generations,
                seed=self._seed + group,
                **self._sampling,
            )
        finally:
            self._requests.discard(request)

    def _training_sample(self, group, prompt, prompt_ids, sample: Sample, completion, advantage, metrics):
        tokens = sample.tokens
        before = np.zeros(len(prompt_ids))
        return self._sample_type(
            prompt=prompt,
            completion=completion,
            input_ids=np.concatenate([prompt_ids, tokens.token_ids]).astype(np.int64),
            completion_mask=np.concatenate([before, np.ones(len(tokens.token_ids))]).astype(np.int64),
            old_log_probs=np.concatenate([before, tokens.logprobs]).astype(np.float32),
            advantage=float(advantage),
            model_version=int(tokens.weight_versions.min()) - self._version_offset,
            group_id=group,
            metrics=metrics,
            enqueued_at=time.time(),
        )


class RolloutFunction:
    """The rollout_func of a GRPOTrainer: sends the weights if a step has changed them, and samples.

    Each call uses new seeds, in a fixed order, so that a second run draws the same tokens.

    Args:
      client: a client of the rollout.
      weights: sends the trainer's weights to it.
    """

    def __init__(
        self, client: RolloutClient, weights: WeightTransfer, *, seed: int = 0, max_concurrency: int = 64
    ):
        self._client = client
        self._weights = weights
        self._seed = seed
        self._concurrency = max_concurrency
        self._synced_step: int | None = None
        self._drawn = 0

    def __call__(self, prompts: list, trainer) -> dict[str, list]:
        """Returns one completion for each prompt: prompt_ids, completion_ids and logprobs, lists of lists.

        Raises:
          InvalidArgumentError: the rollout refuses a prompt, such as one that fills the context; the message
            begins with the prompt's number. The trainer needs a completion for every prompt, so filter the
            dataset.
          RuntimeError: the rollout ended a request early.
        """
        if self._synced_step != trainer.state.global_step:
            self._send(trainer)
            self._synced_step = trainer.state.global_step
        sampling = sampling_of(trainer.args)
        chat_options = getattr(trainer.args, "chat_template_kwargs", None) or {}
        prompt_ids = [_prompt_ids(trainer.processing_class, prompt, chat_options) for prompt in prompts]
        ranks, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
        seeds = [self._seed + (self._drawn + i) * ranks + rank for i in range(len(prompts))]
        self._drawn += len(prompts)

        def one(number: int) -> Sample:
            try:
                (sample,) = generate(self._client, prompt_ids[number], seed=seeds[number], **sampling)
            except InvalidArgumentError as error:
                raise InvalidArgumentError(error.code, f"prompts[{number}]: {error.details}") from error
            if sample.finish_reason == "abort":
                raise RuntimeError(f"the rollout ended a request early: {sample.abort_reason}")
            return sample

        with ThreadPoolExecutor(self._concurrency) as pool:
            samples = list(pool.map(one, range(len(prompts))))
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [sample.tokens.token_ids.tolist() for sample in samples],
            "logprobs": [sample.tokens.logprobs.tolist() for sample in samples],
        }

    def _send(self, trainer) -> None:
        """Sends the weights. Every rank gathers them, the first sends them."""
        tensors = _whole_tensors(trainer.accelerator.unwrap_model(trainer.model))
        if trainer.accelerator.is_main_process:
            if self._synced_step is None:
                self._weights.init_weight_transfer()
            self._weights.send_weights(tensors)
        else:
            deque(tensors, maxlen=0)
        trainer.accelerator.wait_for_everyone()


def log_gap(trainer) -> None:
    """Makes a GRPOTrainer log the gap between the logprobs of its loss and the rollout's, over all tokens of
    a step: `sampling/sampling_logp_difference/mean` and `/max`, in nats. TRL itself logs these only with
    vLLM. If a difference is NaN, infinity is logged, since TRL leaves NaN out of its logs.

    Args:
      trainer: with a RolloutFunction, and not yet started. patch_trainer calls this itself.
    """
    score, compute_loss = trainer._get_per_token_logps_and_entropies, trainer._compute_loss
    own = None  # the logprobs in the loss

    def scored(*args, **kwargs):
        nonlocal own
        scores = score(*args, **kwargs)
        own = scores[0].detach()
        return scores

    def loss_and_gap(model, inputs):
        loss = compute_loss(model, inputs)
        drawn = inputs.get("sampling_per_token_logps")
        if drawn is not None:
            gaps = (own - drawn).abs()[inputs["completion_mask"].bool()].nan_to_num(nan=float("inf"))
            metrics = trainer._metrics["train" if trainer.model.training else "eval"]
            metrics[f"{_GAP}/mean"].append(trainer.accelerator.gather(gaps.mean()).mean().item())
            metrics[f"{_GAP}/max"].append(trainer.accelerator.gather(gaps.max()).max().item())
        return loss

    trainer._get_per_token_logps_and_entropies, trainer._compute_loss = scored, loss_and_gap


def _async_grpo():
    return require("trl.experimental.async_grpo", INSTALL)


def _whole_tensors(model) -> Iterator[tuple[str, Any]]:
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        yield name, whole.detach()


def _endless(rows: Iterable) -> Iterator[tuple[int, Any]]:
    """Yields the rows again and again, each with the number of the pass.

    Raises:
      ValueError: there are no rows.
    """
    for turn in itertools.count():
        row = None
        for row in rows:
            yield turn, row
        if row is None:
            raise ValueError(
                "prompts: expected rows" + (" that can be read more than once" if turn else ", got none")
            )


def _prompt_ids(tokenizer, prompt: str | list[dict], chat_options: dict[str, Any]) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    return list(
        tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **chat_options
        )["input_ids"]
    )


def _completions(tokenizer, prompt, completion_ids: list[list[int]]) -> list:
    texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    if isinstance(prompt, str):
        return texts
    return [[{"role": "assistant", "content": text}] for text in texts]
