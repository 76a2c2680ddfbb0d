"""Steps of small models, one of the operators and one of transformers: the same bits for every number of
ranks and cut of memory."""

import tempfile
import unittest
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import Model, batch_of, random_sequences, run_ranks, same_bits
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from transformers import Qwen3Config, Qwen3ForCausalLM

from isobit.torch import (
    AdamW,
    GradientSum,
    TreeReduceScatter,
    accumulate_slots,
    clip_grad_norm_,
    fully_shard,
    keep_fp32_gradients,
    logprobs,
    patch,
    plan,
)
from isobit.torch import functional as F

LENGTHS = [9, 5, 12, 3, 7, 17, 2, 6, 11, 4, 8, 5]
LANES, PACK_TOKENS, STEPS, SAVED = 4, 16, 5, 3


def whole(t: Tensor) -> Tensor:
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().cpu().clone()


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def run_step(model, cut, rank: int, world: int, lanes_per_pass: int | None, data) -> None:
    model.zero_grad()
    total = GradientSum(model.parameters(), cut.passes_per_slot(world, lanes_per_pass))
    device = next(model.parameters()).device
    for part in cut.passes(rank, world, lanes_per_pass):
        loss_of(model, *batch_of(part, *data, device)).backward()
        total.add_pass()
    total.finish()


def loss_of(model, batch, advantages: Tensor) -> Tensor:
    if isinstance(model, Model):
        return model(batch, advantages)
    return F.policy_loss(logprobs(model, batch).logprobs, advantages, torch.full_like(advantages, 1 / 64))


def make_qwen3() -> Qwen3ForCausalLM:
    """Patched, with tied weights, in bf16."""
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=83, hidden_size=40, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, initializer_range=0.2,
        tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    return patch(Qwen3ForCausalLM(config).to(torch.bfloat16).train())


def train(
    model, rank: int, world: int, lanes_per_pass: int | None, folder: str = ""
) -> list[dict[str, Tensor]]:
    """Gradients and clip norm of each step, then masters and moments. With a folder: stops after SAVED
    steps and saves there; or goes on from what is saved there."""
    data = random_sequences(LENGTHS, 83)
    cut = plan(LENGTHS, PACK_TOKENS, LANES)
    optimizer = AdamW(model.parameters(), lr=0.01)
    resumed = bool(folder) and (Path(folder) / ".metadata").exists()
    if resumed:
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    results = []
    for _ in range(SAVED if resumed else 0, STEPS if resumed or not folder else SAVED):
        run_step(model, cut, rank, world, lanes_per_pass, data)
        results.append(gradients(model))
        norm = clip_grad_norm_(model.named_parameters(), 0.5)
        results[-1]["norm"] = norm
        optimizer.step()
    if folder and not resumed:
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=folder)
    final = {}
    for name, p in model.named_parameters():
        state = optimizer.state[p]
        final[name] = whole(state.get("master", p))
        final[name + " m"], final[name + " v"] = whole(state["exp_avg"]), whole(state["exp_avg_sq"])
    return [*results, final]


def train_alone(lanes_per_pass: int | None) -> list[dict[str, Tensor]]:
    model = Model()
    keep_fp32_gradients(model)
    return train(model, 0, 1, lanes_per_pass)


def train_sharded(rank: int, world: int, lanes_per_pass: int | None) -> list[dict[str, Tensor]]:
    model = Model(dtype=torch.float32)
    return train(fully_shard(model, blocks=model.layers), rank, world, lanes_per_pass)


def train_qwen3(
    rank: int, world: int, lanes_per_pass: int | None, folder: str = "", device: str = "cpu"
) -> list[dict[str, Tensor]]:
    """On FSDP2 if there is a group, with activations recomputed."""
    model = make_qwen3().to(device)
    if dist.is_initialized():
        model.gradient_checkpointing_enable({"use_reentrant": False})
        fully_shard(model.float())
    return train(model, rank, world, lanes_per_pass, folder)


def train_sharded_plainly(rank: int, world: int) -> list[dict[str, Tensor]]:
    """Controls: FSDP2's own reduce-scatter."""
    model = Model(dtype=torch.float32)
    fully_shard(model, blocks=model.layers)

    class Plain(TreeReduceScatter):
        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
            dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group)

    for module in (*model.layers, model):
        module.set_custom_reduce_scatter(Plain())
    return train(model, rank, world, None)


class TrainingTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.expected = train_alone(None)

    def same(self, results: list[dict[str, Tensor]], expected: list[dict[str, Tensor]] | None = None) -> bool:
        pairs = zip(results, expected or self.expected, strict=True)
        return all(same_bits(a[name], b[name]) for a, b in pairs for name in b)

    def test_the_batch_has_several_slots(self):
        cut = plan(LENGTHS, PACK_TOKENS, LANES)
        self.assertEqual((len(cut.packs), cut.slots), (7, 2))  # one lane of the last slot is empty

    # INVARIANT: how many lanes a pass has changes no bit.
    def test_lanes_per_pass(self):
        for lanes_per_pass in (1, 2):
            self.assertTrue(self.same(train_alone(lanes_per_pass)), lanes_per_pass)

    # INVARIANT: nor how many ranks there are.
    def test_ranks(self):
        for world, lanes_per_pass in ((1, None), (2, None), (2, 1), (4, None)):
            for results in run_ranks(world, train_sharded, lanes_per_pass):
                self.assertTrue(self.same(results), (world, lanes_per_pass))

    # INVARIANT: the same of a patched model of transformers, with tied weights and recomputed activations.
    def test_qwen3(self):
        expected = train_qwen3(0, 1, None)
        self.assertTrue(self.same(train_qwen3(0, 1, 1), expected))
        for world, lanes_per_pass in ((1, 2), (2, None), (4, None)):
            for results in run_ranks(world, train_qwen3, lanes_per_pass):
                self.assertTrue(self.same(results, expected), (world, lanes_per_pass))

    # INVARIANT: a run that was saved and went on, on another number of ranks, has the bits of one that never
    # stopped.
    def test_resumed(self):
        expected = train_qwen3(0, 1, None)
        for worlds in ((2, 4), (4, 1)):
            with tempfile.TemporaryDirectory() as folder:
                first = run_ranks(worlds[0], train_qwen3, None, folder)[0]
                second = run_ranks(worlds[1], train_qwen3, None, folder)[0]
            self.assertEqual(len(second), STEPS - SAVED + 1)
            self.assertTrue(self.same(first[:SAVED] + second, expected), worlds)

    def test_controls_differ(self):
        self.assertFalse(self.same(run_ranks(4, train_sharded_plainly)[0]), "plain reduce-scatter")
        model = Model()
        keep_fp32_gradients(model)
        accumulate_slots(model)  # though passes are not slots
        data = random_sequences(LENGTHS, 83)
        for part in plan(LENGTHS, PACK_TOKENS, LANES).passes(0, 1, 1):
            model(*batch_of(part, *data)).backward()
        chain = gradients(model)
        self.assertFalse(all(same_bits(chain[name], t) for name, t in self.expected[0].items()), "plain +=")

    def test_gradients_that_autograd_rounds_differ(self):
        model = Model()
        (part, *_) = plan(LENGTHS, PACK_TOKENS, LANES).passes(0, 1)
        data = random_sequences(LENGTHS, 83)
        model(*batch_of(part, *data)).backward()
        self.assertEqual({g.dtype for g in gradients(model).values()}, {torch.bfloat16}, "control")


if __name__ == "__main__":
    unittest.main()
