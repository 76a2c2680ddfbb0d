"""Calls of a patched model in transformers' form, without a cache. Padded rows, or sequences one after the
other, become a `Batch`; the result is logits or the loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from isobit.torch import functional as F
from isobit.torch.batch import IGNORED, Batch, Sampling

# Arguments of a call that have no effect here.
_HARMLESS = {
    "num_items_in_batch",
    "max_length_q",
    "max_length_k",
    "cache_position",
}
# Requests that may also come from transformers' config.
_OUTPUTS = ("output_attentions", "output_hidden_states")
_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k")


class UncachedOutput(CausalLMOutputWithPast):
    """The result of a call that did not set use_cache, where transformers would have made a cache. Reading
    past_key_values is an error: a loop that passed None on to its next call would decode other tokens."""

    def __getattribute__(self, name: str) -> Any:
        if name == "past_key_values" and name in super().__getattribute__("__dict__"):
            raise RuntimeError(
                "past_key_values: a model that isobit.torch.patch has patched makes no cache unless it is"
                " called with use_cache=True, which runs transformers' own operators (use_cache=False: None)"
            )
        return super().__getattribute__(name)

    def __post_init__(self):
        del self.past_key_values  # the class attribute None stays, which transformers reads here
        super().__post_init__()
        self.__dict__["past_key_values"] = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)})"

    def __reduce__(self):
        return CausalLMOutputWithPast, (self.loss, self.logits)


def answer(
    model: nn.Module,
    score: Callable[[Batch, Sampling | None], Any],
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    labels: Tensor | None = None,
    logits_to_keep: int | Tensor = 0,
    num_items_in_batch: Any = None,
    return_dict: bool | None = None,
    use_cache: bool | None = None,
    **others: Any,
) -> CausalLMOutputWithPast | tuple:
    """Returns the logits of a call, or the loss if there are labels.

    Args:
        score: computes the logits of a batch's rows (if sampling is None), or the logprobs and entropies of
            its targets.

    Raises:
        ValueError: an argument is not supported, or is wrong; the message names it.
    """
    bounds = [others.pop(name, None) for name in _BOUNDS]
    others = {name: getattr(model.config, name, None) for name in _OUTPUTS} | others
    for name, value in others.items():
        if value is not None and value is not False and name not in _HARMLESS:
            raise ValueError(f"{name}: not supported by a model that isobit.torch.patch has patched")
    if input_ids is None or input_ids.dim() != 2:
        got = None if input_ids is None else list(input_ids.shape)
        raise ValueError(f"input_ids: expected the tokens [sequences, length], got {got}")
    if labels is not None and labels.shape != input_ids.shape:
        raise ValueError(
            f"labels: expected {list(input_ids.shape)}, like input_ids, got {list(labels.shape)}"
        )
    cuts = _sequence_bounds(input_ids, attention_mask, position_ids, *bounds)
    batch = _batch(input_ids, attention_mask, labels, cuts)
    out = score(batch, None if labels is None else Sampling())
    found: dict[str, Tensor] = {}
    if labels is not None:
        count = batch.scored.numel() if num_items_in_batch is None else float(num_items_in_batch)
        ones = torch.ones_like(out.logprobs)
        found["loss"] = F.policy_loss(out.logprobs, ones, ones / max(count, 1))
    else:
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        found["logits"] = _padded(out, input_ids, attention_mask)[:, keep]
    by_name = getattr(model.config, "return_dict", True) if return_dict is None else return_dict
    if not by_name:
        return tuple(found.values())
    wants_cache = use_cache is None and labels is None and getattr(model.config, "use_cache", False)
    return (UncachedOutput if wants_cache else CausalLMOutputWithPast)(**found)


def _batch(input_ids, attention_mask, labels, cuts):
    if cuts is not None:
        spans = list(itertools.pairwise(cuts))
        tokens, marks = input_ids[0].cpu(), None if labels is None else labels[0].cpu()
        return Batch.of([tokens[b:e] for b, e in spans], device=input_ids.device,
                        labels=None if marks is None else [marks[b:e] for b, e in spans])  # fmt: skip
    if attention_mask is None or attention_mask.shape != input_ids.shape:
        return Batch.from_padded(input_ids, attention_mask, labels=labels)
    if labels is not None:
        _refuse_labels_at_padding(labels, attention_mask)
    rows = attention_mask.bool().any(1)  # a row with only padding adds nothing
    if not bool(rows.all()) and bool(rows.any()):
        input_ids, attention_mask = input_ids[rows], attention_mask[rows]
        labels = None if labels is None else labels[rows]
    return Batch.from_padded(input_ids, attention_mask, labels=labels)


def _refuse_labels_at_padding(labels, attention_mask):
    wrong = ((labels != IGNORED) & (attention_mask == 0)).nonzero().tolist()
    if wrong:
        raise ValueError(
            f"labels: expected {IGNORED} at padding, where attention_mask is 0 (transformers scores it), got"
            f" {labels[tuple(wrong[0])].item()} at {wrong[0]}"
        )


def _padded(logits, input_ids, attention_mask):
    """Returns the logits of all token rows in transformers' form, [sequences, length, vocab]; 0 at
    padding."""
    shape = (*input_ids.shape, logits.shape[-1])
    if logits.shape[0] == input_ids.numel():
        return logits.view(shape)
    padded = logits.new_zeros(shape)
    padded[attention_mask.bool()] = logits
    return padded


def _sequence_bounds(input_ids, attention_mask, position_ids, cu_seq_lens_q, cu_seq_lens_k):
    """Returns the row bounds of the sequences in a batch without padding, [1, rows]; None if each row is one
    sequence."""
    length = input_ids.shape[1]
    whole = attention_mask is None or bool(attention_mask.all())
    if position_ids is not None and position_ids.shape[-1] != length:
        raise ValueError(f"position_ids: expected {length} in each row, got {position_ids.shape[-1]}")
    given = [torch.as_tensor(c).tolist() for c in (cu_seq_lens_q, cu_seq_lens_k) if c is not None]
    if given:
        bounds = given[0]
        if input_ids.shape[0] != 1 or not whole or bounds[:1] != [0] or bounds[-1] != length or (
            sorted(set(bounds)) != bounds
        ):  # fmt: skip
            raise ValueError(
                f"cu_seq_lens_q: expected ascending bounds from 0 to {length}, for one row of tokens without"
                f" padding, got {bounds} for {list(input_ids.shape)}"
            )
        if given[-1] != bounds:
            raise ValueError(
                f"cu_seq_lens_k: expected the bounds in cu_seq_lens_q, {bounds}, got {given[-1]}"
            )
        if position_ids is not None and position_ids.reshape(-1).tolist() != _counted(bounds):
            raise ValueError(f"position_ids: expected 0, 1, ... in each sequence of cu_seq_lens_q, {bounds}")
        return bounds
    if position_ids is None:
        return None
    expected = torch.arange(length, device=input_ids.device).expand_as(position_ids)
    if not whole:
        expected = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        position_ids = torch.where(attention_mask.bool(), position_ids, expected)
    if bool((position_ids == expected).all()):
        return None
    positions = position_ids.reshape(-1).tolist()
    bounds = [*(row for row, position in enumerate(positions) if position == 0), len(positions)]
    if not whole or position_ids.shape[0] != 1 or _counted(bounds) != positions:
        raise ValueError("position_ids: expected 0, 1, ... in each sequence")
    return bounds


def _counted(bounds):
    """Returns the positions of rows that these bounds cut into sequences."""
    return [row for b, e in itertools.pairwise(bounds) for row in range(e - b)]
