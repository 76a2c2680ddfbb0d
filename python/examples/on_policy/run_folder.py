"""The folder of a run: metrics as JSON lines and for TensorBoard, checkpoints, and the run's recipe."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from completions import Completion
from learner import Learner
from ranks import from_rank_0, is_first
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils.tensorboard import SummaryWriter

from isobit.private_files import write_private


class RunFolder:
    """`metrics.jsonl` (one line a step), `tensorboard/`, `recipe.json`, `checkpoints/step-N/`, `model/`, and
    on request `models/step-N/`.

    Every rank makes one and calls the same methods; metrics are written by rank 0.
    """

    def __init__(self, path: Path, recipe: dict[str, Any], resume: bool, keep: int = 2):
        """keep: how many checkpoints to keep, the latest.

        Raises:
            ValueError: there is a run already and resume is False; or it has another recipe.
        """
        self.path = path
        self._keep = keep
        self._metrics = path / "metrics.jsonl"
        self._recipe = path / "recipe.json"
        self._writer: SummaryWriter | None = None
        recipe = json.loads(json.dumps(recipe))  # as it is read back
        if self._recipe.exists():
            if not resume:
                raise ValueError(f"{path} holds a run: --resume goes on with it, or give another --output")
            was = json.loads(self._recipe.read_text("utf-8"))
            if changed := [name for name in {**was, **recipe} if was.get(name) != recipe.get(name)]:
                told = ", ".join(f"{name} was {was.get(name)} and is {recipe.get(name)}" for name in changed)
                raise ValueError(f"{path} holds another run: {told}")
        dist.barrier()  # every rank has looked
        if is_first():
            path.mkdir(parents=True, exist_ok=True)
            _write(self._recipe, json.dumps(recipe, indent=1))

    def _checkpoints(self) -> list[Path]:
        """The whole ones, the latest last."""
        return sorted((self.path / "checkpoints").glob("step-????????"))

    def save(self, learner: Learner, step: int, ahead: list[Completion] | None) -> None:
        """Saves all that decides about the steps after `step`; does nothing where that is saved already.

        ahead: completions that were drawn already.
        """
        # Before the first step there is no state of the optimizer, and nothing to lose.
        target = self.path / "checkpoints" / f"step-{step:08}"
        if step == 0 or target.exists():
            return
        partial = target.with_suffix(".partial")
        dcp.save(_state(learner), checkpoint_id=partial)
        dist.barrier()
        if is_first():
            drawn = None if ahead is None else [completion.to_json() for completion in ahead]
            # It may hold prompts and tokens.
            write_private(partial / "run.json", json.dumps({"step": step, "ahead": drawn}))
            os.replace(partial, target)
            for old in self._checkpoints()[: -self._keep]:
                shutil.rmtree(old)
        dist.barrier()

    def save_model(self, learner: Learner, like: Path, step: int | None = None) -> None:
        """Writes the weights as a model directory, which the services can serve: `models/step-N/` of a step,
        else `model/`.

        like: the model directory from which the run began.
        """
        weights = learner.weights()
        name = "model" if step is None else f"models/step-{step:08}"
        from_rank_0("writing the model", lambda: _write_model(weights, like, self.path / name))

    def load(self, learner: Learner) -> tuple[int, list[Completion] | None]:
        """Puts the latest checkpoint into the learner. Returns its step and its completions drawn ahead; step
        0 if there is none. Metrics of later steps go."""
        checkpoints = self._checkpoints()
        step, ahead = 0, None
        if checkpoints:
            state = _state(learner)
            dcp.load(state, checkpoint_id=checkpoints[-1])
            learner.model.load_state_dict(state["model"])
            set_optimizer_state_dict(learner.model, learner.optimizer, state["optimizer"])
            run = json.loads((checkpoints[-1] / "run.json").read_text("utf-8"))
            step = run["step"]
            ahead = None if run["ahead"] is None else [Completion.from_json(c) for c in run["ahead"]]
        if is_first():
            text = self._metrics.read_text("utf-8") if self._metrics.exists() else ""
            lines = text.split("\n")[:-1]  # behind the last line's end: nothing, or a line that was cut short
            kept = [line for line in lines if json.loads(line)["step"] <= step]
            _write(self._metrics, "".join(f"{line}\n" for line in kept))
            self._writer = SummaryWriter(str(self.path / "tensorboard"), purge_step=step + 1)
        return step, ahead

    def add(self, step: int, values: dict[str, Any]) -> None:
        """The metrics of a step; TensorBoard shows those that are numbers."""
        if not is_first():
            return
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            parts = value if isinstance(value, dict) else {"": value}
            for part, number in parts.items():
                if isinstance(number, int | float):
                    self._writer.add_scalar(f"{name}/{part}".rstrip("/"), number, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _state(learner: Learner) -> dict[str, Any]:
    optimizer = get_optimizer_state_dict(learner.model, learner.optimizer)
    return {"model": learner.model.state_dict(), "optimizer": optimizer}


def _write(path: Path, text: str) -> None:
    """Replaces a file at once, so that it is never half written."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, "utf-8")
    os.replace(partial, path)


def _write_model(weights: dict[str, Tensor], like: Path, folder: Path) -> None:
    """Makes `folder` a model directory of these weights, with config, tokenizer and template of `like`."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in like.iterdir():
        if file.suffix in (".json", ".jinja", ".txt") and not file.name.endswith(".index.json"):
            shutil.copy(file, folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
