"""Reference executor of the ranked stage: the ranks' programs op by op, in turns, from communication to communication.

A rank runs until it needs something of others: a collective of which not all ranks of its group have given their
operand, or a message that was not sent. Operands of collectives are given in the order of a rank's program, started
ones in an order of their own, along each group. Programs that match (`distir_relax.ops.table.rank_checks`) end.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distir_relax.errors import RunError
from distir_relax.interpret.distributed_executor import LocalTensors
from distir_relax.ir import Function, Module, Op
from distir_relax.ops import Trait, evaluate, lookup

if TYPE_CHECKING:
    import torch

Meeting = tuple[bool, int, tuple[int, ...], int]
"""Whether it was started, the axis, the group of ranks along it, and the number of the collective among theirs."""


def run_ranks(ranked: Module, locals_: Mapping[str, LocalTensors]) -> dict[str, dict[int, torch.Tensor]]:
    """Run the programs of a ranked module, inlined and verified; return local outputs by output name.

    `locals_` are local inputs by value name. Raises `RunError` for an op that cannot run on its operands, and if the
    ranks wait for each other.
    """
    run = _Run(ranked)
    found: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    programs = [ranked.function(name) for name in ranked.ranks]
    states = [
        {item.value.name: locals_[item.value.name][rank] for item in program.inputs}
        for rank, program in enumerate(programs)
    ]
    waiting = deque((rank, run.steps(rank, *item)) for rank, item in enumerate(zip(programs, states, strict=True)))
    idle = 0
    while waiting:
        rank, steps = waiting.popleft()
        before = run.done
        if next(steps, True):
            for output in programs[rank].outputs:
                found[output.name][rank] = states[rank][output.value.name]
        else:
            waiting.append((rank, steps))
        idle = 0 if run.done > before else idle + 1
        if waiting and idle > len(waiting):
            ranks = sorted(rank for rank, _ in waiting)
            raise RunError(f"ranks {', '.join(map(str, ranks))} wait for each other")
    return found


@dataclass
class _Run:
    """Collectives and messages of one run."""

    ranked: Module
    done: int = 0
    """The number of ops that were run."""
    given: dict[Meeting, dict[int, tuple[Op, list[torch.Tensor]]]] = field(default_factory=lambda: defaultdict(dict))
    """The operands that ranks have given to a collective."""
    results: dict[Meeting, Sequence[torch.Tensor]] = field(default_factory=dict)
    counts: Counter[tuple[int, bool, int]] = field(default_factory=Counter)
    messages: dict[tuple[int, int, object], deque[torch.Tensor]] = field(default_factory=lambda: defaultdict(deque))
    """By sender, receiver, and the step of one that is started."""

    def steps(self, rank: int, program: Function, values: dict[str, torch.Tensor]) -> Iterator[bool]:
        """Run a program; yield False where the rank has to wait."""
        started: dict[str, Meeting] = {}
        for op in program.ops:
            entry = lookup(op.name, op.location)
            operands = [values[v.name] for v in op.operands if v.name not in started]
            results: Sequence[torch.Tensor] = ()
            if "distance" in op.attrs:
                while (message := self._message(rank, op, operands)) is None:
                    yield False
                results = [message]
            elif Trait.FINISHES in entry.traits:
                meeting = started[op.operands[0].name]
                while meeting not in self.results:
                    yield False
                results = [self.results[meeting][meeting[2].index(rank)]]
            elif Trait.COMMUNICATES in entry.traits:
                meeting = self._give(rank, op, operands)
                if Trait.STARTS in entry.traits:
                    started[op.results[0].name] = meeting
                    self.done += 1
                    continue
                while meeting not in self.results:
                    yield False
                results = [self.results[meeting][meeting[2].index(rank)]]
            elif Trait.ON_COMMUNICATOR in entry.traits:
                results = [self._part(rank, op, operands)]
            else:
                results = evaluate(op, operands)
            values.update(zip((v.name for v in op.results), results, strict=True))
            self.done += 1

    def _message(self, rank: int, op: Op, operands: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Send or receive; return the op's result, None for a message that was not sent so far."""
        import torch

        traits = lookup(op.name, op.location).traits
        peer = rank + int(op.attrs["distance"])  # type: ignore[arg-type]
        # Messages that are not started meet in program order.
        step = None if traits.isdisjoint({Trait.STARTS, Trait.FINISHES}) else op.attrs.get("step")
        if "shape" not in op.attrs and Trait.FINISHES not in traits:
            self.messages[rank, peer, step].append(operands[0])
            return operands[0].new_zeros(0)
        if "shape" in op.attrs and Trait.STARTS in traits:
            # Nothing reads the memory of a message before it is finished.
            return torch.empty(0, dtype=torch.float32)
        inbox = self.messages[peer, rank, step]
        return inbox.popleft() if inbox else None

    def _give(self, rank: int, op: Op, operands: list[torch.Tensor]) -> Meeting:
        """Give the operands of a rank to a collective, which runs with those of the last."""
        is_started = Trait.STARTS in lookup(op.name, op.location).traits
        axis, group = self._group(rank, op)
        key = rank, is_started, axis
        meeting = is_started, axis, group, self.counts[key]
        self.counts[key] += 1
        given = self.given[meeting]
        given[rank] = op, operands
        if len(given) == len(group):
            first = given[group[0]][0]
            columns = [given[member][1] for member in group]
            self.results[meeting] = _collective(first, [c[0] if len(c) == 1 else tuple(c) for c in columns])
            del self.given[meeting]
        return meeting

    def _part(self, rank: int, op: Op, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the result of an op that depends on the rank's index along an axis alone."""
        _, group = self._group(rank, op)
        return _collective(op, [operands[0]] * len(group) if operands else [])[group.index(rank)]

    def _group(self, rank: int, op: Op) -> tuple[int, tuple[int, ...]]:
        mesh = self.ranked.meshes[0]
        axis = mesh.axes.index(str(op.attrs["axis"]))
        return axis, mesh.group(rank, axis)


def _collective(op: Op, parts: Sequence[torch.Tensor | tuple[torch.Tensor, ...]]) -> Sequence[torch.Tensor]:
    semantics = lookup(op.name, op.location).semantics.collective_semantics
    assert semantics is not None
    try:
        return semantics(parts, op.attrs)
    except (ValueError, RuntimeError, IndexError) as error:
        raise RunError(f"{op.name}: {error}", op.location) from None
