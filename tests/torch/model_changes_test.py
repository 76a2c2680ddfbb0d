"""What trainers do to a patched model: copies, pickles, compiles, freezes, wraps, changes it. Its bits stay,
or the next call says what is wrong."""

import copy
import io
import unittest
from collections.abc import Callable

import torch
from patch_test import gradients, make, scored, sequences
from support import run_ranks, same_bits
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from transformers import PreTrainedModel

from isobit.torch import Batch, fully_shard, logprobs, patch


class Adapter(nn.Module):
    """Around a linear layer, with that layer's weight and bias, as peft's."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base, self.weight, self.bias = base, base.weight, base.bias

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.base(x)


def loss_of(model: PreTrainedModel) -> Tensor:
    scores = logprobs(model, Batch.of(sequences()))
    return scores.logprobs.sum() + 0.1 * scores.entropies.sum()


def patch_with_note() -> PreTrainedModel:
    model = make("Llama, tied")
    model.config.my_own_note = {"inner": 1}
    return patch(model, ignore_config_fields=["my_own_note", "another"])


def shard_with_torch(rank: int, world: int) -> bool:
    """Whether logprobs came without gradients, and were refused with them."""
    model = torch_fully_shard(patch(make("Llama")))
    with torch.no_grad():
        logprobs(model, Batch.of(sequences()))
    try:
        logprobs(model, Batch.of(sequences()))
    except TypeError as error:
        return "expected isobit.torch.fully_shard, got torch's" in str(error)
    return False


def shard_over_three(rank: int, world: int) -> str:
    try:
        fully_shard(make("Llama").float())
    except ValueError as error:
        return str(error)
    return "no error"


class ModelChangesTest(unittest.TestCase):
    def same(self, model: PreTrainedModel, kind: str = "Llama, tied", frozen: str | None = None) -> None:
        """Fails unless logprobs and gradients, but the frozen ones, have the bits of a model as patched."""
        expected, expected_gradients = scored(patch(make(kind)), Batch.of(sequences()))
        if frozen is not None:
            expected_gradients = {n: g for n, g in expected_gradients.items() if frozen not in n}
        model.zero_grad()
        found = logprobs(model, Batch.of(sequences()))
        (found.logprobs.sum() + 0.1 * found.entropies.sum()).backward()
        self.assertTrue(same_bits(found.logprobs, expected.logprobs))
        found_gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        self.assertEqual(found_gradients.keys(), expected_gradients.keys())
        for name, gradient in expected_gradients.items():
            self.assertTrue(same_bits(found_gradients[name], gradient), name)

    def refuses(self, error: type, message: str, change: Callable[[PreTrainedModel], object]) -> None:
        """Fails unless a call says so after the change."""
        model = patch(make("Llama"))
        change(model)
        with self.assertRaisesRegex(error, message):
            logprobs(model, Batch.of(sequences()))

    def test_copied_and_pickled(self):
        model = patch(make("Llama, tied"))
        logprobs(model, Batch.of(sequences()))
        copied = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        file.seek(0)
        elsewhere = torch.load(file, weights_only=False, map_location="meta")
        with torch.no_grad():  # the copies do not use its weights
            for parameter in model.parameters():
                parameter.zero_()
        self.same(copied)
        self.same(loaded)
        self.same(patch(patch(loaded)))
        elsewhere.to_empty(device="cpu").tie_weights()
        elsewhere.load_state_dict(make("Llama, tied").state_dict())
        self.same(elsewhere)

    # INVARIANT: torch.compile leaves the bits: it would round gradients to bfloat16.
    def test_compiled(self):
        model = patch(make("Llama, tied"))
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
        self.same(model)
        model = patch(make("Llama, tied"))
        loss_of(torch.compile(model, backend="aot_eager")).backward()
        _, expected = scored(patch(make("Llama, tied")), Batch.of(sequences()))
        self.assertTrue(all(same_bits(g, expected[n]) for n, g in gradients(model).items()))

    def test_frozen_parameters(self):
        for kind in ("Llama", "Llama, tied", "Qwen3"):
            for frozen in ("layers.0.", "embed_tokens", "lm_head", "q_proj", "norm", "bias"):
                with self.subTest(kind=kind, frozen=frozen):
                    model = patch(make(kind))
                    for name, parameter in model.named_parameters():
                        parameter.requires_grad_(frozen not in name)
                    self.same(model, kind, frozen)

    def test_reentrant_checkpointing(self):
        model = patch(make("Llama, tied"))
        model.gradient_checkpointing_enable({"use_reentrant": True})
        self.same(model)

    def test_without_gradients_first(self):
        model = patch(make("Llama, tied"))
        with torch.inference_mode():
            logprobs(model, Batch.of(sequences()))
        self.same(model)

    # A backward pass that ends before the embedding leaves nothing for the next one.
    def test_backward_in_parts(self):
        model = patch(make("Llama, tied"))
        expected = scored(model, Batch.of(sequences()))[1]
        model.zero_grad()
        loss = loss_of(model)
        torch.autograd.grad(loss, [model.model.norm.weight], retain_graph=True)
        loss.backward(retain_graph=True)
        self.assertTrue(all(same_bits(g, expected[n]) for n, g in gradients(model).items()))
        model.zero_grad()
        loss.backward()
        self.assertTrue(all(same_bits(g, expected[n]) for n, g in gradients(model).items()))

    def test_gradients_have_no_gradient(self):
        for kind in ("Llama", "Llama, tied"):
            model = patch(make(kind))
            with self.assertRaisesRegex(NotImplementedError, "gradients have no gradient"):
                torch.autograd.grad(loss_of(model), list(model.parameters()), create_graph=True)

    def test_adapters_and_hooks_would_have_no_effect(self):
        def adapt(model: PreTrainedModel) -> None:
            model.model.layers[0].self_attn.q_proj = Adapter(model.model.layers[0].self_attn.q_proj)

        self.refuses(TypeError, r"layers.0.self_attn.q_proj: expected a plain torch.nn.Linear.*\.Adapter",
                     adapt)  # fmt: skip
        self.refuses(
            ValueError, "layers.1.mlp: expected no hooks inside a layer",
            lambda model: model.model.layers[1].mlp.register_forward_hook(lambda *_: None))  # fmt: skip
        seen = []
        model = patch(make("Llama, tied"))
        model.model.layers[1].register_forward_hook(lambda _, arguments, out: seen.append(out.shape))
        self.same(model)
        self.assertEqual(seen, [(31, 48)])

    def test_new_modules(self):
        self.refuses(TypeError, "patch the model again", lambda model: model.resize_token_embeddings(110))
        model = patch(make("Llama"))
        model.resize_token_embeddings(110)
        _, found = scored(patch(model), Batch.of(sequences()))
        self.assertEqual(found["lm_head.weight"].shape, (110, 48))

        def replace_norm(model: PreTrainedModel) -> None:
            model.model.layers[0].input_layernorm = nn.LayerNorm(48, dtype=torch.bfloat16)

        message = r"layers.0.input_layernorm: expected LlamaRMSNorm, got torch.nn.*\.LayerNorm"
        self.refuses(TypeError, message, replace_norm)
        model = make("Llama")
        replace_norm(model)
        with self.assertRaisesRegex(TypeError, message):
            patch(model)
        self.refuses(ValueError, "model.layers: expected num_hidden_layers, 2, got 1",
                     lambda model: model.model.layers.__delitem__(0))  # fmt: skip
        self.refuses(ValueError, "tie_word_embeddings is False, but the model's weights are tied",
                     lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight))  # fmt: skip
        self.refuses(ValueError, "lm_head.bias: expected none",
                     lambda model: setattr(model.lm_head, "bias", nn.Parameter(torch.ones(97))))  # fmt: skip

    def test_what_stands_in_for_a_module(self):
        class Linear(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return 2 * super().forward(x)

        model = make("Llama")
        model.model.layers[1].mlp.up_proj.__class__ = Linear
        with self.assertRaisesRegex(TypeError, r"expected a plain torch.nn.Linear, got .*<locals>\.Linear"):
            patch(model)
        model = make("Llama")
        model.model.layers[1].mlp.up_proj.base_layer = nn.Linear(3, 3)
        model.model.layers[1].mlp.up_proj.__class__ = Linear
        with self.assertRaisesRegex(TypeError, r"an adapter: merge it into the weights first"):
            patch(model)
        for place in ("model.layers.0.mlp.up_proj", "lm_head", "model.embed_tokens"):
            model = make("Llama")
            nn.utils.parametrizations.weight_norm(model.get_submodule(place))
            with self.assertRaisesRegex(
                TypeError, f"{place}: expected plain parameters, got a parametrization"
            ):
                patch(model)
            nn.utils.parametrize.remove_parametrizations(model.get_submodule(place), "weight")
            logprobs(patch(model), Batch.of(sequences()))

    # INVARIANT: a module or parameter that is used twice is refused, when it is patched, called or sharded:
    # its gradient would be autograd's sum over both uses, a pass at a time.
    def test_used_twice(self):
        def layer(model: PreTrainedModel, index: int) -> nn.Module:
            return model.model.layers[index]

        changes = {
            "layer": lambda m: m.model.layers.__setitem__(1, layer(m, 0)),
            "mlp": lambda m: setattr(layer(m, 1), "mlp", layer(m, 0).mlp),
            "self_attn": lambda m: setattr(layer(m, 1), "self_attn", layer(m, 0).self_attn),
            "down_proj": lambda m: setattr(layer(m, 1).mlp, "down_proj", layer(m, 0).mlp.down_proj),
            "up_proj": lambda m: setattr(layer(m, 0).mlp.up_proj, "weight", layer(m, 0).mlp.gate_proj.weight),
            "bias": lambda m: setattr(
                layer(m, 0).self_attn.q_proj, "bias", layer(m, 1).self_attn.q_proj.bias
            ),
            "layernorm": lambda m: setattr(
                layer(m, 0), "input_layernorm", layer(m, 0).post_attention_layernorm
            ),
            "norm": lambda m: setattr(m.model.norm, "weight", layer(m, 0).input_layernorm.weight),
            "k_norm": lambda m: setattr(layer(m, 0).self_attn, "k_norm", layer(m, 0).self_attn.q_norm),
            "memory": lambda m: setattr(
                layer(m, 1).mlp.down_proj, "weight", nn.Parameter(layer(m, 0).mlp.down_proj.weight.detach())
            ),
        }
        for what, change in changes.items():
            kind = {"k_norm": "Qwen3", "bias": "Llama, tied"}.get(what, "Llama")
            with self.subTest(what):
                model = patch(make(kind))
                change(model)
                for work in (patch, fully_shard, lambda m: logprobs(m, Batch.of(sequences()))):
                    if what == "memory" and work is fully_shard:
                        continue  # float() has parted them
                    with self.assertRaisesRegex(
                        ValueError, r"model\.\S+: expected a parameter of its own, got that of model\.\S+:"
                    ):
                        work(model.float() if work is fully_shard else model)

    def test_reentrant_checkpointing_of_frozen_embeddings(self):
        for kind in ("Llama", "Llama, tied"):
            for frozen in ("embed_tokens", "layers.0."):
                model = patch(make(kind))
                model.gradient_checkpointing_enable({"use_reentrant": True})
                for name, parameter in model.named_parameters():
                    if frozen in name or "embed_tokens" in name:
                        parameter.requires_grad_(False)
                expected = scored(patch(make(kind)), Batch.of(sequences()))[1]
                loss_of(model).backward()
                for name, parameter in model.named_parameters():
                    self.assertEqual(parameter.requires_grad, parameter.grad is not None, name)
                    if parameter.requires_grad:
                        self.assertTrue(same_bits(parameter.grad, expected[name]), name)

    def test_replaced_forward(self):
        model = make("Llama")
        model.model.layers[0].forward = lambda *_, **__: None
        with self.assertRaisesRegex(TypeError, "LlamaDecoderLayer: expected its class's forward"):
            patch(model)

    def test_unsupported_config(self):
        model = make("Llama")
        model.config.hidden_act = "gelu"
        with self.assertRaisesRegex(ValueError, "hidden_act"):
            patch(model)

    # What the services' flag lets pass, an argument of the same name does.
    def test_ignored_fields(self):
        model = make("Llama")
        model.config.my_own_note = {"inner": 1}
        with self.assertRaisesRegex(
            ValueError, "model.config: .*my_own_note.*; .* ignore_config_fields"
        ) as said:
            patch(model)
        self.assertNotIn("--", str(said.exception))
        self.same(patch_with_note())
        for honoured in ("vocab_size", "rms_norm_eps"):
            with self.assertRaisesRegex(ValueError, f"ignore_config_fields names {honoured}"):
                patch(make("Llama"), ignore_config_fields=[honoured])

    def test_sharded_otherwise(self):
        self.assertEqual(run_ranks(1, shard_with_torch), [True])
        self.assertEqual(
            run_ranks(3, shard_over_three),
            ["mesh: expected the number of ranks to be a power of two, got 3"] * 3,
        )


if __name__ == "__main__":
    unittest.main()
