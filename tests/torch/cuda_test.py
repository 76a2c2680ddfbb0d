"""Training on GPUs has the CPU's bits: the gradients of a patched Qwen3, and five steps of a small one on one
GPU and on several over NCCL. Without a GPU it skips.
"""

import unittest

import torch
from support import run_ranks, same_bits
from torch import Tensor
from training_test import train_qwen3
from transformers import Qwen3Config, Qwen3ForCausalLM

import isobit.torch as it

LENGTHS = [100, 300, 17, 64, 1, 155]


def gradients_of(device: str, sampling: it.Sampling, packs: list[int]) -> dict[str, Tensor]:
    """Logprobs, entropies and all gradients of a model whose sums are long enough for their order to show."""
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=2003, hidden_size=512, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=1024, initializer_range=0.05,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = it.patch(Qwen3ForCausalLM(config).to(torch.bfloat16)).to(device)
    sequences = [torch.randint(0, 2003, (n,)) for n in LENGTHS]
    advantages = torch.randn(sum(LENGTHS) - len(LENGTHS)).to(device)
    batch = it.Batch.of(sequences, packs=packs, device=device)
    out = it.logprobs(model, batch, sampling)
    kept = out.logprobs.isfinite()  # a filter excludes the other tokens
    logprobs = torch.where(kept, out.logprobs, 0)
    weights = torch.where(kept, advantages.abs(), 0)
    old = (logprobs.detach() + 0.1 * advantages).contiguous()
    loss = it.functional.policy_loss(logprobs, advantages, weights, old, old - 0.3, kl=0.1)
    (loss - (0.01 * out.entropies).sum()).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    found.update(logprobs=out.logprobs, entropies=out.entropies)
    return {name: t.detach().cpu() for name, t in found.items()}


@unittest.skipUnless(torch.cuda.is_available(), "SKIPPED: no GPU")
class CudaTest(unittest.TestCase):
    def expect_same(self, ours: dict[str, Tensor], expected: dict[str, Tensor], what: object) -> None:
        other = [name for name in expected if not same_bits(ours[name], expected[name])]
        self.assertEqual(other, [], what)

    # INVARIANT: a GPU's gradients have the CPU's bits.
    def test_gradients(self):
        filters = it.Sampling(temperature=1.5, top_k=1500, top_p=0.95, min_p=0.001)
        for sampling in (it.Sampling(), filters):
            cpu, gpu = (gradients_of(device, sampling, [2, 4]) for device in ("cpu", "cuda"))
            kept = cpu["logprobs"].isfinite()
            self.assertGreater(kept.sum(), 200)
            self.assertEqual(kept.all(), sampling is not filters)
            self.assertTrue(cpu["model.embed_tokens.weight"].isfinite().all())
            self.expect_same(gpu, cpu, sampling)
            other = gradients_of("cuda", sampling, [3, 3])
            self.assertFalse(same_bits(other["lm_head.weight"], cpu["lm_head.weight"]), "other packs")

    # INVARIANT: and so has a training run, on one GPU and on several.
    def test_training(self):
        expected = train_qwen3(0, 1, None)
        runs = {"one GPU": train_qwen3(0, 1, 2, "", "cuda")}
        for world in (1, 2, 4):
            if world > torch.cuda.device_count():
                print(f"SKIPPED: {world} GPUs, as there are {torch.cuda.device_count()}")
                continue
            for rank, results in enumerate(run_ranks(world, train_qwen3, None, "", "cuda", backend="nccl")):
                runs[f"rank {rank} of {world}"] = results
        for what, results in runs.items():
            for step, (ours, theirs) in enumerate(zip(results, expected, strict=True)):
                self.expect_same(ours, theirs, (what, step))


if __name__ == "__main__":
    unittest.main()
