"""A run that is saved as plain bf16 parameters with masters, or as FSDP2's fp32 shards, goes on in either
form on any number of ranks, with the bits of one that never stopped; and states that do
not fit are refused."""

import tempfile
import unittest
from collections.abc import Callable

import torch
import torch.distributed.checkpoint as dcp
from support import random_sequences, run_ranks, same_bits
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as sd
from training_test import LANES, LENGTHS, PACK_TOKENS, make_qwen3, run_step, whole

from isobit.torch import AdamW, clip_grad_norm_, fully_shard, plan

SAVED, STEPS = 2, 3
FORMS = ("plain", "fsdp2")
CUT = plan(LENGTHS, PACK_TOKENS, LANES)
DATA = random_sequences(LENGTHS, 83)
FULL = sd.StateDictOptions(full_state_dict=True)


def made(form: str) -> tuple[nn.Module, AdamW]:
    model = make_qwen3()
    if form == "fsdp2":
        fully_shard(model.float())
    return model, AdamW(model.named_parameters(), lr=0.01)


def steps(model: nn.Module, optimizer: AdamW, count: int, rank: int = 0, world: int = 1) -> None:
    for _ in range(count):
        run_step(model, CUT, rank, world, None, DATA)
        clip_grad_norm_(model.named_parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def masters(model: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    """Masters and moments, whole."""
    found = {}
    for name, p in model.named_parameters():
        state = optimizer.state[p]
        found[name] = whole(p if p.dtype == torch.float32 else state["master"])
        found[f"{name} m"], found[f"{name} v"] = whole(state["exp_avg"]), whole(state["exp_avg_sq"])
    return found


def save(rank: int, world: int, form: str, folder: str, count: int) -> dict:
    """Saves by torch.distributed.checkpoint, and returns full state dicts."""
    model, optimizer = made(form)
    steps(model, optimizer, count, rank, world)
    model_state, optimizer_state = sd.get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    weights, states = sd.get_state_dict(model, optimizer, options=FULL)
    return {"model": {n: t.clone() for n, t in weights.items()}, "optimizer": states}


def resume(rank: int, world: int, form: str, folder: str, full: dict, how: str) -> dict[str, Tensor]:
    model, optimizer = made(form)
    if how == "dcp":
        weights, states = sd.get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
        model.load_state_dict(weights)
        sd.set_optimizer_state_dict(model, optimizer, states)
    elif how == "full":
        sd.set_state_dict(model, optimizer, model_state_dict=full["model"],
                          optim_state_dict=full["optimizer"], options=FULL)  # fmt: skip
    else:  # onto a run with steps behind it, the optimizer after the model
        steps(model, optimizer, 1, rank, world)
        sd.set_model_state_dict(model, full["model"], options=FULL)
        sd.set_optimizer_state_dict(model, optimizer, full["optimizer"], options=FULL)
    steps(model, optimizer, STEPS - SAVED, rank, world)
    return masters(model, optimizer)


def flattened(rank: int, world: int, form: str) -> bool:
    """Whether a fresh optimizer takes a flat state as it was."""
    options = sd.StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = made(form)
    steps(model, optimizer, 1, rank, world)
    expected = masters(model, optimizer)
    states = sd.get_optimizer_state_dict(model, optimizer, options=options)
    other = AdamW(model.named_parameters(), lr=0.01)
    sd.set_optimizer_state_dict(model, other, states, options=options)
    found = masters(model, other)
    return all(same_bits(found[name], t) for name, t in expected.items())


class CheckpointTest(unittest.TestCase):
    def resumes(self, saver: str, saver_world: int, cases: list[tuple[str, int, str]], count: int) -> None:
        model, optimizer = made("plain")
        steps(model, optimizer, count + STEPS - SAVED)
        expected = masters(model, optimizer)
        with tempfile.TemporaryDirectory() as folder:
            full = run_ranks(saver_world, save, saver, folder, count)[0]
            for form, world, how in cases:
                for found in run_ranks(world, resume, form, folder, full, how):
                    same = [same_bits(found[name], t) for name, t in expected.items()]
                    self.assertTrue(all(same), (saver, saver_world, form, world, how))

    # INVARIANT: plain and FSDP2, each into the other: equal bits on 1, 2 and 4 ranks.
    def test_from_plain(self):
        self.resumes("plain", 1, [("plain", 1, "dcp"), ("fsdp2", 1, "dcp"), ("fsdp2", 2, "dcp"),
                                  ("fsdp2", 4, "dcp")], SAVED)  # fmt: skip

    def test_from_plain_whole(self):
        self.resumes("plain", 1, [("plain", 1, "full"), ("fsdp2", 1, "full"), ("fsdp2", 2, "full"),
                                  ("fsdp2", 4, "again"), ("plain", 1, "again")], SAVED)  # fmt: skip

    def test_from_fsdp2(self):
        self.resumes("fsdp2", 2, [("plain", 1, "dcp"), ("fsdp2", 1, "dcp"), ("fsdp2", 4, "dcp"),
                                  ("plain", 1, "full"), ("plain", 1, "again"), ("fsdp2", 4, "full")],
                     SAVED)  # fmt: skip
        self.resumes("fsdp2", 4, [("plain", 1, "dcp"), ("fsdp2", 2, "again")], SAVED)

    # INVARIANT: a fresh optimizer has a state, as torch's, and to ask for it changes nothing.
    def test_before_the_first_step(self):
        for form in FORMS:
            self.resumes(form, 1, [("plain", 1, "dcp"), ("fsdp2", 2, "dcp"), ("plain", 1, "full")], 0)
        for form in FORMS:
            self.assertTrue(run_ranks(1, flattened, form)[0], form)

    def test_masters_follow_the_weights_until_the_first_step(self):
        model, optimizer = made("plain")
        optimizer.state_dict()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        expected = {n: p.detach().float() for n, p in model.named_parameters()}
        state = optimizer.state_dict()["state"]
        for index, (name, parameter) in enumerate(model.named_parameters()):
            self.assertTrue(same_bits(state[index]["master"], expected[name]), name)
            self.assertIs(optimizer.param_groups[0]["params"][index], parameter)

    def refuses(self, error: type, message: str, work: Callable) -> None:
        with self.assertRaisesRegex(error, message):
            work()

    def test_weights_of_another_run(self):
        model, optimizer = made("plain")
        steps(model, optimizer, 2)
        other, fresh = made("plain")
        fresh.load_state_dict(optimizer.state_dict())
        run_step(other, CUT, 0, 1, None, DATA)
        before = [p.detach().clone() for p in other.parameters()]
        self.refuses(RuntimeError, "expected the weights that belong to the loaded masters",
                     fresh.step)  # fmt: skip
        self.assertTrue(all(map(same_bits, before, [p.detach() for p in other.parameters()])))
        other.load_state_dict(model.state_dict())
        fresh.step()

    # A state whose masters were the fp32 weights, as FSDP2's without "master", into bf16 parameters.
    def test_masters_that_are_lost(self):
        model, optimizer = made("plain")
        steps(model, optimizer, 1)
        state = optimizer.state_dict()
        for values in state["state"].values():
            del values["master"]
        self.refuses(ValueError, "model.embed_tokens.weight: expected a master with moments in float32",
                     lambda: made("plain")[1].load_state_dict(state))  # fmt: skip
        wrong = optimizer.state_dict()
        wrong["state"][0]["exp_avg"] = torch.zeros(3)
        self.refuses(ValueError, r"exp_avg: expected \[83, 40\], as the parameter, got \[3\]",
                     lambda: made("plain")[1].load_state_dict(wrong))  # fmt: skip


if __name__ == "__main__":
    unittest.main()
