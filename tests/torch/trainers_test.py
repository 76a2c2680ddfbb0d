"""What trainers put around a patched model: DDP, FSDP1, autocast, optimizers of torch, PEFT. It works with
the same bits, or the error says what to do."""

import unittest
from collections.abc import Callable

import torch
from accumulation_test import refusal
from patch_test import gradients, make, scored, sequences
from support import run_ranks, same_bits
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from isobit.torch import Batch, fully_shard, logprobs, model_digest, named_weights, patch

BATCH = Batch.of(sequences())


def in_ddp(rank: int, world: int) -> list[str]:
    model = DistributedDataParallel(patch(make("Llama")))
    ids = sequences()[1][None]
    said = [refusal(lambda: model(input_ids=ids, labels=ids)), refusal(lambda: logprobs(model, BATCH))]
    with torch.no_grad():
        return [*said, refusal(lambda: model(input_ids=ids, labels=ids))]


def in_fsdp1(rank: int, world: int, use_orig_params: bool) -> list[str]:
    """What is said by digest and weights, a pass without gradients, one with them."""
    model = FullyShardedDataParallel(
        patch(make("Llama")), device_id=torch.device("cpu"), use_orig_params=use_orig_params
    )
    ids = sequences()[1][None]
    said = [refusal(lambda: model_digest(model)), refusal(lambda: named_weights(model))]
    with torch.no_grad():
        said.append(refusal(lambda: model(input_ids=ids, labels=ids)))
    return [*said, refusal(lambda: model(input_ids=ids, labels=ids))]


def gathered_from_fsdp1(rank: int, world: int) -> str:
    model = FullyShardedDataParallel(make("Llama"), device_id=torch.device("cpu"), use_orig_params=True)
    with FullyShardedDataParallel.summon_full_params(model):
        return model_digest(model)


def in_fsdp2(rank: int, world: int) -> str:
    return model_digest(fully_shard(make("Llama").float()))


class TrainersTest(unittest.TestCase):
    def test_ddp(self):
        with_gradients, unpatched, without = run_ranks(2, in_ddp)[0]
        self.assertIn("expected isobit.torch.fully_shard, got DistributedDataParallel", with_gradients)
        self.assertIn("got DistributedDataParallel: patch the model inside; for several ranks", unpatched)
        self.assertEqual(without, "no error")

    # INVARIANT: a model's digest is the same on every rank, or an error.
    def test_fsdp1(self):
        expected = model_digest(make("Llama"))
        for use_orig_params in (True, False):
            for said in run_ranks(2, in_fsdp1, use_orig_params):
                for of_weights in said[:2]:
                    self.assertRegex(of_weights, r"weight: expected \[\d+, 48\], got .* FSDP1")
                self.assertEqual(said[2], "no error")
                self.assertIn("use isobit.torch.fully_shard (FSDP2), which", said[3])
        self.assertEqual(run_ranks(2, gathered_from_fsdp1), [expected] * 2)
        self.assertEqual(run_ranks(2, in_fsdp2), [expected] * 2)

    # INVARIANT: autocast changes no bit, whichever dtype, around the forward pass alone or both.
    def test_autocast(self):
        for kind in ("Llama", "Llama, tied"):
            _, expected = scored(patch(make(kind)), BATCH)
            for dtype in (torch.bfloat16, torch.float16):
                for inside in (False, True):
                    model = patch(make(kind))
                    with torch.autocast("cpu", dtype=dtype):
                        found = logprobs(model, BATCH)
                        loss = found.logprobs.sum() + 0.1 * found.entropies.sum()
                        if inside:
                            loss.backward()
                    if not inside:
                        loss.backward()
                    for name, gradient in gradients(model).items():
                        self.assertTrue(same_bits(gradient, expected[name]), (kind, dtype, inside, name))

    # INVARIANT: an optimizer of torch's that cannot step says so before anything is changed.
    def test_optimizers_of_torch(self):
        kinds: list[Callable] = [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam]
        for kind in kinds:
            for options in ({}, {"foreach": False}, {"foreach": True}):
                model = patch(make("Llama"))
                optimizer = kind(model.parameters(), lr=0.01, **options)
                scored(model, BATCH)
                before = [p.detach().clone() for p in model.parameters()]
                with self.assertRaisesRegex(TypeError, f"{kind.__name__}: .* use isobit.torch.AdamW"):
                    optimizer.step()
                self.assertTrue(all(map(same_bits, before, [p.detach() for p in model.parameters()])))
        model = patch(make("Llama"))
        scored(model, BATCH)
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        plain = nn.Linear(3, 3)
        plain(torch.ones(1, 3)).sum().backward()
        torch.optim.AdamW(plain.parameters()).step()

    def test_peft(self):
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError:
            self.skipTest("SKIPPED: peft is not installed")
        wrapped = get_peft_model(make("Llama"), LoraConfig(target_modules=["q_proj"]))
        with self.assertRaisesRegex(TypeError, r"got PeftModel: merge its adapters first \(merge_and_unload"):
            patch(wrapped)
        with self.assertRaisesRegex(
            TypeError, "q_proj: expected a plain torch.nn.Linear, got peft.*: merge it"
        ):
            patch(wrapped.get_base_model())
        patch(wrapped.merge_and_unload())


if __name__ == "__main__":
    unittest.main()
