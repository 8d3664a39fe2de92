"""Verification of ranked programs against each other: orders, kinds, sizes, dtypes, peers, waiting."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import distir_relax as dr
from distir_relax.errors import VerificationError
from distir_relax.ir import Function, Module, Op, parse, print_module, verify
from distir_relax.ops import check
from distir_relax.ops.table import rank_checks
from tests.runtime.processes import python


class Twice(torch.nn.Module):
    """Two sums that are pending on each rank, of equal shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Linear(7, 5, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.a(x), self.b(x)
        return torch.tanh(a) * torch.relu(b)


def twice(ranks: int = 3) -> Module:
    torch.manual_seed(0)
    mesh = dr.DeviceMesh((ranks,), ("tp",))
    shardings = {"a.weight": "S[1]", "b.weight": "S[1]"}
    return dr.compile(Twice(), (torch.randn(4, 7),), shardings=shardings, mesh=mesh).modules["ranked"]


def apart(module: Module) -> Module:
    """Each rank has a function of its own, so that one rank's can be changed."""
    functions = tuple(replace(module.function(name), name=f"rank_{r}") for r, name in enumerate(module.ranks))
    return replace(module, functions=functions, ranks=tuple(f.name for f in functions))


def changed(module: Module, rank: int, ops: tuple[Op, ...]) -> Module:
    functions = list(module.functions)
    functions[rank] = replace(functions[rank], ops=ops)
    return replace(module, functions=tuple(functions))


def is_reduction(op: Op) -> bool:
    return op.name == "all_reduce"


def swapped(function: Function) -> tuple[Op, ...]:
    """The second reduction ahead of the first."""
    first, second = (i for i, op in enumerate(function.ops) if is_reduction(op))
    ops = list(function.ops)
    ops.insert(second, ops.pop(first))
    return tuple(ops)


def test_a_reduction_moved_ahead_of_another_on_one_rank() -> None:
    """Both are of the same kind and size: every rank would end, with wrong numbers."""
    module = apart(twice())
    verify(module, check)
    wrong = changed(module, 1, swapped(module.functions[1]))
    verify(wrong)  # each rank's program is fine by itself
    with pytest.raises(VerificationError, match=r"different places of the schedule: rank 0 does %.*, rank 1 does %"):
        verify(wrong, check)
    every = wrong
    for rank in (0, 2):
        every = changed(every, rank, swapped(module.functions[rank]))
    verify(every, check)


@pytest.mark.parametrize(
    ("attrs", "message"),
    [({"op": "max"}, "attributes differ"), ({"axis": "dp"}, "along 'dp', which no mesh has")],
)
def test_unlike_attributes(attrs: dict[str, str], message: str) -> None:
    module = apart(twice())
    ops = tuple(replace(op, attrs={**op.attrs, **attrs}) if is_reduction(op) else op for op in module.functions[2].ops)
    with pytest.raises(VerificationError, match=message):
        verify(changed(module, 2, ops), check)


HEAD = 'module @ranked {\n  mesh[0] = device_mesh((3,), ("tp",))\n  ranks = (@a, @b, @c,)\n'


def program(*bodies: str) -> Module:
    """A function for each of three ranks: inputs, ops, which may be with a rank @N, and the value returned."""
    functions = []
    for me, (name, body) in enumerate(zip("abc", bodies, strict=True)):
        body = re.sub(r"@(\d)", lambda peer, me=me: str(int(peer[1]) - me), body)
        inputs, *ops, output = [line.strip() for line in body.strip().splitlines()]
        lines = "".join(f"    {line}\n" for line in ops)
        functions.append(f'  func @{name}(\n    input {inputs},\n  ) {{\n{lines}    return "y": {output}\n  }}\n')
    return parse(HEAD + "".join(functions) + "}\n")


REDUCED = '%x: f32[{0}]\n%y: f32[{0}] = all_reduce(%x) {{axis="tp", op="sum", step=0}}\n%y'
GATHERED = '%x: f32[{0}]\n%y: f32[5] = all_gather(%x) {{axis="tp", dim=0, sizes={1}, step=0}}\n%y'
NOTHING = "%x: f32[5]\n%x"


@pytest.mark.parametrize(
    ("bodies", "message"),
    [
        ([REDUCED.format(5)] * 3, ""),
        ([REDUCED.format(5)] * 2 + [REDUCED.format(4)], "sizes do not fit"),
        ([REDUCED.format(5)] * 2 + [REDUCED.format(5).replace("f32", "f16")], "dtypes differ"),
        ([REDUCED.format(5)] * 2 + [NOTHING], "rank 0 waits for rank 2 in %y = all_reduce.*rank 2 has ended"),
        ([REDUCED.format(5)] * 2 + [GATHERED.format(1, "(2, 2, 1)")], "two collectives meet that are unlike"),
        ([GATHERED.format(n, "(2, 2, 1)") for n in (2, 2, 1)], ""),
        ([GATHERED.format(n, "(2, 2, 1)") for n in (2, 1, 2)], "sizes do not fit"),  # as the communicator would say
        ([GATHERED.format(n, "(2, 2, 1)") for n in (2, 2, 2)], "sizes do not fit"),
        ([GATHERED.format(2, "(2, 2, 1)")] * 2 + [GATHERED.format(1, "(2, 1, 2)")], "attributes differ"),
    ],
)
def test_a_collective_of_three(bodies: list[str], message: str) -> None:
    if message:
        with pytest.raises(VerificationError, match=message):
            verify(program(*bodies), check)
    else:
        verify(program(*bodies), check)


def sends(peer: int, step: int = 0, size: int = 5) -> str:
    return f"%s{step}: f32[0] = send(%x) {{distance=@{peer}, step={step}}}"


def receives(peer: int, step: int = 0, size: int = 5) -> str:
    return f'%r{step}: f32[{size}] = recv() {{shape=({size},), dtype="float32", distance=@{peer}, step={step}}}'


def rank(*ops: str) -> str:
    return "\n".join(["%x: f32[5]", *ops, "%x"])


@pytest.mark.parametrize(
    ("bodies", "message"),
    [
        ([rank(sends(1)), rank(receives(0)), NOTHING], ""),
        ([rank(sends(1)), rank(receives(0, size=4)), NOTHING], r"f32\[5\] is sent where f32\[4\] is received"),
        ([rank(sends(1)), NOTHING, NOTHING], "rank 0 waits for rank 1 in %s0 = send.*; rank 1 has ended"),
        ([NOTHING, rank(receives(0)), NOTHING], "rank 1 waits for rank 0 in %r0 = recv.*; rank 0 has ended"),
        ([rank(sends(1, 3)), rank(receives(0, 4)), NOTHING], "different places of the schedule"),
        ([rank(sends(7)), NOTHING, NOTHING], "rank 0 cannot exchange with a rank at a distance of 7"),
        # A ring in which each first sends, then one in which the last receives first.
        (
            [rank(sends((i + 1) % 3, i), receives((i - 1) % 3, (i - 1) % 3)) for i in range(3)],
            "rank 0 waits for rank 1 .*; rank 1 waits for rank 2 .*; rank 2 waits for rank 0",
        ),
        (
            [
                rank(sends(1, 0), receives(2, 2)),
                rank(receives(0, 0), sends(2, 1)),
                rank(receives(1, 1), sends(0, 2)),
            ],
            "",
        ),
    ],
)
def test_sends_and_receives(bodies: list[str], message: str) -> None:
    if message:
        with pytest.raises(VerificationError, match=f"(?s){message}"):
            verify(program(*bodies), check)
    else:
        verify(program(*bodies), check)


def test_a_transfer_across_a_collective_is_a_deadlock() -> None:
    reduce = '%y: f32[5] = all_reduce(%x) {axis="tp", op="sum", step=1}'
    bodies = [rank(sends(1, 2), reduce), rank(reduce, receives(0, 2)), rank(reduce)]
    with pytest.raises(VerificationError, match=r"rank 0 waits for rank 1 in %s2 .*; rank 1 waits for rank 0 in %y"):
        verify(program(*bodies), check)


@pytest.mark.parametrize("seed", range(40))
def test_orders_against_brute_force(seed: int) -> None:
    """Random transfers of three ranks, each rank's order shuffled a little, against trying every interleaving."""
    random_ = random.Random(seed)
    transfers = [(step, *random_.sample(range(3), 2)) for step in range(5)]
    orders: list[list[tuple[int, int, int]]] = []
    for me in range(3):
        mine = [t for t in transfers if me in t[1:]]
        if len(mine) > 1 and random_.random() < 0.5:
            i = random_.randrange(len(mine) - 1)
            mine[i], mine[i + 1] = mine[i + 1], mine[i]
        orders.append(mine)
    bodies = [
        rank(*(sends(b, step) if a == me else receives(a, step) for step, a, b in order))
        for me, order in enumerate(orders)
    ]
    if runs(tuple(map(tuple, orders))):
        verify(program(*bodies), check)
    else:
        with pytest.raises(VerificationError):
            verify(program(*bodies), check)


def runs(orders: tuple[tuple[tuple[int, int, int], ...], ...]) -> bool:
    """Whether some interleaving ends all ranks, a transfer being done by both ends at once."""
    if not any(orders):
        return True
    for step, a, b in {order[0] for order in orders if order}:
        if orders[a][:1] == orders[b][:1] == ((step, a, b),):
            return runs(tuple(order[1:] if i in (a, b) else order for i, order in enumerate(orders)))
    return False


def test_every_rank_of_a_large_mesh() -> None:
    """Programs that a thousand ranks share are looked at in a second."""
    import time

    module = twice(7)
    mesh = dr.DeviceMesh((146, 7), ("dp", "tp"))
    large = replace(module, meshes=(mesh,), ranks=module.ranks * 146)
    start = time.perf_counter()
    verify(large, check)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("seed", range(60))
def test_ranks_that_do_the_same_are_looked_at_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random programs on 3 x 2 x 2 ranks, most of them wrong, with ranks folded and without."""
    random_ = random.Random(seed)
    mesh = dr.DeviceMesh((3, 2, 2), ("dp", "pp", "tp"))
    varies = random_.choice([(), (1,), (1, 2), (0,)])
    names: dict[tuple[int, ...], str] = {}
    ranks = []
    for device in mesh.devices:
        here = mesh.coordinates(device)
        key = tuple(here[axis] for axis in varies)
        ranks.append(names.setdefault(key, f"main_{len(names)}"))
    functions = []
    for key, name in names.items():
        lines = [
            f'%y{i}: f32[5] = all_reduce(%x) {{axis="{a}", op="sum", step={i}}}' for i, a in enumerate(["dp", "tp"])
        ]
        if 1 in varies:
            after = 2 if random_.random() < 0.8 else random_.choice([1, 4, -2])
            first, second = sends(0, 7).replace("@0", str(after)), receives(0, 7).replace("@0", str(-after))
            lines.append(first if key[0] == 0 else second)
        if random_.random() < 0.3:
            random_.shuffle(lines)
        body = "".join(f"    {line}\n" for line in lines)
        functions.append(f'  func @{name}(\n    input %x: f32[5],\n  ) {{\n{body}    return "y": %x\n  }}\n')
    listed = " ".join(f"@{name}," for name in ranks)
    module = parse(f"module @ranked {{\n  mesh[0] = {mesh}\n  ranks = ({listed})\n" + "".join(functions) + "}\n")
    folded = verifies(module)
    monkeypatch.setattr(
        rank_checks, "_fold", lambda module, programs: rank_checks._Folded(frozenset(), tuple(range(12)))
    )
    assert folded == verifies(module)


def verifies(module: Module) -> bool:
    """Whether the programs match."""
    try:
        verify(module, check)
    except VerificationError:
        return False
    return True


REDUCTIONS = """
module @ranked {
  mesh[0] = device_mesh((3,), ("tp",))
  ranks = (@main_0, @main_0, @main_0,)
  func @main_0(
    input %x: f32[6,5],
  ) {
    %a: f32[6,5] = all_reduce(%x) {axis="tp", op="sum", step=1}
    %b: f32[6,5] = all_reduce(%a) {axis="tp", op="mean", step=2}
    %c: f32[6,5] = all_reduce(%b) {axis="tp", op="max", step=3}
    %d: f32[2,5] = reduce_scatter(%c) {axis="tp", dim=0, op="min", size=2, sizes=(2, 2, 2), step=4}
    %e: f32[6,5] = all_gather(%d) {axis="tp", dim=0, sizes=(2, 2, 2), step=5}
    return "y": %e
  }
}
"""


def test_a_mean_of_integers_has_no_type() -> None:
    module = parse(REDUCTIONS.replace("f32", "i64"))
    with pytest.raises(VerificationError, match="sizes do not fit each other"):
        verify(module, check)


def test_collectives_are_checked_without_the_compiler_of_torch(tmp_path: Path) -> None:
    """Its import takes as long as all else that a rank does before it runs."""
    (tmp_path / "ranked.txt").write_text(REDUCTIONS)
    program = tmp_path / "checks.py"
    program.write_text(
        "import sys\nfrom pathlib import Path\nfrom distir_relax.ir import parse, verify\n"
        "from distir_relax.ops import check\n"
        f"verify(parse(Path({str(tmp_path / 'ranked.txt')!r}).read_text()), check)\n"
        "print([name for name in ('torch', 'sympy', 'torch.fx.experimental.symbolic_shapes') if name in sys.modules])\n"
    )
    done = python(program, fresh=True)
    assert (done.returncode, done.stdout) == (0, "['torch']\n"), done.stderr


STARTED = """
module @ranked {
  mesh[0] = device_mesh((3,), ("tp",))
  ranks = (@main_0, @main_1, @main_2,)
"""
SUM = '  %{0}: f32[6,5] = {1}(%x) {{axis="tp", op="sum", step={2}}}'
FINISH = "  %{0}.done: f32[6,5] = finish_collective(%{0}) {{step={1}}}"


def started(*programs: str) -> Module:
    """Programs of three ranks: `S1` starts the sum of step 1, `F1` finishes it, `C1` is a sum in program order."""
    functions = []
    for rank, program in enumerate(programs):
        lines = []
        for kind, step in program.split():
            name = {"S": f"s{step}", "F": f"s{step}", "C": f"c{step}"}[kind]
            lines.append(
                FINISH.format(name, step)
                if kind == "F"
                else SUM.format(name, "start_all_reduce" if kind == "S" else "all_reduce", step)
            )
        body = "\n".join(lines)
        functions.append(f'  func @main_{rank}(input %x: f32[6,5]) {{\n{body}\n    return "y": %x\n  }}\n')
    return parse(STARTED + "".join(functions) + "}\n")


def test_started_collectives_of_ranks_that_match() -> None:
    verify(started(*["S1 S2 C3 F2 C4 F1"] * 3), check)
    # A rank may wait for its own earlier than others do for theirs.
    verify(started("S1 F1 S2 C3 F2", "S1 S2 F2 F1 C3", "S1 S2 C3 F1 F2"), check)


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        (["S1 S2 F1 F2", "S2 S1 F1 F2", "S1 S2 F1 F2"], "different places of the schedule: rank 0 does %s1.*rank 1"),
        (["S1 C2 F1", "S1 F1", "S1 C2 F1"], r"rank 0 waits for rank 1 in %c2 = .*; rank 1 has ended"),
        (["S1 F1 C2", "C2 S1 F1", "S1 F1 C2"], r"deadlock.*rank 0 waits for rank 1 in %s1.done = .*rank 1 waits for"),
        (["S1 F1", "C1", "S1 F1"], "deadlock between ranks"),
        (["S1", "S1 F1", "S1 F1"], "that @main_0 starts is never finished: %s1"),
        (["S1 F1", "", "S1 F1"], "rank 0 waits for rank 1 in %s1.done = .*; rank 1 has ended"),
    ],
    ids=["order", "missing", "deadlock", "kind", "unfinished", "not started"],
)  # fmt: skip
def test_started_collectives_of_ranks_that_do_not_match(programs: list[str], message: str) -> None:
    with pytest.raises(VerificationError, match=message):
        verify(started(*programs), check)


def test_a_result_is_used_once_it_is_finished() -> None:
    module = started(*["S1 F1 C2"] * 3)

    def with_ops(change: Callable[[Op], Op]) -> Module:
        functions = tuple(replace(f, ops=tuple(map(change, f.ops))) for f in module.functions)
        return replace(module, functions=functions)

    def uses_started(op: Op) -> Op:
        sums = module.functions[0].ops[0].results
        return op if op.name != "finish_collective" else replace(op, name="negative", operands=sums, attrs={})

    with pytest.raises(VerificationError, match="%s1 of @main_0 is used before it is finished"):
        verify(with_ops(uses_started), check)
    with pytest.raises(VerificationError, match="step 2 finishes what step 1 starts"):
        verify(with_ops(lambda op: replace(op, attrs={"step": 2}) if op.name == "finish_collective" else op), check)


def outcome(programs: Sequence[Sequence[str]]) -> str:
    """What happens if ranks run: each goes on until none can, and a step of a lane needs all lanes."""
    heads, lanes, done = [0] * len(programs), [list[str]() for _ in programs], list[str]()
    while any(head < len(program) for head, program in zip(heads, programs, strict=True)):
        before = (list(heads), len(done))
        for rank, program in enumerate(programs):
            while heads[rank] < len(program) and (
                program[heads[rank]][0] == "S" or (program[heads[rank]][0] == "F" and program[heads[rank]][1] in done)
            ):
                lanes[rank] += program[heads[rank]][1] if program[heads[rank]][0] == "S" else ""
                heads[rank] += 1
        if all(len(lane) > len(done) for lane in lanes):
            steps = {lane[len(done)] for lane in lanes}
            if len(steps) > 1:
                return "different"
            done += steps
        at = {program[head] for head, program in zip(heads, programs, strict=True) if head < len(program)}
        if all(h < len(p) and p[h][0] == "C" for h, p in zip(heads, programs, strict=True)):
            if len(at) > 1:
                return "different"
            heads = [head + 1 for head in heads]
        if before == (heads, len(done)):
            return "deadlock"
    return "right"


def test_random_orders_of_started_collectives() -> None:
    """The verifier against a run of the ranks, op by op."""
    generator = random.Random(3)
    seen = set()
    for _ in range(150):
        order = ["S1", "S2", "F1", "F2", "C3", "C4"]
        programs = []
        for _ in range(3):
            mine = list(order)
            for _ in range(generator.choice((0, 0, 1, 2))):
                i = generator.randrange(5)
                mine[i], mine[i + 1] = mine[i + 1], mine[i]
            if all(mine.index(f"S{n}") < mine.index(f"F{n}") for n in (1, 2)):
                order = mine if generator.random() < 0.5 else order
            else:
                mine = order
            programs.append(mine)
        expected = outcome(programs)
        seen.add(expected)
        module = started(*map(" ".join, programs))
        if expected == "right":
            verify(module, check)
        else:
            with pytest.raises(VerificationError, match=expected):
                verify(module, check)
    assert seen == {"right", "different", "deadlock"}


def test_a_message_without_a_step() -> None:
    """As in a bundle of somebody else."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3))
    ranked = dr.compile(model, (torch.randn(6, 4),), strategy="1/1/2/3").modules["ranked"]
    text = print_module(ranked)
    changed, count = re.subn(r"(start_send.*), step=\d+", r"\1", text, count=1)
    assert count == 1
    with pytest.raises(VerificationError, match="rank 1 waits for rank 0"):
        verify(parse(changed), check)
