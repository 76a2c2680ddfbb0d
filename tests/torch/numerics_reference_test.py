"""Training steps of patched Hugging Face models have the bits that docs/NUMERICS.md (C9 to C15) defines, by
an implementation of that page alone.

Values are compared as bit patterns; the tolerance is zero.
"""

import json
import sys
import tempfile
import unittest
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from isobit.torch import (
    AdamW,
    Batch,
    GradientSum,
    Sampling,
    clip_grad_norm_,
    keep_fp32_gradients,
    logprobs,
    patch,
    plan,
)
from isobit.torch import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from numerics_reference import losses as reference
from numerics_reference.arithmetic import padded_tree
from numerics_reference.checkpoint import read_config
from numerics_reference.models import CONFIGS, SMALL
from numerics_reference.sampling import Parameters
from numerics_reference.training import Adam, Sequence, Training, clip_factor, gradients

LENGTHS = [13, 45, 8, 66, 2, 22, 42]
PROMPTS = [3, 30, 1, 12, 1, 8, 25]
PACK_TOKENS, LANES = 64, 2  # seven sequences in five packs: three slots, a lane without a pack
# temperature, top_k, top_p, min_p
SAMPLING = (
    (0.8, 0, 1.0, 0.0),
    (1.0, 50, 1.0, 0.0),
    (1.3, 0, 0.9, 0.0),
    (0.0, 3, 0.5, 0.0),
    (1.0, 90, 0.97, 0.01),
)
LR, DECAY, MAX_NORM, CLIP, KL, ENTROPY = 0.001, 0.1, 0.5, (0.2, 0.28), 0.05, -0.01
TENSORS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


def random_model(name: str):
    """A patched model with random parameters, all of them, and what the reference reads of its config."""
    raw = SMALL | CONFIGS[name] | {"torch_dtype": "bfloat16"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        config = read_config(Path(folder))
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(1.0)
    keep_fp32_gradients(patch(model))
    return model, config


def numpy_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().numpy().copy()


class Data:
    """The batch: random prompts with likely completions, which no filter drops; and what its loss reads."""

    def __init__(self, model, vocab: int):
        random = np.random.default_rng(2)
        self.tokens = []
        for length, prompt_length in zip(LENGTHS, PROMPTS, strict=True):
            prompt = torch.from_numpy(random.integers(2, vocab, size=(1, prompt_length)))
            options = {"max_new_tokens": length - prompt_length, "do_sample": False, "eos_token_id": None}
            whole = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
            self.tokens.append(whole[0].tolist())
        scored = [n - p for n, p in zip(LENGTHS, PROMPTS, strict=True)]
        self.advantages, old, reference = (
            [random.normal(size=n).astype(np.float32) for n in scored] for _ in range(3)
        )
        self.old = [x * np.float32(0.1) - np.float32(5) for x in old]
        self.reference = [x * np.float32(0.3) - np.float32(5) for x in reference]
        self.weights = [np.full(n, 1 / 64, np.float32) for n in scored]
        self.sampling = [SAMPLING[i % len(SAMPLING)] for i in range(len(LENGTHS))]


def step_of_torch(model, data: Data) -> None:
    """The gradients of one step, in the parameters' grad; pass by pass, each with one lane."""
    cut = plan(LENGTHS, PACK_TOKENS, LANES)
    total = GradientSum(model.parameters(), cut.passes_per_slot(1, 1))
    for part in cut.passes(0, 1, 1):
        chosen = part.sequences()
        batch = Batch.of(
            [data.tokens[i] for i in chosen],
            prompt_lengths=[PROMPTS[i] for i in chosen],
            packs=part.pack_sizes(),
        )
        numbers = list(zip(*(data.sampling[i] for i in chosen), strict=True)) if chosen else []
        scores = logprobs(model, batch, Sampling(*map(list, numbers)) if chosen else None)
        per_token = [
            torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *(values[i] for i in chosen)]))
            for values in (data.advantages, data.weights, data.old, data.reference)
        ]
        loss = (
            F.policy_loss(scores.logprobs, *per_token, clip_low=CLIP[0], clip_high=CLIP[1], kl=KL)
            + (scores.entropies * ENTROPY).sum()
        )
        loss.backward()
        total.add_pass()
    total.finish()


def step_of_reference(config, parameters: dict, data: Data) -> dict:
    batch = [
        Sequence(tokens, prompt, Parameters(*sampling))
        for tokens, prompt, sampling in zip(data.tokens, PROMPTS, data.sampling, strict=True)
    ]

    def loss(index: int, logprob: np.ndarray):
        advantage, old = data.advantages[index], data.old[index]
        value = reference.clipped(logprob, old, advantage, *CLIP)
        value = reference.with_reference(value, logprob, data.reference[index], KL)
        return value[1] * data.weights[index], np.full_like(logprob, ENTROPY)

    model = Training(config, parameters, max(LENGTHS))
    return gradients(model, batch, PACK_TOKENS, LANES, loss)


class NumericsReferenceTest(unittest.TestCase):
    def compare(self, name: str) -> None:
        model, config = random_model(name)
        data = Data(model, config.vocab)
        parameters = {n: numpy_of(p) for n, p in model.named_parameters()}
        optimizer, adam = AdamW(model.parameters(), lr=LR, weight_decay=DECAY), Adam(LR, decay=DECAY)
        step_of_torch(model, data)
        expected = step_of_reference(config, parameters, data)
        for step in range(2):
            for n, p in model.named_parameters():
                self.same(p.grad, expected[n], f"{name}, step {step}, gradient of {n}")
            norm, clip = clip_factor(list(parameters), expected, MAX_NORM)
            self.assertLess(clip, 1)  # clipping is seen
            self.assertEqual(float(clip_grad_norm_(model.named_parameters(), MAX_NORM)), norm)
            optimizer.step()
            parameters = adam.step(parameters, expected, clip)
            for n, p in model.named_parameters():
                self.same(p.detach(), parameters[n], f"{name}, step {step}, {n}")
            # The second step takes the first one's gradients upside down: passes take long.
            expected = {n: np.flip(gradient, 0).copy() for n, gradient in expected.items()}
            for n, p in model.named_parameters():
                p.grad = torch.from_numpy(expected[n].copy())

    def same(self, actual: torch.Tensor, expected: np.ndarray, what: str) -> None:
        wanted = torch.from_numpy(np.ascontiguousarray(expected, np.float32)).to(actual.dtype)
        pattern = TENSORS[actual.dtype]
        unequal = int((actual.contiguous().view(pattern) != wanted.view(pattern)).sum())
        self.assertEqual(unequal, 0, f"{what}: {unequal} of {actual.numel()} elements differ")

    # INVARIANT: losses of tokens, sequences and pairs have the page's bits, and so have their gradients.
    def test_losses(self):
        lengths = [3, 1, 70, 9, 33, 2, 5000, 64]
        random = np.random.default_rng(5)
        n, tensor = sum(lengths), torch.from_numpy

        def draw(count: int, scale: float, mean: float = 0.0) -> np.ndarray:
            return (random.normal(size=count) * scale + mean).astype(np.float32)

        logs, a, w = draw(n, 0.3, -2), draw(n, 1), draw(n, 0.1)
        old, ref = logs + draw(n, 0.2), logs + draw(n, 0.4)
        per_token = [tensor(x) for x in (a, w, old, ref)]
        sa, sw, pw = draw(8, 1), draw(8, 0.1), draw(4, 0.1)
        clipped = reference.with_reference(reference.clipped(logs, old, a, *CLIP), logs, ref, KL)
        options = {"clip_low": CLIP[0], "clip_high": CLIP[1]}
        cases = {
            "clipped": (
                lambda x: F.policy_loss(x, *per_token, kl=KL, **options),
                reference.weighed(clipped, w),
            ),
            "cispo": (
                lambda x: F.cispo_loss(x, *per_token[:3], **options),
                reference.cispo(logs, old, a, w, *CLIP),
            ),
            "gspo": (
                lambda x: F.gspo_loss(x, tensor(sa), tensor(sw), per_token[2], lengths, 0.01, 0.02),
                reference.gspo(logs, old, sa, sw, lengths, 0.01, 0.02),
            ),
            "dpo": (
                lambda x: F.dpo_loss(x, per_token[3], tensor(pw), lengths, 0.3),
                reference.dpo(logs, ref, pw, lengths, 0.3),
            ),
        }
        for name, (loss, (values, slopes)) in cases.items():
            x = tensor(logs.copy()).requires_grad_()
            total = loss(x)
            total.backward()
            self.same(total.detach(), padded_tree(values), name)
            self.same(x.grad, slopes, f"{name}, gradient")

    def test_functions_of_losses(self):
        random = np.random.default_rng(6)
        x = np.concatenate([(random.normal(size=4000) * s).astype(np.float32) for s in (0.1, 1, 30)])
        x = np.concatenate([x, np.array([0, -0.0, np.inf, -np.inf], np.float32)])
        for name, (values, slopes) in reference.functions(x).items():
            argument = torch.from_numpy(x.copy()).requires_grad_()
            got = getattr(F, name)(argument)
            got.sum().backward()
            for actual, expected in ((got, values), (argument.grad, slopes)):
                nan = np.isnan(expected)  # whose payload nobody promises
                self.assertTrue(np.array_equal(np.isnan(numpy_of(actual)), nan), name)
                actual = torch.where(torch.from_numpy(nan), 0, actual.detach())
                self.same(actual, np.where(nan, np.float32(0), expected), name)

    def test_llama_with_biases(self):
        self.compare("llama-biases-linear")

    def test_qwen2_with_windows_and_tied_weights(self):
        self.compare("qwen2-windows")

    def test_qwen3(self):
        self.compare("qwen3-yarn")


if __name__ == "__main__":
    unittest.main()
