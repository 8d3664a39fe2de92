"""A program of every communication, on ranks some of which hold nothing: run on TVM's machine, checked against torch.

What a rank gets of each is used, used by an op whose result has no elements, or not used at all, and which of these
differs from rank to rank. Run as a program, it is one rank of a launch.
"""

from __future__ import annotations

import sys

import torch

from distir_relax import ir
from distir_relax.layout import DeviceMesh
from distir_relax.ops import evaluate
from distir_relax.runtime.backends.tvm.compile import Compiled, ProgramText, compile_program
from distir_relax.runtime.backends.tvm.program import TvmProgram
from distir_relax.runtime.communicator import Communicator
from distir_relax.runtime.join import join_world

ROWS = {2: (0, 3), 3: (2, 0, 3), 4: (1, 0, 4, 0)}


def program(rank: int, ranks: int) -> str:
    """The ops of `rank`; its part of the rows is `ROWS[ranks][rank]`."""
    rows = ROWS[ranks]
    own, total = rows[rank], sum(rows)
    pieces = tuple(tuple(n if j == (i + 1) % ranks else 0 for j in range(ranks)) for i, n in enumerate(rows))
    before, after = (rank - 1) % ranks, (rank + 1) % ranks
    moved, columns = rows[before], tuple(2 if i == 0 else 0 for i in range(ranks))
    lines = [
        f'%a: f64[{total},5] = all_reduce(%x) {{axis="tp", op="sum", step=1}}',
        f'%b: f64[{own},5] = reduce_scatter(%x) '
        f'{{axis="tp", dim=0, sizes={rows}, size={own}, op="sum", step=2}}',
        # Two that are equal in all but their place: neither may stand for the other.
        f'%c: f64[{total},5] = all_reduce(%x) {{axis="tp", op="max", step=3}}',
        f'%d: f64[{total},5] = all_reduce(%x) {{axis="tp", op="max", step=3}}',
        f'%e: f64[{total},5] = all_gather(%b) {{axis="tp", dim=0, sizes={rows}, step=4}}',
        f'%f: f64[{moved},5] = resplit(%b) {{axis="tp", dim=0, pieces={pieces}, size={moved}, step=5}}',
        f'%part: f64[{total},{columns[rank]}] = strided_slice(%x) '
        f'{{axes=(1,), begin=(0,), end=({columns[rank]},), strides=(1,)}}',
        f'%g: f64[{own},2] = all_to_all(%part) {{axis="tp", split_dim=0, split_sizes={rows}, size={own}, '
        f'concat_dim=1, concat_sizes={columns}, step=6}}',
        '%none: f64[0,5] = all_reduce(%nothing) {axis="tp", op="sum", step=7}',
    ]  # fmt: skip
    # The first rank has the groups of two rows, the second all others.
    groups = tuple(((0, 2), (2, total))[i] if i < 2 else (total, total) for i in range(ranks))
    lines += [
        f'%ids: i64[{total}] = group_numbers() {{count={total}}}',
        f'%j: f64[{total},5] = rows_to_groups(%b, %ids) '
        f'{{axis="tp", sizes={rows}, groups={groups}, packed=False, step=8}}',
        f'%k: f64[{own},5] = rows_from_groups(%j, %ids) '
        f'{{axis="tp", sizes={rows}, groups={groups}, size={own}, step=9}}',
    ]  # fmt: skip
    # Around the ring: an even rank sends first, so that no two wait for each other.
    ring = [
        f'%sent: f64[0] = send(%b) {{distance={after - rank}, step={20 + rank}}}',
        f'%h: f64[{moved},5] = recv() '
        f'{{shape=({moved}, 5), dtype="float64", distance={before - rank}, step={20 + before}}}',
    ]  # fmt: skip
    lines += ring if rank % 2 == 0 else ring[::-1]
    # Around the ring again, nobody waiting for who receives.
    lines += [
        f'%gone: f64[0] = start_send(%b) {{distance={after - rank}, copy=False, step={40 + rank}}}',
        f'%coming: f64[{moved},5] = start_recv() '
        f'{{shape=({moved}, 5), dtype="float64", distance={before - rank}, step={40 + before}}}',
        f'%i: f64[{moved},5] = finish_recv(%coming) {{distance={before - rank}, step={40 + before}}}',
    ]  # fmt: skip
    # Collectives that are started, with one in program order before they are finished.
    lines += [
        f'%l.started: f64[{total},5] = start_all_reduce(%x) {{axis="tp", op="mean", step=50}}',
        f'%m.started: f64[{own},5] = start_reduce_scatter(%x) '
        f'{{axis="tp", dim=0, sizes={rows}, size={own}, op="max", step=51}}',
        f'%n.started: f64[{total},5] = start_all_gather(%b) {{axis="tp", dim=0, sizes={rows}, step=52}}',
        f'%o.started: f64[{moved},5] = start_resplit(%b) '
        f'{{axis="tp", dim=0, pieces={pieces}, size={moved}, step=54}}',
        f'%between: f64[{total},5] = all_reduce(%x) {{axis="tp", op="sum", step=53}}',
        f"%n: f64[{total},5] = finish_collective(%n.started) {{step=52}}",
        f"%l: f64[{total},5] = finish_collective(%l.started) {{step=50}}",
        f"%m: f64[{own},5] = finish_collective(%m.started) {{step=51}}",
        f"%o: f64[{moved},5] = finish_collective(%o.started) {{step=54}}",
    ]  # fmt: skip
    results = {"l": f"{total},5", "m": f"{own},5", "n": f"{total},5", "o": f"{moved},5",
               "a": f"{total},5", "b": f"{own},5", "d": f"{total},5", "e": f"{total},5", "f": f"{moved},5",
               "g": f"{own},2", "none": "0,5", "h": f"{moved},5", "i": f"{moved},5",
               "j": f"{total},5", "k": f"{own},5"}  # fmt: skip
    used = [name for i, name in enumerate(results) if (i + rank) % 3 == 0]
    lines += [f"%{name}.after: f64[{results[name]}] = negative(%{name})" for i, name in enumerate(results)
              if (i + rank) % 3 < 2]  # fmt: skip
    lines.append(f'%last: f64[{total},5] = all_reduce(%x) {{axis="tp", op="min", step=30}}')
    returned = ", ".join(f'"{name}": %{name}.after' for name in used)
    body = "\n".join(f"    {line}" for line in lines)
    return (
        f"  func @main_{rank}(\n    input %x: f64[{total},5],\n    input %nothing: f64[0,5],\n  ) {{\n{body}\n"
        f'    return {returned}, "last": %last\n  }}\n'
    )


def ranked_module(ranks: int) -> ir.Module:
    """The programs of all ranks, verified against each other."""
    return ir.parse(
        f'module @ranked {{\n  mesh[0] = device_mesh(({ranks},), ("tp",))\n'
        f"  ranks = ({', '.join(f'@main_{i}' for i in range(ranks))},)\n"
        + "".join(program(i, ranks) for i in range(ranks)) + "}\n"
    )  # fmt: skip


def compiled_program(module: ir.Module, rank: int) -> Compiled:
    """The executable of a rank."""
    return compile_program(ProgramText(ir.print_module(module), f"main_{rank}"))


def check_rank(comm: Communicator, module: ir.Module, compiled: Compiled) -> None:
    """Run this rank's program twice on TVM's machine; raises AssertionError where torch gives other numbers."""
    total = sum(ROWS[comm.world_size])
    function = module.function(f"main_{comm.rank}")
    tvm_program = TvmProgram(compiled, comm, ["x", "nothing"], {}, {}, "empty")
    for seed in range(2):
        generator = torch.Generator().manual_seed(7 * seed + comm.rank)
        x = torch.randn(total, 5, generator=generator, dtype=torch.float64)
        values = {"x": x, "nothing": x[:0]}
        found = tvm_program(x, x[:0], sizes={})
        calls = dict(comm.traffic.calls)
        for op in function.ops:
            results = evaluate(op, [values[v.name] for v in op.operands], comm)
            values.update(zip((v.name for v in op.results), results, strict=True))
        assert comm.traffic.calls == {kind: 2 * count for kind, count in calls.items()}, "as often as in torch"
        comm.traffic.calls.clear()
        for output, value in zip(function.outputs, found, strict=True):
            torch.testing.assert_close(value, values[output.value.name], atol=1e-12, rtol=1e-12)


def main() -> None:
    """One rank of a launch."""
    world = join_world()
    assert world is not None, "not started by a launcher"
    comm = world.communicator(DeviceMesh((world.size,), ("tp",)))
    module = ranked_module(world.size)
    check_rank(comm, module, compiled_program(module, world.rank))
    sys.stdout.write(f"rank {world.rank} right\n")
    sys.stdout.flush()
    world.exit()


if __name__ == "__main__":
    main()
