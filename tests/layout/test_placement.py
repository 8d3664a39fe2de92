"""Device meshes and cuts: their arithmetic."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distir_relax.errors import PlacementError
from distir_relax.layout import Cut, DeviceMesh, Segment


def test_devices_are_numbered_row_by_row() -> None:
    mesh = DeviceMesh((2, 3), ("dp", "tp"))
    assert mesh.size == 6
    assert [mesh.coordinates(rank) for rank in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert str(mesh) == 'device_mesh((2, 3), ("dp", "tp"))'
    assert DeviceMesh((2, 3)).axes == ("axis0", "axis1")


@pytest.mark.parametrize("arguments", [((),), ((0,),), ((2,), ("a", "b")), ((2, 2), ("a", "a"))])
def test_bad_meshes_are_refused(arguments: tuple[object, ...]) -> None:
    with pytest.raises(PlacementError):
        DeviceMesh(*arguments)  # type: ignore[arg-type]


@given(st.data())
def test_the_intervals_of_all_shards_are_the_dim(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    sizes = st.lists(st.integers(0, 6), min_size=ranks, max_size=ranks).map(tuple)
    cut = Cut(tuple(data.draw(st.lists(st.builds(Segment, st.integers(1, 3), sizes), min_size=1, max_size=3))))
    held = [[i for a, b in cut.intervals(rank) for i in range(a, b)] for rank in range(ranks)]
    assert sorted(i for shard in held for i in shard) == list(range(cut.total))
    assert tuple(map(len, held)) == cut.local_sizes()
    for rank in range(ranks):
        intervals = cut.intervals(rank)
        assert all(a < b for a, b in intervals)
        assert all(left[1] < right[0] for left, right in itertools.pairwise(intervals))


def test_a_fused_weight_is_several_stretches() -> None:
    cut = Cut((Segment(3, (4, 2)),))
    assert cut.intervals(0) == [(0, 4), (6, 10), (12, 16)]
    assert cut.intervals(1) == [(4, 6), (10, 12), (16, 18)]
    assert not cut.is_block
    assert Cut.of(4, 2).is_block
