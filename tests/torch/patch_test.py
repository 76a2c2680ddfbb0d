"""Hugging Face models that isobit.torch.patch has patched: near transformers' own float64 gradients, equal in
every bit however a batch is laid out, unchanged where they generate and save."""

import unittest

import torch
from support import same_bits
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from isobit.torch import Batch, Sampling, keep_fp32_gradients, logprobs, patch

SIZES = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KINDS = {
    "Llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False}),
    "Llama, tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True, "attention_bias": True}),
    "Mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 5, "tie_word_embeddings": False}),
    "Qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": False}),
    "Qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
}
LENGTHS = [7, 12, 3, 9]


def make(kind: str) -> PreTrainedModel:
    """A model with weights of its own seed; biases and norms are not at their neutral values."""
    model_class, config_class, options = KINDS[kind]
    torch.manual_seed(5)
    config = config_class(**{**SIZES, **options}, architectures=[model_class.__name__])
    model = model_class(config).to(torch.bfloat16).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randint(3, 97, (n,), generator=generator) for n in LENGTHS]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def scored(model: PreTrainedModel, batch: Batch, sampling: Sampling | None = None):
    model.zero_grad()
    result = logprobs(model, batch, sampling)
    (result.logprobs.sum() + 0.1 * result.entropies.sum()).backward()
    return result, gradients(model)


def reference(model: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor]]:
    """transformers' own forward pass in float64 with autograd, sequence by sequence."""
    model = model.double()
    model.config._attn_implementation = "eager"
    found = []
    for sequence in sequences():
        logs = model(input_ids=sequence[None]).logits[0, :-1].log_softmax(-1)
        found.append(logs.gather(1, sequence[1:, None])[:, 0])
        entropy = -(logs.exp() * logs).sum()
        (found[-1].sum() + 0.1 * entropy).backward()
    return torch.cat(found).detach(), gradients(model)


class PatchTest(unittest.TestCase):
    def test_near_float64_autograd(self):
        for kind in KINDS:
            with self.subTest(kind):
                result, found = scored(patch(make(kind)), Batch.of(sequences()))
                expected, exact = reference(make(kind))
                self.assertLess(float((result.logprobs.detach() - expected).abs().max()), 0.15)
                self.assertEqual(found.keys(), exact.keys())
                for name, gradient in found.items():
                    self.assertEqual(gradient.dtype, torch.float32)
                    a, b = gradient.double().flatten(), exact[name].flatten()
                    cosine = float(a @ b / (a.norm() * b.norm()))
                    self.assertGreater(cosine, 0.99, name)
                    self.assertLess(abs(float(a.norm() / b.norm()) - 1), 0.05, name)

    # INVARIANT: padding changes no bit.
    def test_padded_and_packed(self):
        rows = sequences()
        for kind in ("Llama, tied", "Mistral"):
            results = []
            for side in ("none", "left", "right"):
                batch = Batch.of(rows)
                if side != "none":
                    ids, mask = torch.zeros(2, len(rows), 15, dtype=torch.int64).unbind()
                    for row, tokens in enumerate(rows):
                        at = slice(0, len(tokens)) if side == "right" else slice(15 - len(tokens), 15)
                        ids[row, at], mask[row, at] = tokens, 1
                    batch = Batch.from_padded(ids, mask)
                result, found = scored(patch(make(kind)), batch)
                results.append([*result, *found.values()])
            for other in results[1:]:
                self.assertTrue(all(map(same_bits, other, results[0])), kind)

    # INVARIANT: neither a pass's other sequences nor activation checkpointing change a bit.
    def test_logprobs_alone_and_checkpointed(self):
        model = patch(make("Qwen3"))
        together, found = scored(model, Batch.of(sequences()))
        alone = torch.cat([scored(model, Batch.of([s]))[0].logprobs for s in sequences()])
        self.assertTrue(same_bits(together.logprobs, alone))
        model.gradient_checkpointing_enable({"use_reentrant": False})
        again, checkpointed = scored(model, Batch.of(sequences()))
        self.assertTrue(same_bits(together.logprobs, again.logprobs))
        self.assertTrue(all(same_bits(found[name], checkpointed[name]) for name in found))

    def test_sampling(self):
        model = patch(make("Llama"))
        batch = Batch.of(sequences(), prompt_lengths=[2, 3, 1, 4])
        plain, _ = scored(model, batch)
        warm, _ = scored(model, batch, Sampling(temperature=[0.5, 0.7, 1.0, 1.5]))
        same = plain.logprobs == warm.logprobs
        self.assertEqual(same.tolist(), [int(s) == 2 for s in batch.scored_sequences])
        with torch.no_grad():
            logits = model(input_ids=sequences()[1][None]).logits[0]
        expected = (logits[2:-1] / 0.7).log_softmax(-1).gather(1, sequences()[1][3:, None])[:, 0]
        torch.testing.assert_close(
            warm.logprobs[batch.scored_sequences == 1].detach(), expected, rtol=1e-5, atol=1e-5
        )

    def test_transformers_own_call(self):
        model, plain = patch(make("Qwen2")), make("Qwen2")
        ids = sequences()[1][None]
        with torch.no_grad():
            self.assertLess(
                float((model(input_ids=ids).logits - plain(input_ids=ids).logits).abs().max()), 0.25
            )
        loss = model(input_ids=ids, labels=ids).loss
        expected = plain(input_ids=ids, labels=ids).loss
        self.assertLess(abs(loss.item() - expected.item()), 0.02)
        loss.backward()
        self.assertEqual({p.grad.dtype for p in model.parameters()}, {torch.float32})

    def test_generates_and_saves_as_before(self):
        model, plain = patch(make("Qwen3")), make("Qwen3")
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        ids = sequences()[0][None]
        self.assertTrue(torch.equal(model.generate(ids, **options), plain.generate(ids, **options)))
        self.assertEqual(model.state_dict().keys(), plain.state_dict().keys())
        self.assertTrue(all(same_bits(model.state_dict()[n], t) for n, t in plain.state_dict().items()))

    # INVARIANT: a tied weight's gradient is one chain from lm_head's pack sums, not a sum of two gradients.
    def test_tied_weight(self):
        model = patch(make("Llama, tied"))
        _, tied = scored(model, Batch.of(sequences(), packs=[2, 2]))
        untied = make("Llama, tied")
        untied.config.tie_word_embeddings = False
        untied.lm_head.weight = nn.Parameter(untied.lm_head.weight.detach().clone())
        _, apart = scored(patch(untied), Batch.of(sequences(), packs=[2, 2]))
        total = apart["model.embed_tokens.weight"] + apart["lm_head.weight"]
        found = tied["model.embed_tokens.weight"]
        torch.testing.assert_close(found, total, rtol=1e-4, atol=1e-5)
        self.assertFalse(same_bits(found, total), "control")
        unused = torch.ones(97, dtype=torch.bool)
        unused[torch.cat(sequences())] = False
        self.assertTrue(same_bits(found[unused], apart["lm_head.weight"][unused]))

    def test_refusals(self):
        dropout = make("Llama")
        dropout.config.attention_dropout = 0.1
        with self.assertRaisesRegex(ValueError, "attention_dropout: expected 0, got 0.1"):
            patch(dropout)
        adapter = make("Llama")
        adapter.model.layers[1].mlp.up_proj = nn.Sequential(adapter.model.layers[1].mlp.up_proj)
        with self.assertRaisesRegex(
            TypeError, "model.layers.1.mlp.up_proj: expected a plain torch.nn.Linear"
        ):
            patch(adapter)
        with self.assertRaisesRegex(TypeError, "expected one of LlamaForCausalLM"):
            patch(nn.Linear(3, 3))
        with self.assertRaisesRegex(TypeError, "expected a model that isobit.torch.patch has patched"):
            logprobs(make("Llama"), Batch.of(sequences()))
        model = patch(make("Llama"))
        mask = torch.ones(1, 5, dtype=torch.int64)
        mask[0, 2] = 0
        with self.assertRaisesRegex(ValueError, "expected padding before or after a sequence, not inside"):
            model(input_ids=torch.ones(1, 5, dtype=torch.int64), attention_mask=mask)
        with self.assertRaisesRegex(ValueError, "expected parameters in bfloat16, got torch.float32"):
            logprobs(patch(make("Llama").float()), Batch.of(sequences()))
        with self.assertRaisesRegex(ValueError, "ids and labels: expected 0 to 96, got 97"):
            logprobs(model, Batch.of([[5, 97]]))

    def test_keep_fp32_gradients_is_not_needed(self):
        model = make("Llama")
        keep_fp32_gradients(model)
        _, found = scored(patch(model), Batch.of(sequences()))
        _, expected = scored(patch(make("Llama")), Batch.of(sequences()))
        self.assertTrue(all(same_bits(found[name], expected[name]) for name in expected))


if __name__ == "__main__":
    unittest.main()
