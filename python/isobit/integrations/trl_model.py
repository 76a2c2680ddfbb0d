"""Makes the model of a TRL trainer compute with isobit's kernels, so that the per-token logprobs in TRL's
loss have the rollout's bits."""

import itertools
from collections.abc import Sequence

import torch
from torch import nn

import isobit.torch as it
from isobit.integrations._frameworks import require
from isobit.integrations.trl import INSTALL, log_gap, sampling_of
from isobit.torch.batch import IGNORED

# The arguments of a call with fused_lm_head: padded rows, or one row of samples that share prefixes.
_TREE = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
_UNUSED = ("position_ids", "tree_max_seqlen_q", "tree_max_seqlen_k", "use_cache", "num_items_in_batch")


def patch_trainer(trainer) -> None:
    """Patches the model of a GRPOTrainer or AsyncGRPOTrainer in place, and gives the trainer isobit's AdamW.

    The trainer's own logprobs and entropies (its calls with fused_lm_head) then come from isobit.torch, with
    the temperature and filters of its config. Samples that share a prefix are computed separately, so the
    model needs neither TRL's attention kernels nor a GPU. A GRPOTrainer also logs the gap (trl.log_gap); an
    AsyncGRPOTrainer has its own metric, kl.

    Args:
      trainer: a trainer that has not started; on one process, in bfloat16 (args with dtype or
        model_init_kwargs "bfloat16", and bf16=False, since nothing has to be cast). If an optimizer was
        passed to it, it keeps that.

    Raises:
      TypeError, ValueError: see isobit.torch.patch; or the trainer casts, wraps or adapts the model.
    """
    model, args = trainer.model, trainer.args
    if trainer.accelerator.mixed_precision != "no":
        raise ValueError(
            f"mixed_precision: expected no, got {trainer.accelerator.mixed_precision}: the model is bfloat16,"
            " set bf16=False"
        )
    if trainer.accelerator.num_processes != 1:
        raise ValueError(f"expected one process, got {trainer.accelerator.num_processes}")
    output_type = require("trl.trainer.utils", INSTALL).FusedCausalLMOutput
    sampling = sampling_of(args)
    del sampling["max_tokens"]
    fused = vars(model).pop("forward", None)  # TRL's, which hides that of the class
    try:
        it.patch(model)
    except BaseException:
        if fused is not None:
            model.forward = fused
        raise
    it.accumulate_slots(model)  # the micro-batches, which are the slots of a run on one process
    drawn = it.Sampling(**{name: value for name, value in sampling.items() if value is not None})
    model.forward = _FusedForward(model, model.forward, drawn, output_type)
    if trainer.optimizer is None:
        trainer.optimizer = _optimizer(trainer)
    if isinstance(trainer, require("trl", INSTALL).GRPOTrainer):
        log_gap(trainer)


def _optimizer(trainer) -> it.AdamW:
    """Returns an AdamW with the settings in the trainer's config. As in transformers, norms and biases do not
    decay."""
    args, decayed = trainer.args, set(trainer.get_decay_parameter_names(trainer.model))
    named = [(n, p) for n, p in trainer.model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [pair for pair in named if pair[0] in decayed], "weight_decay": args.weight_decay},
        {"params": [pair for pair in named if pair[0] not in decayed], "weight_decay": 0.0},
    ]
    return it.AdamW(
        [group for group in groups if group["params"]],
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
    )


class _FusedForward:
    """A model's forward. It answers calls with fused_lm_head as TRL's add_fused_lm_head does; other calls are
    unchanged."""

    def __init__(self, model: nn.Module, forward, sampling: it.Sampling, output_type: type):
        self._model = model
        self._forward = forward
        self._sampling = sampling
        self._output_type = output_type

    @property
    def __signature__(self):  # generate reads it
        return self._forward.__signature__

    def __call__(self, *args, fused_lm_head: bool = False, **kwargs):
        if not fused_lm_head:
            return self._forward(*args, **kwargs)
        if args:
            raise TypeError("a call with fused_lm_head: expected only keyword arguments")
        return self._scores(**kwargs)

    def _scores(
        self,
        input_ids,
        attention_mask=None,
        labels=None,
        shift_labels=None,
        num_items_in_batch=None,
        **others,
    ):
        tree = [others.pop(name, None) for name in _TREE]
        if unknown := [n for n, v in others.items() if n not in _UNUSED and v is not None and v is not False]:
            raise ValueError(f"{', '.join(unknown)}: not supported by a model that patch_trainer has patched")
        if shift_labels is None:
            batch, places = _padded_rows(input_ids, attention_mask, labels)
            mask = labels[:, 1:] != IGNORED
        else:
            batch, places = _tree_rows(input_ids, shift_labels, *tree)
            mask = shift_labels != IGNORED
        out = it.logprobs(self._model, batch, self._sampling)
        log_probs, entropies = (
            torch.zeros(mask.numel(), device=mask.device).index_copy(0, places, x).view(mask.shape)
            for x in (out.logprobs, out.entropies)
        )
        count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        loss = -log_probs.sum() / count
        return self._output_type(loss=loss, log_probs=log_probs, entropy=entropies, label_mask=mask)


def _padded_rows(input_ids, attention_mask, labels) -> tuple[it.Batch, torch.Tensor]:
    """Returns the batch for padded rows, and the flat index in labels[:, 1:] of each scored row."""
    batch = it.Batch.from_padded(input_ids, attention_mask, labels=labels)
    whole = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    row, column = whole.nonzero(as_tuple=True)  # the place of each token row of the batch
    scored = batch.scored
    return batch, row[scored] * (input_ids.shape[1] - 1) + column[scored]


def _tree_rows(input_ids, shift_labels, kv_index, _, path_bounds) -> tuple[it.Batch, torch.Tensor]:
    """Returns the batch for a row of samples that share prefixes, each sample as a whole sequence, and the
    index in the row of each scored row.

    A position that several samples share is scored only in the first of them: its bits are the same in all.
    """
    if kv_index is None or path_bounds is None or input_ids.shape[0] != 1:
        raise ValueError(
            f"a call with shift_labels: expected one row and {', '.join(_TREE)}, got {list(input_ids.shape)}"
        )
    kv_index, bounds = kv_index.tolist(), path_bounds.tolist()
    ids, labels = input_ids[0].tolist(), shift_labels[0].tolist()
    paths = [kv_index[b:e] for b, e in itertools.pairwise(bounds)]
    sequences, targets, rows = [], [], []
    seen: set[int] = set()
    for path in _whole_samples(paths):
        new = [position not in seen for position in path]
        seen.update(path)
        marks = [labels[p] if is_new else IGNORED for p, is_new in zip(path, new, strict=True)]
        if all(mark == IGNORED for mark in marks):
            continue
        sequences.append([ids[p] for p in path])
        targets.append(
            [IGNORED, *marks[:-1]]
        )  # shifted: the target of a token is predicted by the one before it
        rows += path
    batch = it.Batch.of(sequences, labels=targets, device=input_ids.device)
    return batch, torch.tensor(rows, device=input_ids.device)[batch.scored]


def _whole_samples(paths: Sequence[list[int]]) -> list[list[int]]:
    """Returns those of the paths from the root to a segment that are not the beginning of another path."""
    inner = {position for path in paths for position in path[:-1]}
    return [path for path in paths if path[-1] not in inner]
