"""Every collective against numpy, for one rank of any mesh; raises AssertionError on the first difference.

Shared by the tests under threads, mpirun and torchrun. All ranks make the same global arrays from one seed, so each
can compute in numpy what it must receive.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from distir_relax.bundle import Shard, Tensor, local_intervals, local_shape
from distir_relax.runtime import token_dispatch  # noqa: F401 - gives communicators more methods
from distir_relax.runtime.communicator import Communicator
from distir_relax.runtime.outputs import collect_output

REDUCE = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max}


def sizes_for(n: int, first: int = 3) -> list[int]:
    """Uneven sizes, the second of them 0: 3, 0, 5, 1, 2, 6, ..."""
    return [first, 0, 5, 1, 2, 6, 4][:n]


def check_all(comm: Communicator, kinds: tuple[bool, ...] = (False, True)) -> None:
    """Run every check, on every axis of the mesh, with torch's tensors (False), numpy's (True), or both."""
    for axis, name in enumerate(comm.mesh.axes):
        group = comm.mesh.group(comm.rank, axis)
        me = comm.mesh.coordinates(comm.rank)[axis]
        for numpy_kind in kinds:
            _reductions(comm, name, group, me, numpy_kind)
            _movements(comm, name, group, me, numpy_kind)
            _rows_of_groups(comm, name, group, me, numpy_kind)
        _dtypes(comm, name, group, me)
        _not_finite(comm, name, group, me)
        _outs(comm, name, group, me)
        _started(comm, name, group, me)
    if comm.world_size > 1:
        _messages(comm)
    _assembly(comm)


def values(rank: int, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray[Any, Any]:
    """The value that `rank` holds: small integers, so that sums are exact in every order."""
    return np.random.default_rng(rank + 100 * len(shape)).integers(-50, 50, shape).astype(dtype)


def same(found: Any, expected: np.ndarray[Any, Any], numpy_kind: bool) -> None:
    """Assert kind, shape, dtype and every element."""
    assert isinstance(found, np.ndarray if numpy_kind else torch.Tensor)
    result = found if numpy_kind else found.float().numpy() if found.dtype == torch.bfloat16 else found.numpy()
    assert result.shape == expected.shape, (result.shape, expected.shape)
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def _given(x: np.ndarray[Any, Any], numpy_kind: bool, contiguous: bool = True) -> Any:
    if not contiguous and x.ndim:
        x = np.ascontiguousarray(x.T).T
    return x.copy(order="K") if numpy_kind else torch.from_numpy(x.copy(order="K"))


def _reductions(comm: Communicator, axis: str, group: tuple[int, ...], me: int, numpy_kind: bool) -> None:
    n = len(group)
    for op, reduce in REDUCE.items():
        for shape in ((), (0,), (7,), (3, 5, 2)):
            theirs = [values(rank, shape) for rank in group]
            expected = reduce(np.stack(theirs), axis=0)
            for contiguous in (True, False):
                x = _given(theirs[me], numpy_kind, contiguous)
                before = x.copy() if numpy_kind else x.clone()
                same(comm.all_reduce(x, axis, op), expected, numpy_kind)
                assert (x == before).all(), "the input was changed"
                assert comm.all_reduce(x, axis, op, out=x) is x
                same(x, expected, numpy_kind)
        for dim in range(3):
            sizes = sizes_for(n)
            shape = tuple(sum(sizes) if d == dim else 2 + d for d in range(3))
            theirs = [values(rank, shape) for rank in group]
            start = sum(sizes[:me])
            expected = reduce(np.stack(theirs), axis=0).take(range(start, start + sizes[me]), dim)
            for contiguous in (True, False):
                x = _given(theirs[me], numpy_kind, contiguous)
                same(comm.reduce_scatter(x, axis, dim, sizes, op), expected, numpy_kind)


def _movements(comm: Communicator, axis: str, group: tuple[int, ...], me: int, numpy_kind: bool) -> None:
    n = len(group)
    sizes, others = sizes_for(n), sizes_for(n, 4)[::-1]
    cuts, other_cuts = np.cumsum(sizes)[:-1], np.cumsum(others)[:-1]
    for dim in range(3):
        whole = values(group[0], tuple(sum(sizes) if d == dim else 2 + d for d in range(3)))
        parts = np.split(whole, cuts, dim)
        for contiguous in (True, False):
            x = _given(parts[me], numpy_kind, contiguous)
            same(comm.all_gather(x, axis, dim, sizes), whole, numpy_kind)
            same(comm.shard(_given(whole, numpy_kind, contiguous), axis, dim, sizes), parts[me], numpy_kind)
        for concat in set(range(3)) - {dim}:
            extent = {dim: sum(sizes), concat: sum(others)}
            whole = values(group[0], tuple(extent.get(d, 2) for d in range(3)))
            mine = np.split(whole, other_cuts, concat)[me]
            x = _given(mine, numpy_kind)
            found = comm.all_to_all(x, axis, dim, sizes, concat, others)
            same(found, np.split(whole, cuts, dim)[me], numpy_kind)
        # Rank i sends (i + 2 j) % 4 rows to rank j.
        pieces = [[(i + 2 * j) % 4 for j in range(n)] for i in range(n)]
        theirs = [
            values(rank, tuple(sum(pieces[i]) if d == dim else 2 + d for d in range(3))) for i, rank in enumerate(group)
        ]
        stretches = [np.split(x, np.cumsum(row)[:-1], dim) for x, row in zip(theirs, pieces, strict=True)]
        expected = np.concatenate([row[me] for row in stretches], dim)
        for contiguous in (True, False):
            x = _given(theirs[me], numpy_kind, contiguous)
            same(comm.resplit(x, axis, dim, pieces), expected, numpy_kind)


def _rows_of_groups(comm: Any, axis: str, group: tuple[int, ...], me: int, numpy_kind: bool) -> None:
    """Rows to the ranks that have their groups, and back: some of a group that nobody has; all to one."""
    sizes = sizes_for(len(group))
    count, own = sum(sizes), slice(sum(sizes[:me]), sum(sizes[: me + 1]))
    ends = list(itertools.accumulate(sizes_for(len(group), 1)))
    groups = tuple(zip([0, *ends[:-1]], ends, strict=True))
    cases = ((np.arange(count) * 7 % (ends[-1] + 1), (count, 2), "float32"), (np.full(count, 0), (count,), "int64"))
    for ids, shape, dtype in cases[numpy_kind:]:
        whole = values(group[0], shape, dtype)
        owners = [next((i for i, (a, b) in enumerate(groups) if a <= n < b), -1) for n in ids]
        wide = np.array(owners).reshape(count, *[1] * (whole.ndim - 1))
        found = comm.rows_to_groups(_given(whole[own], numpy_kind), _given(ids, numpy_kind), axis, sizes, groups)
        same(found, np.where(wide == me, whole, 0), numpy_kind)
        # What a rank holds of rows that are not its own means nothing.
        held = _given(np.where(wide == me, whole, 77), numpy_kind)
        back = comm.rows_from_groups(held, _given(ids, numpy_kind), axis, sizes, groups)
        same(back, np.where(wide >= 0, whole, 0)[own], numpy_kind)


def _dtypes(comm: Communicator, axis: str, group: tuple[int, ...], me: int) -> None:
    n = len(group)
    sizes = sizes_for(n)
    for dtype in ("float64", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool"):
        kind = getattr(torch, dtype)
        theirs = [torch.from_numpy(values(rank, (sum(sizes), 2)) % 5).to(kind) for rank in group]
        stacked = torch.stack([x.double() for x in theirs])
        found = comm.all_reduce(theirs[me], axis, "max")
        assert found.dtype == kind
        assert torch.equal(found.double(), stacked.amax(0))
        if dtype != "bool":
            found = comm.reduce_scatter(theirs[me], axis, 0, sizes, "sum")
            assert found.dtype == kind
            assert torch.equal(found.double(), stacked.sum(0).split(sizes)[me])
        gathered = comm.all_gather(theirs[0].split(sizes)[me], axis, 0, sizes)
        assert gathered.dtype == kind
        assert torch.equal(gathered, theirs[0])


def _not_finite(comm: Communicator, axis: str, group: tuple[int, ...], me: int) -> None:
    """NaN of any rank is the extreme, whoever has it; infinities and zeros of both signs are numbers like others."""
    sizes = sizes_for(len(group))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        theirs = [torch.tensor([[-0.0, 1e30], [float("inf"), -1e30], [-float("inf"), 2.5]]) * (i + 1) for i in group]
        theirs = [x.repeat(sum(sizes), 1)[: sum(sizes)].to(dtype) for x in theirs]
        for number, x in enumerate(theirs):
            x[number % len(x), number % 2] = float("nan")
        for op, expected in (("max", torch.stack(theirs).amax(0)), ("min", torch.stack(theirs).amin(0))):
            found = comm.all_reduce(theirs[me], axis, op)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            found = comm.reduce_scatter(theirs[me], axis, 0, sizes, op)
            torch.testing.assert_close(found, expected.split(sizes)[me], rtol=0, atol=0, equal_nan=True)


def _outs(comm: Communicator, axis: str, group: tuple[int, ...], me: int) -> None:
    sizes = sizes_for(len(group))
    whole = values(group[0], (sum(sizes), 3))
    part = np.split(whole, np.cumsum(sizes)[:-1])[me]
    for numpy_kind in (False, True):
        out = _given(np.full_like(whole, -1), numpy_kind)
        assert comm.all_gather(_given(part, numpy_kind), axis, 0, sizes, out=out) is out
        same(out, whole, numpy_kind)
        # A buffer that is a stretch of a larger one, and one whose rows are not next to each other.
        wide = _given(np.full((sum(sizes), 6), -1, "float32"), numpy_kind)
        comm.all_gather(_given(part, numpy_kind), axis, 0, sizes, out=wide[:, ::2])
        same(wide[:, ::2], whole, numpy_kind)
        assert (wide[:, 1::2] == -1).all()
        out = _given(np.full_like(part, -1), numpy_kind)
        comm.reduce_scatter(_given(whole, numpy_kind), axis, 0, sizes, "max", out=out)
        same(out, part, numpy_kind)


def _started(comm: Communicator, axis: str, group: tuple[int, ...], me: int) -> None:
    """Started collectives with others in between, finished in another order: the bits of those that block."""
    sizes = sizes_for(len(group))
    whole = torch.from_numpy(np.random.default_rng(me).normal(size=(sum(sizes), 127)).astype("float32"))
    inputs = [whole, whole[:, ::2], whole.bfloat16(), whole[:0], whole[0, 0]]
    starts, expected = [], []
    for x, op in itertools.product(inputs, ("sum", "mean", "max")):
        starts.append(comm.start_all_reduce(x, axis, op))
        expected.append(comm.all_reduce(x, axis, op))
    for dim, x in enumerate((whole, whole.t())):
        starts.append(comm.start_reduce_scatter(x, axis, dim, sizes, "sum"))
        expected.append(comm.reduce_scatter(x, axis, dim, sizes, "sum"))
        part = x.split(sizes, dim)[me]
        starts.append(comm.start_all_gather(part, axis, dim, sizes))
        expected.append(comm.all_gather(part, axis, dim, sizes))
        # Each sends all that it has to the one before it.
        count = len(sizes)
        pieces = [[sizes[i] if j == (i - 1) % count else 0 for j in range(count)] for i in range(count)]
        starts.append(comm.start_resplit(part, axis, dim, pieces))
        expected.append(comm.resplit(part, axis, dim, pieces))
    for start, value in reversed(list(zip(starts, expected, strict=True))):
        found = comm.finish_collective(start)
        assert found.shape == value.shape
        assert found.dtype == value.dtype
        assert torch.equal(found, value)
    out, target = torch.empty(3, 5), torch.empty(5, 3).t()
    given = comm.start_all_reduce(torch.full((3, 5), me + 1.0), axis, "sum", out=out)
    assert comm.finish_collective(given, out=target) is target
    assert (target == len(group) * (len(group) + 1) / 2).all()


def _messages(comm: Communicator) -> None:
    n = comm.world_size
    # A ring, in an order that cannot deadlock even when a send waits for its receive.
    for source in range(n):
        target = (source + 1) % n
        for dtype, shape in (
            ("float32", (2, 3)),
            ("bfloat16", (5,)),
            ("int64", ()),
            ("float32", (0, 4)),
            ("bool", (3,)),
        ):
            x = torch.from_numpy(values(source, shape)).to(getattr(torch, dtype))
            if comm.rank == source:
                comm.send(x.t() if x.dim() == 2 else x, target)
            elif comm.rank == target:
                expected = x.t() if x.dim() == 2 else x
                found = comm.recv(expected.shape, dtype, source)
                assert found.dtype == expected.dtype
                assert torch.equal(found, expected)
    # Around the ring at once, twice, what comes first being taken last; what is sent as a copy may change.
    before, after = (comm.rank - 1) % n, (comm.rank + 1) % n
    for shape in ((2, 3), (0, 4), (300, 301)):
        x = torch.from_numpy(values(comm.rank, shape))
        comm.start_send(x.t(), after, False, step=1)
        comm.start_send(x, after, True, step=2)
        expected = torch.from_numpy(values(before, shape))
        coming = [comm.start_recv(shape[::-1], "float32", before, step=1)]
        coming.append(comm.start_recv(shape, "float32", before, step=2))
        x += 1
        assert torch.equal(comm.finish_recv(coming[1], before, step=2), expected)
        first = comm.finish_recv(coming[0], before, step=1)
        assert first.shape == shape[::-1]
        comm.finish_sends()
        comm.barrier()
    if comm.rank == 0:
        comm.send(values(0, (4, 2)), n - 1)
    elif comm.rank == n - 1:
        out = np.zeros((2, 4), "float32").T
        assert comm.recv((4, 2), "float32", 0, out=out) is out
        np.testing.assert_array_equal(out, values(0, (4, 2)))
    comm.barrier()


def _assembly(comm: Communicator) -> None:
    mesh = comm.mesh
    splits = []
    shape = [4, 6, 5]
    for axis, n in enumerate(mesh.shape):
        # Two intervals a rank, as a fused weight has them; the second rank holds nothing.
        sizes = sizes_for(n)
        starts = np.cumsum([0, *sizes]).tolist()
        shape[axis] = 2 * sum(sizes)
        splits.append(Shard(axis, axis, tuple(
            ((a, b), (sum(sizes) + a, sum(sizes) + b)) for a, b in itertools.pairwise(starts)
        )))  # fmt: skip
    for shards in ((), tuple(splits), *((split,) for split in splits)):
        for dtype in ("float32", "bfloat16"):
            tensor = Tensor("y", dtype, tuple(shape), "", shards)
            whole = torch.from_numpy(values(7, tuple(shape))).to(getattr(torch, dtype))
            local = whole
            for dim, pieces in enumerate(local_intervals(tensor, mesh, comm.rank)):
                index = [i for start, stop in pieces for i in range(start, stop)]
                local = local[(slice(None),) * dim + (index,)]
            assert tuple(local.shape) == local_shape(tensor, mesh, comm.rank)
            found = collect_output(comm, tensor, local)
            assert (found is None) == (comm.rank != 0)
            assert found is None or torch.equal(found, whole)
