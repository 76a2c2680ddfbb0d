"""Batches for training: whole sequences one after the other, without padding, cut into packs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

IGNORED = -100


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the scored tokens were drawn. Each field is one number for all sequences, or one number for each
    sequence.

    A temperature of 0 counts as 1 without filters, as in the services. Bias, bans and penalties have no
    gradient, so tokens drawn with them cannot be trained on their processed logprobs.
    """

    temperature: float | Sequence[float] = 1.0
    top_k: int | Sequence[int] = 0
    top_p: float | Sequence[float] = 1.0
    min_p: float | Sequence[float] = 0.0

    def rows(self, batch: Batch) -> dict[str, torch.Tensor | None]:
        """Returns the arguments of the op, tensors with one element for each scored row; None if every row
        has the default.

        Raises:
            ValueError: a value is out of the range that the services accept, or is neither one number nor one
                for each sequence.
        """
        return {name: _rows(name, getattr(self, name), batch) for name in _RANGES}


# What the services accept: the default, the dtype, and the range as text and as a test.
_RANGES = {
    "temperature": (1.0, torch.float32, "0, or 0.001 to 1000", lambda v: v == 0 or 0.001 <= v <= 1000),
    "top_k": (0, torch.int32, "an integer of at least -1", lambda v: -1 <= v < 2**31 and v == int(v)),
    "top_p": (1.0, torch.float32, "above 0, up to 1", lambda v: 0 < v <= 1),
    "min_p": (0.0, torch.float32, "0 to 1", lambda v: 0 <= v <= 1),
}


def _rows(name, values, batch):
    default, dtype, expected, holds = _RANGES[name]
    if hasattr(values, "tolist"):  # a tensor or an array
        values = values.tolist()
    sequences = len(batch.sequences) - 1
    values = list(values) if isinstance(values, Sequence) else [values] * sequences
    if len(values) != sequences:
        raise ValueError(f"{name}: expected one number, or one for each of {sequences}, got {len(values)}")
    for value in values:
        if not holds(value):
            raise ValueError(f"{name}: expected {expected}, got {value}")
    if all(value == default for value in values):
        return None
    return torch.tensor(values, dtype=dtype, device=batch.device)[batch.scored_sequences]


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """The token rows of one pass, on one device.

    Attributes:
        ids: int32 [rows], the tokens. max_id: the largest id in `ids` and `targets`.
        positions: int32 [rows], from 0 in each sequence.
        sequences: row bounds of the sequences (on the host), [sequences + 1].
        cu_seqlens: the same as an int32 tensor.
        packs: row bounds of the packs (on the host), [packs + 1]; the number of packs is a power of two.
        scored: int64 [scored rows], the rows whose next token is scored, ascending.
        targets: int32 [scored rows], these next tokens.
        scored_packs: the bounds in `packs`, counted in scored rows.
        scored_sequences: int64 [scored rows], the index of each row's sequence.
        scored_lengths: the number of scored rows of each sequence (on the host), [sequences].
        unique_ids, starts, rows_by_id: which rows have which id (int32), for the embedding.
    """

    ids: torch.Tensor
    max_id: int
    positions: torch.Tensor
    sequences: list[int]
    cu_seqlens: torch.Tensor
    packs: list[int]
    scored: torch.Tensor
    targets: torch.Tensor
    scored_packs: list[int]
    scored_sequences: torch.Tensor
    scored_lengths: list[int]
    unique_ids: torch.Tensor
    starts: torch.Tensor
    rows_by_id: torch.Tensor

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.ids.device

    @property
    def max_length(self) -> int:
        """The number of rows of the longest sequence; 0 without sequences."""
        return max((e - b for b, e in zip(self.sequences, self.sequences[1:], strict=False)), default=0)

    @classmethod
    def of(
        cls,
        sequences: Sequence[Sequence[int] | torch.Tensor],
        *,
        prompt_lengths: Sequence[int] | None = None,
        packs: Sequence[int] | None = None,
        labels: Sequence[Sequence[int] | torch.Tensor] | None = None,
        device: torch.device | str = "cpu",
    ) -> Batch:
        """Makes a batch of whole sequences.

        Args:
            sequences: the tokens of each sequence, prompt and completion, at least one token. An empty list
                makes a pass without rows, for a rank whose lanes have no pack.
            prompt_lengths: for each sequence, the number of its first tokens that are not scored, at least 1.
                Default: 1.
            packs: the number of sequences in each pack (0: an empty pack), in order; the number of packs is a
                power of two. Default: one pack.
            labels: may be given instead of prompt_lengths: for each sequence, the target at each of its
                tokens, which the token before it predicts; IGNORED (-100) is not scored.
            device: the device of the tensors.

        Raises:
            ValueError: an argument is wrong; the message says what was expected and what came.
        """
        tokens = [_token_ids("sequences", s) for s in sequences]
        lengths = [t.numel() for t in tokens]
        if 0 in lengths:
            raise ValueError(f"sequences[{lengths.index(0)}]: expected at least one token in each, got none")
        bounds = [0]
        for n in lengths:
            bounds.append(bounds[-1] + n)
        ids = _join(tokens)
        if ids.numel() and int(ids.min()) < 0:
            raise ValueError(f"sequences: expected tokens of at least 0, got {int(ids.min())}")
        if labels is not None and prompt_lengths is not None:
            raise ValueError("expected labels or prompt_lengths, got both")
        if labels is None:
            prompt_lengths = [1] * len(lengths) if prompt_lengths is None else list(prompt_lengths)
            if len(prompt_lengths) != len(lengths):
                raise ValueError(
                    f"prompt_lengths: expected {len(lengths)}, one a sequence; got {len(prompt_lengths)}"
                )
            for i, (p, n) in enumerate(zip(prompt_lengths, lengths, strict=False)):
                if not 1 <= p <= n:
                    raise ValueError(f"prompt_lengths[{i}]: expected 1 to {n}, got {p}")
            wanted = torch.zeros_like(ids, dtype=torch.bool)
            for b, p, n in zip(bounds, prompt_lengths, lengths, strict=False):
                wanted[b + p : b + n] = True
            all_targets = ids
        else:
            marks = [_token_ids("labels", s) for s in labels]
            if [m.numel() for m in marks] != lengths:
                raise ValueError(f"labels: expected {lengths}, one a token; got {[m.numel() for m in marks]}")
            all_targets = _join(marks)
            wanted = all_targets != IGNORED
            for begin in bounds[:-1]:
                wanted[begin : begin + 1] = False  # a first token has no predecessor
        scored = torch.nonzero(wanted).reshape(-1) - 1
        targets = all_targets[scored + 1]
        if targets.numel() and int(targets.min()) < 0:
            raise ValueError(f"labels: expected tokens of at least 0, or {IGNORED}, got {int(targets.min())}")
        pack_rows = _pack_rows(packs, bounds)
        order = torch.argsort(ids, stable=True)
        unique, counts = torch.unique_consecutive(ids[order], return_counts=True)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), torch.cumsum(counts, 0)])
        positions = _join([torch.arange(n, device="cpu") for n in lengths])
        ends = torch.tensor(bounds, device="cpu")
        scored_bounds = torch.searchsorted(scored, torch.tensor(pack_rows, device="cpu")).tolist()
        of_rows = torch.searchsorted(ends, scored, right=True) - 1

        def put(t, dtype=torch.int32):
            return t.to(dtype).to(device)

        return cls(
            ids=put(ids),
            max_id=int(max(t.max() for t in (ids, targets) if t.numel())) if ids.numel() else 0,
            positions=put(positions),
            sequences=bounds,
            cu_seqlens=put(ends),
            packs=pack_rows,
            scored=put(scored, torch.int64),
            targets=put(targets),
            scored_packs=scored_bounds,
            scored_sequences=put(of_rows, torch.int64),
            scored_lengths=torch.bincount(of_rows, minlength=len(lengths)).tolist(),
            unique_ids=put(unique),
            starts=put(starts),
            rows_by_id=put(order),
        )

    @classmethod
    def from_padded(
        cls,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        labels: torch.Tensor | None = None,
        packs: Sequence[int] | None = None,
    ) -> Batch:
        """Makes a batch from padded rows.

        Padding may be on either side, but not inside a sequence. Every pack sum, and so every gradient, has
        the bits of the same sequences without padding.

        Args:
            input_ids: integers [sequences, length].
            attention_mask: 1 for tokens, 0 for padding, in the same shape. Default: no padding.
            labels: integers in the same shape, as in `of`. Default: every token except the first is scored.
            packs: as in `of`.

        Raises:
            ValueError: a shape is wrong, padding is inside a sequence, or a row has no token.
        """
        ids = input_ids.cpu()
        if ids.dim() != 2 or ids.numel() == 0:
            raise ValueError(f"input_ids: expected [sequences, length], got {list(ids.shape)}")
        if labels is not None and labels.shape != ids.shape:
            raise ValueError(f"labels: expected {list(ids.shape)}, like input_ids, got {list(labels.shape)}")
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask.cpu()
        if mask.shape != ids.shape or not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueError(
                "attention_mask: expected 0 and 1 in the shape of input_ids (other masks are not "
                f"supported); got {mask.dtype} {list(mask.shape)}"
            )
        mask = mask.bool()
        if bool(((mask[:, 1:] != mask[:, :-1]).sum(1) > 2).any()) or bool(
            (mask[:, 0] & mask[:, -1] & ~mask.all(1)).any()
        ):
            raise ValueError("attention_mask: expected padding before or after a sequence, not inside")
        if not bool(mask.any(1).all()):
            row = int(mask.any(1).int().argmin())
            raise ValueError(f"input_ids[{row}]: expected at least one token, got only padding")
        return cls.of(
            [row[m] for row, m in zip(ids, mask, strict=False)],
            labels=None if labels is None else [row[m] for row, m in zip(labels.cpu(), mask, strict=False)],
            packs=packs,
            device=input_ids.device,
        )


_INTEGERS = {torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.int64}


def _token_ids(name, values):
    """The tokens of a sequence, int64 [length]."""
    t = torch.as_tensor(values, device="cpu")
    if t.dim() == 0 or t.numel() != max(t.shape) or (t.numel() and t.dtype not in _INTEGERS):
        raise ValueError(f"{name}: expected integers [length] in each, got {t.dtype} {list(t.shape)}")
    return t.reshape(-1).long()


def _join(parts):
    return torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *parts])


def _pack_rows(packs, bounds):
    sequences = len(bounds) - 1
    packs = [sequences] if packs is None else list(packs)
    if len(packs) & (len(packs) - 1) or not 1 <= len(packs) <= 64:
        raise ValueError(f"packs: expected their number to be a power of two up to 64, got {len(packs)}")
    if min(packs) < 0 or sum(packs) != sequences:
        raise ValueError(f"packs: expected {sequences} sequences in total, got {packs}")
    rows, sequence = [0], 0
    for count in packs:
        sequence += count
        rows.append(bounds[sequence])
    return rows
