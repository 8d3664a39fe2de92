"""What collectives send: the same for equal pieces however it is counted, and what rings really send."""

from __future__ import annotations

import pytest

from distir_relax.layout import Collective, Cut, Partial, R, Shard, collective_between


def ring(collective: Collective, pieces: list[int]) -> list[int]:
    """What each device sends, ring step by ring step; `pieces` has one for each device."""
    n = len(pieces)
    if collective is Collective.ALL_GATHER:
        return [sum(pieces[(i - step) % n] for step in range(n - 1)) for i in range(n)]
    if collective is Collective.REDUCE_SCATTER:
        # Piece j starts behind its device and goes round to it.
        return [sum(pieces[(i - 1 - step) % n] for step in range(n - 1)) for i in range(n)]
    return [sum(size for j, size in enumerate(pieces) if j != i) for i in range(n)]


@pytest.mark.parametrize("pieces", [[4, 4, 4], [5, 3, 0, 7, 1], [2, 9], [1] * 7])
@pytest.mark.parametrize("collective", [Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL])
def test_uneven_pieces(collective: Collective, pieces: list[int]) -> None:
    n = len(pieces)
    found = [collective.volume(n, sum(pieces), pieces[i], pieces[(i + 1) % n]) for i in range(n)]
    assert found == ring(collective, pieces)


@pytest.mark.parametrize("n", [2, 3, 5, 7])
@pytest.mark.parametrize("collective", list(Collective))
def test_equal_pieces(collective: Collective, n: int) -> None:
    piece = 12
    held = piece if collective is Collective.ALL_GATHER else n * piece
    assert collective.balanced_volume(n, held) == pytest.approx(collective.volume(n, n * piece, piece, piece))
    assert collective.rounds(n) * (n * piece if collective is Collective.SEND else piece) == collective.balanced_volume(
        n, held
    )


def test_which_collective_a_transition_is() -> None:
    a, b = Shard(0, Cut.of(3, 2)), Shard(1, Cut.of(4, 4))
    kinds = {
        (a, R): Collective.ALL_GATHER,
        (R, a): None,
        (a, b): Collective.ALL_TO_ALL,
        (a, a): None,
        (Partial(), R): Collective.ALL_REDUCE,
        (Partial("max"), R): Collective.ALL_REDUCE,
        (Partial(), a): Collective.REDUCE_SCATTER,
        (a, Partial()): None,
        (a, Partial("max")): Collective.ALL_GATHER,
        (R, R): None,
    }
    assert {pair: collective_between(*pair) for pair in kinds} == kinds
