"""docs/training.md: its step runs as it stands there, on a small model in the place of the named one; and
a trainer needs none of the client's packages."""

import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import torch
from training_test import make_qwen3

import isobit.torch as it

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


class PageTest(unittest.TestCase):
    def test_the_step_runs(self):
        (example,) = re.findall(r"```python\n(import.*?)```", PAGE.read_text(), re.DOTALL)
        (name,) = re.findall(r'from_pretrained\("([^"]*)"', example)
        random = torch.Generator().manual_seed(4)
        lengths, prompts = [9, 30, 17, 12], [3, 7, 5, 11]
        names = {
            "sequences": [torch.randint(0, 83, (n,), generator=random).tolist() for n in lengths],
            "prompts": prompts,
            "advantages": [0.5, -1.0, 1.5, -0.5],
        }
        with tempfile.TemporaryDirectory() as folder:
            start = make_qwen3()
            start.save_pretrained(folder)
            exec(example.replace(name, folder), names)
        changed = [
            not torch.equal(a, b)
            for a, b in zip(start.parameters(), names["model"].parameters(), strict=True)
        ]
        self.assertTrue(any(changed))
        self.assertTrue(all(p.grad is None for p in names["model"].parameters()))

    # The losses of the page, on a pass of two pairs.
    def test_the_losses_run(self):
        (example,) = re.findall(r"```python\n(F, l, n.*?)```", PAGE.read_text(), re.DOTALL)
        model, random = make_qwen3(), torch.Generator().manual_seed(4)
        batch = it.Batch.of([torch.randint(0, 83, (n,), generator=random) for n in (9, 5, 12, 2)])
        scores = it.logprobs(model, batch)
        drawn = scores.logprobs.detach() + torch.randn(len(batch.scored), generator=random) * 0.3
        names = {
            "it": it, "torch": torch, "batch": batch, "scores": scores, "old": drawn,
            "reference": drawn - 0.1, "advantages": torch.tensor([0.5, -1.0, 1.5, -0.5]), "tokens": 50,
            "sequences": 8, "pairs": 4, "max_tokens": 16,
        }  # fmt: skip
        exec(example, names)
        self.assertEqual(len(names["losses"]), 7)
        for name, loss in names["losses"].items():
            (gradient,) = torch.autograd.grad(loss, scores.logprobs, retain_graph=True)
            self.assertTrue(loss.isfinite() and gradient.isfinite().all() and gradient.any(), name)

    def test_needs_none_of_the_client_s_packages(self):
        missing = (
            "import sys\nfor name in ('grpc', 'google.protobuf', 'tokenizers'): sys.modules[name] = None\n"
        )
        for module, works in (("isobit.torch", True), ("isobit.client", False)):
            result = subprocess.run([sys.executable, "-c", f"{missing}import {module}"], capture_output=True)
            self.assertEqual(result.returncode == 0, works, result.stderr)


if __name__ == "__main__":
    unittest.main()
