"""Gradients against float64 autograd: on several models, no further from it than transformers in bf16; and
SmolLM2 in training, whose loss follows that of transformers in fp32.

ISOBIT_MODEL: the directory of SmolLM2-135M-Instruct; ISOBIT_STEPS: how many steps of it, 3 by default, more
over four texts; ISOBIT_DEVICE: where SmolLM2 is trained, cpu by default.
"""

import math
import os
import statistics
import unittest
from pathlib import Path

import torch
import transformers as hf
from torch import Tensor

import isobit.torch as it

SIZES = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "initializer_range": 0.08,
}  # fmt: skip
MODELS = {
    "Qwen3, tied": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {"head_dim": 64, "tie_word_embeddings": True}),
    "Qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {"head_dim": 32, "tie_word_embeddings": False}),
    "Qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, {"tie_word_embeddings": False}),
    "Llama": (hf.LlamaForCausalLM, hf.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "Mistral": (hf.MistralForCausalLM, hf.MistralConfig, {"sliding_window": 24}),
}
LENGTHS = [5, 33, 64, 100]
SEEDS = (1, 2, 3)
LEARNING_RATE = 5e-5
FEW_STEPS = 16  # over which a gap is luck
DEVICE = os.environ.get("ISOBIT_DEVICE", "cpu")


def make(kind: str, seed: int) -> tuple[hf.PreTrainedModel, list[Tensor], list[Tensor]]:
    """A model in bf16, sequences, and a weight for the logprob of each of their next tokens."""
    model_class, config_class, options = MODELS[kind]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**SIZES, **options}, attn_implementation="eager")).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases and norms leave their neutral values
                parameter.add_(0.1 * torch.randn_like(parameter))
    sequences = [torch.randint(0, SIZES["vocab_size"], (n,)) for n in LENGTHS]
    return model, sequences, [torch.randn(n - 1) / sum(LENGTHS) for n in LENGTHS]


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.double() for name, p in model.named_parameters()}


def gradients_of_transformers(kind: str, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """transformers' own forward pass with autograd; the loss in at least fp32."""
    model, sequences, weights = make(kind, seed)
    model = model.to(dtype)
    for ids, w in zip(sequences, weights, strict=True):
        logits = model(ids[None], use_cache=False).logits[0, :-1]
        logits = logits.to(torch.promote_types(dtype, torch.float32))
        logprobs = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
        (logprobs * -w.to(logits.dtype)).sum().backward()
    return gradients(model)


def gradients_of_isobit(kind: str, seed: int) -> dict[str, Tensor]:
    model, sequences, weights = make(kind, seed)
    logprobs = it.logprobs(it.patch(model), it.Batch.of(sequences)).logprobs
    it.functional.policy_loss(logprobs, torch.ones_like(logprobs), torch.cat(weights)).backward()
    return gradients(model)


class AccuracyTest(unittest.TestCase):
    def check(self, kind: str) -> None:
        # One run's error is luck, transformers' as much as ours: a parameter's ratio is a mean over seeds.
        logs: dict[str, list[float]] = {}
        vectors = set()
        for seed in SEEDS:
            exact = gradients_of_transformers(kind, seed, torch.float64)
            theirs = gradients_of_transformers(kind, seed, torch.bfloat16)
            ours = gradients_of_isobit(kind, seed)
            for name, gradient in exact.items():
                error = float((ours[name] - gradient).norm() / gradient.norm())
                cosine = float(torch.cosine_similarity(ours[name].flatten(), gradient.flatten(), 0))
                self.assertLess(error, 0.05, name)
                self.assertGreater(cosine, 0.999, name)
                their_error = float((theirs[name] - gradient).norm() / gradient.norm())
                logs.setdefault(name, []).append(math.log(error / their_error))
                if gradient.dim() == 1:
                    vectors.add(name)
        ratios = {name: math.exp(statistics.fmean(values)) for name, values in logs.items()}
        for what, names in {"matrices": ratios.keys() - vectors, "vectors": vectors}.items():
            mean = statistics.geometric_mean(ratios[name] for name in names)
            most = max(ratios[name] for name in names)
            print(f"{kind}, {len(names)} {what}: error / transformers' mean {mean:.3f}, most {most:.3f}")
            self.assertLess(mean, 1.0, what)
            self.assertLess(most, 1.05 if what == "matrices" else 1.15)  # a vector has few sums

    def test_no_further_from_float64_than_transformers(self):
        for kind in MODELS:
            with self.subTest(kind):
                self.check(kind)


class TransformersRun:
    """transformers, computing in `dtype` on weights that are bf16 copies of fp32 masters, as isobit's are.
    (Without the copies a step shows at once in fp32; with them, once a master reaches the next bf16.)"""

    def __init__(self, path: str, dtype: torch.dtype):
        self.model = hf.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(DEVICE)
        self.masters = [torch.nn.Parameter(p.detach().float().clone()) for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=LEARNING_RATE)

    def step(self, page: Tensor) -> float:
        loss = self.model(page.to(DEVICE), labels=page.to(DEVICE), use_cache=False).loss
        loss.backward()
        for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
                parameter.copy_(master.bfloat16())
        return loss.item()


class IsobitRun:
    def __init__(self, path: str):
        self.model = it.patch(hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(DEVICE))
        self.optimizer = it.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def step(self, page: Tensor) -> float:
        logprobs = it.logprobs(self.model, it.Batch.of(list(page), device=DEVICE)).logprobs
        ones = torch.ones_like(logprobs)
        loss = it.functional.policy_loss(logprobs, ones, ones / ones.numel())
        loss.backward()
        it.clip_grad_norm_(self.model.named_parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class SmolLm2Test(unittest.TestCase):
    def gaps(self, path: str, text: Path, steps: int) -> list[list[float]]:
        """Of each step's loss to fp32's: isobit's; over many steps transformers' in bf16, too."""
        tokens = hf.AutoTokenizer.from_pretrained(path).encode(text.read_text("utf-8")[:6000])
        pages = torch.tensor(tokens[: 8 * 96]).view(8, 2, 48)  # a page is two sequences; each step takes one
        runs = [TransformersRun(path, torch.float32), IsobitRun(path)]
        if steps > FEW_STEPS:
            runs.append(TransformersRun(path, torch.bfloat16))
        curve = []
        for step in range(steps):
            curve.append([run.step(pages[step % 8]) for run in runs])
            told = ", ".join(f"{loss:.4f}" for loss in curve[-1])
            print(f"{text.name}, step {step + 1} of {steps}: losses {told}", flush=True)
        if steps > FEW_STEPS:  # each page was read before: a run that learns nothing follows nothing
            self.assertLess(curve[-1][0], 0.5 * curve[(steps - 1) % 8][0])
        return [[abs(loss - exact) for loss in others] for exact, *others in curve]

    def test_the_loss_follows_fp32(self):
        path, steps = os.environ.get("ISOBIT_MODEL", ""), int(os.environ.get("ISOBIT_STEPS", "3"))
        if not Path(path, "config.json").exists():
            self.skipTest("SKIPPED: ISOBIT_MODEL names no model; `make model` downloads it")
        docs = Path(__file__).parents[2] / "docs"
        texts = [docs / name for name in ("NUMERICS.md", "API.md", "training.md", "operations.md")]
        means = []
        for text in texts if steps > 3 else texts[:1]:
            gaps = list(zip(*self.gaps(path, text, steps), strict=True))
            means.append([statistics.fmean(run) for run in gaps])
            told = ", ".join(f"{statistics.fmean(run):.4f} (largest {max(run):.4f})" for run in gaps)
            print(f"{text.name}: mean gap {told}")
        mean, *theirs = (statistics.fmean(run) for run in zip(*means, strict=True))
        print(f"mean gap {mean:.4f}; of transformers in bf16 {theirs}")
        self.assertLess(mean, 0.03)
        if steps > FEW_STEPS:
            self.assertLess(mean, 1.25 * theirs[0])


if __name__ == "__main__":
    unittest.main()
