"""True on-policy RL (GRPO, REINFORCE): sample, train, send the weights, sample again.

    torchrun --nproc-per-node 2 python/examples/on_policy/train.py --model models/my-model \
        --rollout 127.0.0.1:7001 --scorer 127.0.0.1:7002 --comparator 127.0.0.1:7003 \
        --task arithmetic --output runs/first

Sampler and trainer compute every logprob with the same bits; the run checks each and stops if one differs.
The weights after each step do not depend on the number of processes, the rollout's tensor-parallel size, or
stops in between. Without torchrun it is one process. docs/on_policy.md has the rest.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from completions import Completion, advantages, deviation, mean, staleness
from gap import Gap, GapError
from learner import Learner, Recipe
from ranks import RunError, Stopped, StopSignal, is_first, join
from run_folder import RunFolder
from sampler import Draw, Sampler
from tasks import load_task
from vanilla import VanillaLearner

from isobit.command_line import Parser
from isobit.errors import IsobitError

if TYPE_CHECKING:
    from isobit.trainer_metrics import TrainerMetrics

LEARNERS = {"tree": Learner, "vanilla": VanillaLearner}
# Flags that say where and how long to run; all others decide about the weights and stay as they are.
NO_RECIPE = (
    "rollout", "scorer", "comparator", "output", "resume", "steps", "save_every", "models_every",
    "device", "lanes_per_pass", "on_gap", "transport", "metrics_port",
)  # fmt: skip


class Clock:
    """Seconds by part of a step."""

    def __init__(self):
        self.parts: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, part: str) -> None:
        now = time.monotonic()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now


class Run:
    """One run, from where its folder stands to the last step."""

    def __init__(
        self,
        options: argparse.Namespace,
        learner: Learner,
        sampler: Sampler,
        folder: RunFolder,
        metrics: "TrainerMetrics | None" = None,
    ):
        self._options = options
        self._model = options.model
        self._learner = learner
        self._sampler = sampler
        self._folder = folder
        self._metrics = metrics
        self._by_deviation = options.algorithm == "grpo"

    def run(self, stop: StopSignal) -> None:
        step, ahead = self._folder.load(self._learner)
        if step:
            say(f"goes on after step {step}")
        digest = self._sampler.sync(self._learner, step)
        self._keep_model(step)
        try:
            while step < self._options.steps:
                stop.check()
                clock = Clock()
                values, next_ahead = self._gradient_of(step, ahead, clock)
                values["grad_norm"] = self._learner.step()
                clock.lap("train")
                # From here on the step counts; a signal waits.
                step, ahead = step + 1, next_ahead
                digest = self._sampler.sync(self._learner, step)
                clock.lap("sync")
                self._folder.add(step, {**values, "weights_digest": digest, "seconds": clock.parts})
                self._tell(step, values, clock)
                if self._metrics is not None:
                    self._metrics.add_step(
                        step,
                        reward=values["reward"],
                        staleness=values["staleness"],
                        seconds=clock.parts,
                    )
                if step % self._options.save_every == 0:
                    self._folder.save(self._learner, step, ahead)
                self._keep_model(step)
        except Stopped:
            self._learner.drop()
            say(f"stopped after step {step}; --resume goes on")
        self._folder.save(self._learner, step, ahead)
        self._folder.save_model(self._learner, self._model)
        say(f"weights after step {step}: {digest}")

    def _keep_model(self, step: int) -> None:
        if self._options.models_every and step % self._options.models_every == 0:
            self._folder.save_model(self._learner, self._model, step)

    def _gradient_of(
        self, step: int, ahead: list[Completion] | None, clock: Clock
    ) -> tuple[dict[str, Any], list[Completion] | None]:
        """Samples and differentiates. Saves the run as it was before the step if that fails.

        Returns:
            The step's metrics, and the completions that were drawn ahead.
        """
        try:
            one_step = self._one_step_off if self._options.one_step_off else self._on_policy
            return one_step(step, ahead, clock)
        except RunError:
            self._learner.drop()
            self._folder.save(self._learner, step, ahead)
            raise

    def _on_policy(self, step: int, _, clock: Clock) -> tuple[dict[str, Any], None]:
        """Samples and differentiates one batch, with the same weights."""
        batch = self._sampler.sample(step)
        clock.lap("sample")
        logprobs, entropy = self._gradients(batch, step)
        clock.lap("train")
        gap = self._check(batch, logprobs, step)
        clock.lap("compare")
        return self._values(batch, step, entropy, [gap]), None

    def _one_step_off(
        self, step: int, ahead: list[Completion] | None, clock: Clock
    ) -> tuple[dict[str, Any], list[Completion]]:
        """Differentiates the batch that was drawn a step ago, while the next one is drawn. Each batch is
        compared while the trainer still has the weights that drew it."""
        gaps = []
        if ahead is None:  # a run begins on-policy
            ahead = self._sampler.sample(step)
            clock.lap("sample")
            gaps.append(self._check(ahead, self._learner.score(ahead), step))
            clock.lap("compare")
        drawing = self._sampler.start(step + 1)
        _, entropy = self._gradients(ahead, step)
        clock.lap("train")
        next_ahead = self._sampler.join(drawing)
        clock.lap("sample")
        gaps.append(self._check(next_ahead, self._learner.score(next_ahead), step))
        clock.lap("compare")
        return self._values(ahead, step, entropy, gaps), next_ahead

    def _gradients(self, batch: list[Completion], step: int) -> tuple[list[np.ndarray], float]:
        rewards = [completion.reward for completion in batch]
        values = advantages(rewards, self._options.samples, self._by_deviation)
        return self._learner.gradients(batch, values, step)

    def _check(self, drawn: list[Completion], logprobs: list[np.ndarray], step: int) -> Gap:
        """The gap of a batch that the present weights drew."""
        if (stale := staleness(drawn, step)).any():
            raise RunError(
                f"step {step + 1}: expected tokens of the present weights, got some {stale.max()} steps old"
            )
        gap = Gap.between(drawn, logprobs)
        self._sampler.record(logprobs, gap)
        if self._metrics is not None:
            self._metrics.add_comparison(
                tokens=gap.tokens,
                unequal=gap.unequal,
                max_abs_dlogp=gap.max_abs_dlogp,
                kl_k1=gap.kl_k1,
                kl_k2=gap.kl_k2,
                kl_k3=gap.kl,
                impossible=gap.impossible,
            )
        if (gap.unequal or gap.impossible) and self._options.on_gap == "stop":
            raise GapError(
                f"step {step + 1}: {gap.unequal} of {gap.tokens} tokens have another logprob in the trainer"
                f" than in the rollout, by up to {gap.max_abs_dlogp:.3g}, and {gap.impossible} one that no"
                f" token is drawn with; the first is {gap.first}. --on_gap report would go on."
            )
        return gap

    def _values(self, batch: list[Completion], step: int, entropy: float, gaps: list[Gap]) -> dict[str, Any]:
        """The step's metrics: of the batch that was trained on, and of the gaps of what was drawn."""
        gap = sum(gaps[1:], gaps[0])
        rewards = [completion.reward for completion in batch]
        stale = staleness(batch, step)
        return {
            "reward": mean(rewards),
            "reward_deviation": deviation(rewards),
            "tokens": len(stale),
            "staleness": float(stale.mean()),
            "entropy": entropy,
            "compared": gap.tokens,
            "unequal": gap.unequal,
            "max_abs_dlogp": gap.max_abs_dlogp,
            "kl": gap.kl,
        }

    def _tell(self, step: int, values: dict[str, Any], clock: Clock) -> None:
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in clock.parts.items())
        say(
            f"step {step}/{self._options.steps}  reward {values['reward']:.3f}"
            f"  unequal {values['unequal']} of {values['compared']}  KL {values['kl']:.3g}"
            f"  {sum(clock.parts.values()):.1f} s ({parts})"
        )


def say(text: str) -> None:
    if is_first():
        print(text, flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def add(group, name: str, default: Any, text: str, **more) -> None:
        if default is not None and default is not False:
            text += f" (default: {default})"
        if default is False:
            more["action"] = "store_true"
        elif "choices" not in more and "type" not in more:
            more["type"] = type(default)
        group.add_argument(f"--{name}", default=default, help=text.replace("%", "%%"), **more)

    g = parser.add_argument_group("services, each HOST:PORT")
    g.add_argument("--rollout", required=True, help="samples, in the mode of --numerics")
    g.add_argument("--scorer", help="is kept on the same weights as well")
    g.add_argument("--comparator", help="is given both sides' logprobs of every step")
    add(g, "transport", "stream", "how weights go there; cuda_ipc: services on GPUs of this host read them in"
        " this trainer's memory; nccl: from GPU to GPU, which must be others than the services'",
        choices=("stream", "cuda_ipc", "nccl"))  # fmt: skip
    g = parser.add_argument_group("run")
    g.add_argument(
        "--model",
        type=Path,
        required=True,
        help="the model that the services serve, a directory; the run begins there",
    )
    g.add_argument("--output", type=Path, required=True, help="the run's folder: metrics, checkpoints")
    add(g, "resume", False, "go on from the folder's latest checkpoint, with any number of processes")
    add(g, "steps", 100, "optimizer steps in all")
    add(g, "save_every", 10, "steps between checkpoints; two are kept")
    add(g, "models_every", 0, "steps between weights that are kept as model directories, models/step-N;"
        " 0: only model/ at the end")  # fmt: skip
    add(
        g, "device", "cuda" if torch.cuda.is_available() else "cpu", "where to train", choices=("cpu", "cuda")
    )
    add(g, "metrics_port", None, "serve metrics for Prometheus there, on 127.0.0.1; 0 chooses one", type=int)
    add(g, "on_gap", None, "what a logprob does that differs: stop the run (default in tree), or only be"
        " reported (in vanilla)", choices=("stop", "report"))  # fmt: skip
    g = parser.add_argument_group("what decides about the weights; may not change on --resume")
    add(g, "task", "share", "arithmetic, share, or your own as module:Class")
    add(g, "algorithm", "grpo", "reinforce has the group's mean as its baseline, and nothing clipped",
        choices=("grpo", "reinforce"))  # fmt: skip
    add(g, "numerics", "tree", "tree: isobit's kernels; vanilla: transformers' own, for comparison",
        choices=tuple(LEARNERS))  # fmt: skip
    add(g, "one_step_off", False, "sample the next batch while training on the last")
    add(
        g,
        "correction",
        0.0,
        "vanilla: weigh tokens by trainer's over rollout's probability, up to this; 0: don't",
    )
    add(g, "prompts", 8, "a step")
    add(g, "samples", 8, "of each prompt, its group")
    add(g, "max_tokens", 64, "of a completion")
    add(g, "temperature", 1.0, "of the draw")
    add(g, "seed", 1, "of the draw, below 2^32")
    add(g, "lr", 1e-6, "learning rate")
    add(g, "weight_decay", 0.0, "of AdamW")
    add(g, "max_norm", 1.0, "to which gradients are clipped")
    add(g, "clip", 0.2, "grpo: by how much a stale token's ratio may leave 1")
    add(g, "pack_tokens", 4096, "tokens of a pack")
    add(g, "lanes", 8, "a power of two: the most processes that can ever share a step")
    add(g, "lanes_per_pass", None, "fewer take less memory and more time; changes no bit", type=int)
    options = parser.parse_args(arguments)
    for name in ("steps", "save_every", "prompts", "samples", "max_tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(options, name)}")
    if options.models_every < 0:
        parser.error(f"--models_every: expected 0 or more, got {options.models_every}")
    if not 0 <= options.seed < 2**32:
        parser.error(f"--seed: expected 0 to 2^32 - 1, got {options.seed}")
    for name, expected, holds in (  # no comparison holds for NaN
        ("temperature", "0.001 to 1000", lambda x: 0.001 <= x <= 1000),
        ("lr", "0 or more, finite", lambda x: 0 <= x < math.inf),
        ("weight_decay", "0 or more, finite", lambda x: 0 <= x < math.inf),
        ("max_norm", "above 0", lambda x: x > 0),
        ("clip", "0 to 1", lambda x: 0 <= x <= 1),
        ("correction", "0 or more", lambda x: x >= 0),
    ):
        if not holds(getattr(options, name)):
            parser.error(f"--{name}: expected {expected}, got {getattr(options, name)}")
    if options.correction and options.numerics != "vanilla":
        parser.error("--correction: only with --numerics vanilla; in tree there is nothing to correct")
    options.on_gap = options.on_gap or ("report" if options.numerics == "vanilla" else "stop")
    return options


def serve_metrics(port: int | None, stack: ExitStack) -> "TrainerMetrics | None":
    """The first process's metrics, served until the stack ends; None on other ones, or without a port."""
    if port is None or not is_first():
        return None
    from isobit.trainer_metrics import TrainerMetrics  # needs prometheus_client, which a run can do without

    metrics = stack.enter_context(closing(TrainerMetrics()))
    say(f"metrics at http://127.0.0.1:{metrics.serve(port)}/metrics")
    return metrics


def train(options: argparse.Namespace, stop: StopSignal) -> None:
    device = join(options.device)
    model = options.model
    recipe = Recipe(
        temperature=options.temperature,
        clip_low=options.clip if options.algorithm == "grpo" else 1.0,
        clip_high=options.clip if options.algorithm == "grpo" else math.inf,
        lr=options.lr,
        betas=(0.9, 0.999),
        weight_decay=options.weight_decay,
        max_norm=options.max_norm,
        pack_tokens=options.pack_tokens,
        lanes=options.lanes,
        lanes_per_pass=options.lanes_per_pass,
        correction=options.correction,
    )
    draw = Draw(options.prompts, options.samples, options.max_tokens, options.temperature, options.seed)
    kept = {name: value for name, value in vars(options).items() if name not in NO_RECIPE}
    kept["model"] = str(model.resolve())
    sampler = Sampler(
        load_task(options.task, model), draw, stop, options.rollout, options.scorer, options.comparator,
        options.transport,
    )  # fmt: skip
    with closing(sampler):
        if (mode := sampler.numerics()) != options.numerics:
            raise ValueError(f"--numerics: expected the rollout's, {mode}, got {options.numerics}")
        say(f"{model.name}, {options.task}, {options.algorithm}, {mode}, {dist.get_world_size()} processes")
        with closing(RunFolder(options.output, kept, options.resume)) as folder:
            learner = LEARNERS[options.numerics](model, recipe, device, stop)
            with ExitStack() as stack:
                Run(options, learner, sampler, folder, serve_metrics(options.metrics_port, stack)).run(stop)


def main() -> int:
    options = parse()
    try:
        train(options, StopSignal())
        dist.barrier()  # nobody leaves while another still reads from it
    except (RunError, IsobitError, ValueError, OSError, FloatingPointError) as error:
        if not dist.is_initialized() or is_first():
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is written and closed. Python's own end can abort the process, if a thread of PyTorch wakes then.
    os._exit(status)
