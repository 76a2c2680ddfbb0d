"""The cut of a batch into packs, lanes and slots (C10), and which part each rank computes in which pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral

MAX_LANES = 64


def is_power_of_two(n: int) -> bool:
    return isinstance(n, Integral) and n > 0 and n & (n - 1) == 0


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass of a rank.

    Attributes:
        slot: the number of its slot.
        packs: the sequences of its packs, one range for each of its lanes, in order; the range is empty if
            there is no pack. The passes of the same number on all ranks cover adjacent lanes.
    """

    slot: int
    packs: tuple[range, ...]

    def sequences(self) -> list[int]:
        """The indices of its sequences in the batch, in order."""
        return [sequence for pack in self.packs for sequence in pack]

    def pack_sizes(self) -> list[int]:
        """The number of sequences in each pack: the argument `packs` of `Batch.of`."""
        return [len(pack) for pack in self.packs]


@dataclass(frozen=True)
class Plan:
    """A batch that is cut into packs. Pack p belongs to lane `p % lanes` and slot `p // lanes`.

    Attributes:
        packs: the sequences of each pack.
        lanes: a power of two from 1 to 64.
    """

    packs: tuple[range, ...]
    lanes: int

    @property
    def slots(self) -> int:
        """The number of slots."""
        return -(-len(self.packs) // self.lanes)

    def pack(self, slot: int, lane: int) -> range:
        """Returns the sequences of a pack; an empty range if the pack does not exist."""
        index = slot * self.lanes + lane
        return self.packs[index] if index < len(self.packs) else range(0)

    def passes_per_slot(self, world: int, lanes_per_pass: int | None = None) -> int:
        """Returns how many passes a rank makes for a slot, if it computes lanes_per_pass lanes (None: all of
        its lanes) in each.

        Raises:
            ValueError: world or lanes_per_pass is not a power of two, or there are too few lanes for them.
        """
        per_pass = self.lanes // world if lanes_per_pass is None and world > 0 else lanes_per_pass
        if not is_power_of_two(world) or world > self.lanes:
            raise ValueError(f"world: expected a power of two up to the {self.lanes} lanes, got {world}")
        if not is_power_of_two(per_pass) or per_pass * world > self.lanes:
            raise ValueError(
                f"lanes_per_pass: expected a power of two up to {self.lanes // world}, the number of lanes of"
                f" each of {world} ranks, got {lanes_per_pass}"
            )
        return self.lanes // (world * per_pass)

    def passes(self, rank: int, world: int, lanes_per_pass: int | None = None) -> Iterator[Pass]:
        """Yields the passes of a rank, in order: those of slot 0, then those of slot 1, ... Every rank has
        the same number of passes.

        Pass t of the P passes of a slot covers lanes [t*L/P, (t+1)*L/P), together over all ranks; rank r
        takes the r-th part of them. So the sum over ranks is a subtree of the lanes' tree, and `GradientSum`
        computes the rest of the tree.

        Raises:
            ValueError: as passes_per_slot; or rank is not in [0, world).
        """
        count = self.passes_per_slot(world, lanes_per_pass)
        if not 0 <= rank < world:
            raise ValueError(f"rank: expected 0 to {world - 1}, got {rank}")
        per_pass = self.lanes // (count * world)
        for slot in range(self.slots):
            for number in range(count):
                first = (number * world + rank) * per_pass
                yield Pass(slot, tuple(self.pack(slot, first + lane) for lane in range(per_pass)))


def plan(lengths: Sequence[int], pack_tokens: int, lanes: int = 8, together: int = 1) -> Plan:
    """Cuts a batch, in order, into packs of whole sequences with at most pack_tokens token rows each. A
    longer sequence becomes a pack by itself.

    pack_tokens, lanes and together are part of the recipe of a run: they change bits. The number of ranks
    does not.

    Args:
        lengths: the number of token rows of each sequence.
        pack_tokens: the largest number of token rows in a pack.
        lanes: a power of two from 1 to 64.
        together: this many consecutive sequences, counted from the first, share a pack, for a loss that joins
            them, such as DPO's pairs.

    Raises:
        ValueError: a length, pack_tokens or together is below 1; lanes is not a power of two from 1 to 64; or
            the number of sequences is not a multiple of `together`.
    """
    if together < 1 or len(lengths) % together:
        raise ValueError(
            f"together: expected at least 1 and a divisor of the {len(lengths)} sequences, got {together}"
        )
    if pack_tokens < 1:
        raise ValueError(f"pack_tokens: expected at least 1, got {pack_tokens}")
    if not is_power_of_two(lanes) or lanes > MAX_LANES:
        raise ValueError(f"lanes: expected a power of two from 1 to {MAX_LANES}, got {lanes}")
    packs: list[range] = []
    tokens = 0
    for index, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"lengths: expected at least 1, got {length} at {index}")
    for index in range(0, len(lengths), together):
        end = index + together
        length = sum(lengths[index:end])
        if packs and tokens + length <= pack_tokens:
            packs[-1] = range(packs[-1].start, end)
            tokens += length
        else:
            packs.append(range(index, end))
            tokens = length
    return Plan(tuple(packs), lanes)
