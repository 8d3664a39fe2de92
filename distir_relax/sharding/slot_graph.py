"""Graph of slots, as arrays: the slots of each atom of an op are neighbors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distir_relax.ops import BLOCKED, WINDOW
from distir_relax.sharding.components import IntArray
from distir_relax.sharding.factors import Factoring, slot_index

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SlotGraph:
    """The slots of all atoms of the ops of a program; those that must not be split have none.

    A *member* is a slot of one atom of one op. Members of an atom are consecutive, in the order of the op's tensors:
    member `i` has slot ``slots[i]``, and belongs to tie ``ties[i]``, of the members from ``starts[tie]`` on. `ops` and
    `atoms` have for each tie the number of the op, and of the atom among `names`. `order` has all members sorted by
    slot, and those of a slot by op, operand and atom, from ``firsts[slot]`` on. `value_of` has the value of each slot.
    `uses` counts how often each value is an operand or a result, and `first_uses` has the first such op.
    """

    slots: IntArray
    ties: IntArray
    starts: IntArray
    ops: IntArray
    atoms: IntArray
    names: list[str]
    windows: BoolArray
    prefixes: BoolArray
    order: IntArray
    firsts: IntArray
    value_of: IntArray
    uses: list[int]
    first_uses: list[int]

    @staticmethod
    def of(factoring: Factoring) -> SlotGraph:
        """Build the graph."""
        classes, values = factoring.classes, len(factoring.slots)
        counts = np.diff(classes.firsts)
        uses, first_uses = np.zeros(values, dtype=np.int64), np.full(values, len(factoring.atoms), dtype=np.int64)
        slots, sizes, ops, atoms, ranks = ([np.zeros(0, dtype=np.int64)] for _ in range(5))
        names: list[str] = []
        windows: list[bool] = []
        prefixes: list[bool] = []
        most = 1 + max((len(group.atoms) for group in factoring.groups), default=0)
        for group in factoring.groups:
            np.add.at(uses, group.tensors, 1)
            np.minimum.at(first_uses, group.tensors, group.numbers[:, None])
            dims = [factoring.slots[classes.names[number]] for number in group.tensors[0].tolist()]
            firsts = classes.firsts[group.tensors]
            for index, atom in enumerate(group.atoms):
                members = [(t, slot_index(dims[t], *place)) for t, place in enumerate(atom.places) if place]
                if atom.kind == BLOCKED or len(members) < 2:
                    continue
                tensors, offsets = np.array(members, dtype=np.int64).T
                slots.append((firsts[:, tensors] + offsets).reshape(-1))
                sizes.append(np.full(len(group.numbers), len(members), dtype=np.int64))
                ops.append(group.numbers)
                atoms.append(np.full(len(group.numbers), len(names), dtype=np.int64))
                ranks.append(np.tile(tensors * most + index, len(group.numbers)))
                names.append(atom.name)
                windows.append(atom.kind == WINDOW)
                prefixes.append(atom.is_prefix)
        slot, size, op, atom_of, rank = (np.concatenate(parts) for parts in (slots, sizes, ops, atoms, ranks))
        ties = np.repeat(np.arange(len(size)), size)
        order = np.lexsort((rank, op[ties], slot))
        return SlotGraph(
            slot, ties, np.cumsum(size) - size, op, atom_of, names, np.array(windows, dtype=bool),
            np.array(prefixes, dtype=bool), order,
            np.searchsorted(slot[order], np.arange(int(classes.firsts[-1]) + 1)),
            np.repeat(np.arange(values), counts), uses.tolist(), first_uses.tolist(),
        )  # fmt: skip

    @property
    def has_windows(self) -> bool:
        """Whether any atom is that of a sliding window."""
        return bool(self.windows.any())

    def neighbors(self, slots: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return the edges from slots, in their order: the row in `slots`, the member that it leaves from, and the
        slot that it leads to."""
        rows, numbers = _ranges(self.firsts[slots], self.firsts[slots + 1])
        members = self.order[numbers]
        ties = self.ties[members]
        ends = np.append(self.starts[1:], len(self.slots))
        edges, others = _ranges(self.starts[ties], ends[ties])
        is_other = others != members[edges]
        edges, others = edges[is_other], others[is_other]
        return rows[edges], members[edges], self.slots[others]

    def is_window(self, members: IntArray) -> BoolArray:
        """Return which members are those of a sliding window's atom."""
        result: BoolArray = self.windows[self.atoms[self.ties[members]]]
        return result

    def is_prefix(self, member: int) -> bool:
        """Return whether a member is of an atom whose first dim has the first elements of the other."""
        return bool(self.prefixes[self.atoms[self.ties[member]]])

    def describe(self, member: int) -> tuple[int, str, int]:
        """Return the op of a member, the name of its factor, and the value that its slot is of."""
        tie = int(self.ties[member])
        return int(self.ops[tie]), self.names[int(self.atoms[tie])], int(self.value_of[self.slots[member]])


def _ranges(starts: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
    """Return all integers of ranges in turn, and for each the row of its range."""
    sizes = ends - starts
    rows = np.repeat(np.arange(len(starts)), sizes)
    return rows, np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes) + starts[rows]
