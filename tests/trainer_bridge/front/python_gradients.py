"""What Python computes of a case of decoder_test.cc: logprobs, gradients, norms, and parameters and moments
after some steps.

    python_gradients.py MODEL CASE.json OUTPUT
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import isobit.torch as it
from isobit.torch.functional import policy_loss


def loss_of(step: int, scores, advantages: Tensor) -> Tensor:
    """decoder_test.cc has the same."""
    weights = torch.isfinite(scores.logprobs.detach()).float() / 64
    logprobs = torch.where(weights > 0, scores.logprobs, torch.zeros_like(weights))
    fixed = logprobs.detach()
    options = {}
    if step in (1, 2):
        options["old_logprobs"] = fixed - advantages * 0.3
    if step == 2:
        options |= {"reference_logprobs": fixed + advantages * 0.2, "kl": 0.1, "clip_high": 0.25}
    if step == 3:
        return policy_loss(logprobs, torch.ones_like(advantages), weights)
    entropy = (scores.entropies * weights).sum()
    if step == 4:
        return entropy * -0.25
    loss = policy_loss(logprobs, advantages, weights, **options)
    return loss + entropy * 0.25 if step == 0 else loss


def main(model_path: str, case_path: str, output: str) -> None:
    case = json.loads(Path(case_path).read_text())
    model = it.patch(AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16))
    named = dict(model.named_parameters())
    plan = it.plan([len(s) for s in case["sequences"]], case["pack_tokens"], case["lanes"])
    optimizer = it.AdamW(model.parameters(), lr=case["lr"])
    tensors = {}
    for step in range(case["steps"]):
        total = it.GradientSum(model.parameters(), plan.passes_per_slot(1))
        for part in plan.passes(0, 1):
            of = part.sequences()
            chosen = {name: [case[name][i] for i in of] for name in ("sequences", "prompt_lengths")}
            batch = it.Batch.of(**chosen, packs=part.pack_sizes())
            drawn = {name: [case[name][i] for i in of] for name in ("temperature", "top_k", "top_p", "min_p")}
            scores = it.logprobs(model, batch, it.Sampling(**drawn))
            advantages = torch.tensor([a for i in of for a in case["advantages"][i]])
            loss_of(step, scores, advantages).backward()
            total.add_pass()
            tensors[f"logprobs.{step}.{part.slot}"] = scores.logprobs.detach()
            tensors[f"entropies.{step}.{part.slot}"] = scores.entropies.detach()
        total.finish()
        tensors |= {f"gradient.{step}.{name}": p.grad.clone() for name, p in named.items()}
        norm = it.clip_grad_norm_(named.items(), case["max_norm"])
        tensors[f"norm.{step}"] = norm.reshape(1).view(torch.float32)
        optimizer.step()
        optimizer.zero_grad()
    for name, p in named.items():
        state = optimizer.state[p]
        tensors[f"parameter.{name}"] = p.detach()
        tensors |= {
            f"master.{name}": state["master"],
            f"m.{name}": state["exp_avg"],
            f"v.{name}": state["exp_avg_sq"],
        }
    Path(output).mkdir()
    save_file({name: t.contiguous() for name, t in tensors.items()}, Path(output) / "model.safetensors")
    (Path(output) / "names.json").write_text(json.dumps(list(named)))


main(*sys.argv[1:])
