"""Lower bounds of steps: no strategy is faster or smaller than its bound, and a short model is what a short one is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import distir_relax as dr
from distir_relax.compiler.options import CompileOptions
from distir_relax.compiler.source import Source
from distir_relax.cost.profile import Profile, load_profile
from distir_relax.strategies.strategy import Strategy
from distir_relax.strategy_search.grid_search import search_grid
from distir_relax.strategy_search.local_search import search_locally
from distir_relax.strategy_search.lower_bounds import TOO_SLOW
from distir_relax.strategy_search.search_space import Candidate, Space
from distir_relax.strategy_search.shortened import Chain
from distir_relax.strategy_search.step_bounds import StepBounds

MACHINE = load_profile("dgx-h100:2")
WORDS = 300


class Block(nn.Module):
    """Attention and a feed-forward, each behind a norm and added."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 3 * width, bias=False), nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        y = self.before(x)
        parts = (p(y).view(rows, length, self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


def source(blocks: int, batch: int = 96, precision: str | None = "bf16") -> Source:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Embedding(WORDS, 768), *(Block(768, 6) for _ in range(blocks)), nn.LayerNorm(768), nn.Linear(768, WORDS)
        )
        ids = torch.zeros(batch, 127, dtype=torch.int64)
    training = dr.Training(
        model, lambda out, y: nn.functional.cross_entropy(out.flatten(0, 1), y.flatten()), dr.optim.AdamW(), (ids, ids),
        precision=precision,
    )  # fmt: skip
    return training.read(CompileOptions(profile=MACHINE))


@pytest.fixture(scope="module")
def long() -> Source:
    return source(9)


@pytest.mark.sweep
@pytest.mark.drawn(1)
@pytest.mark.parametrize("count", [2, 5])
def test_a_cut_chain_is_a_model_of_as_many_blocks(long: Source, count: int) -> None:
    chain = Chain.of(long)
    assert chain is not None
    assert len(chain) == 9
    short, made = chain.first(count), source(count)
    for text in ("1/2/1/2,zero=1", "2/1/1/3,zero=3,checkpoint=block"):
        found, expected = (s.with_strategy(Strategy.parse(text)).simulate(MACHINE, 12) for s in (short, made))
        assert found.makespan == pytest.approx(expected.makespan, rel=1e-9)
        assert found.peak_memory.tolist() == expected.peak_memory.tolist()
        assert found.device_ops == expected.device_ops


def test_models_without_a_chain_have_no_bounds() -> None:
    torch.manual_seed(0)
    unlike = nn.Sequential(nn.Linear(35, 61), nn.GELU(), nn.Linear(61, 127), nn.GELU(), nn.Linear(127, 35))
    x = torch.randn(12, 35)
    training = dr.Training(unlike, nn.functional.mse_loss, dr.optim.SGD(), (x, x)).read(CompileOptions(profile=MACHINE))
    assert StepBounds.of(training, MACHINE, []) is None

    # Results that leave the chain before its end need all of it.
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(24, 3) for _ in range(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = x
            for block in self.blocks:
                x = block(x)
                total = total + x
            return total

    y = torch.randn(12, 7, 24)
    training = dr.Training(Summed(), nn.functional.mse_loss, dr.optim.SGD(), (y, y)).read(
        CompileOptions(profile=MACHINE)
    )
    assert Chain.of(training) is None


def drawn(step: int) -> list[Candidate]:
    """Candidates of all kinds of strategies for 9 blocks."""
    space = Space(
        12, (48,), True, (2, 6, 16), zero=(0, 1, 2, 3), schedules=("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"),
        chunks=(1, 2), checkpoint=("none", "block"), sequence_parallel=(False, True),
    )  # fmt: skip
    found = space.candidates()[::step]
    return [c for c in found if c.strategy.tensor <= 6 and c.strategy.pipeline * c.strategy.chunks <= 9]


@pytest.fixture(scope="module")
def steps(long: Source) -> dict[Candidate, tuple[float, float]]:
    """The time and the largest peak of some steps."""
    simulations = {c: long.with_strategy(c.strategy).simulate(MACHINE, c.samples) for c in drawn(433)}
    return {c: (found.makespan, float(found.peak_memory.max())) for c, found in simulations.items()}


@pytest.fixture(scope="module")
def bounds(long: Source, steps: dict[Candidate, tuple[float, float]]) -> StepBounds:
    found = StepBounds.of(long, MACHINE, list(steps))
    assert found is not None
    return found


def test_no_step_is_shorter_than_its_bound(bounds: StepBounds, steps: dict[Candidate, tuple[float, float]]) -> None:
    tightness = []
    for candidate, (makespan, _) in steps.items():
        seconds = bounds.seconds(candidate, with_data=True)
        assert bounds.seconds(candidate) <= makespan * (1 + 1e-9), str(candidate)
        assert seconds <= makespan * (1 + 1e-9), str(candidate)
        tightness.append(seconds / makespan)
    assert len(tightness) > 3
    # Hosts take most of the time of such small steps.
    assert sorted(tightness)[len(tightness) // 2] > 0.4


def test_no_step_fits_into_less_memory_than_its_bound(
    bounds: StepBounds, steps: dict[Candidate, tuple[float, float]]
) -> None:
    def fits(candidate: Candidate, memory: float) -> bool:
        return replace(bounds, profile=replace(MACHINE, memory=memory)).seconds(candidate) < math.inf

    assert all(fits(candidate, peak) for candidate, (_, peak) in steps.items())
    assert sum(not fits(candidate, 0.55 * peak) for candidate, (_, peak) in steps.items()) >= 2


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "text",
    [
        # No gradients are there when all is in flight, nor on one stage while the other one of its rank needs weights.
        "2/2/3/6,schedule=gpipe,chunks=2,zero=1,sequence_parallel",
        "6/1/2/2,schedule=gpipe,chunks=2,zero=1,checkpoint=block",
        # The last backward frees gathered weights; an inner peak of a backward is more than is left of it.
        "2/1/6/2,zero=1,checkpoint=block",
        "2/3/2/2,schedule=zb-h1,zero=2,checkpoint=block,sequence_parallel",
    ],
)
def test_bounds_of_memory_are_those_of_one_moment(long: Source, text: str) -> None:
    candidate = Candidate(Strategy.parse(text), 48)
    bounds = StepBounds.of(long, MACHINE, [candidate])
    assert bounds is not None
    peak = float(long.with_strategy(candidate.strategy).simulate(MACHINE, candidate.samples).peak_memory.max())
    limits = [replace(bounds, profile=replace(MACHINE, memory=share * peak)) for share in (0.6, 1.0)]
    assert [limit.seconds(candidate) < math.inf for limit in limits] == [False, True]


@pytest.mark.sweep
@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("machine", "text", "tightness"),
    [
        (load_profile("dgx2-v100"), "2/3/2/6,zero=2", 0.3),
        (replace(MACHINE, dispatch=0.0), "4/3/1/2,zero=2,sequence_parallel", 0.3),
        # Weights that are gathered for each use are a small part of the bound.
        (replace(MACHINE, dispatch=0.0), "4/3/1/2,zero=3,sequence_parallel", 0.25),
    ],
)
def test_bounds_hold_on_other_machines(long: Source, machine: Profile, text: str, tightness: float) -> None:
    candidate = Candidate(Strategy.parse(text), 48)
    bounds = StepBounds.of(long, machine, [candidate])
    assert bounds is not None
    found = long.with_strategy(candidate.strategy).simulate(machine, candidate.samples).makespan
    assert tightness * found < bounds.seconds(candidate, with_data=True) <= found


@pytest.mark.sweep
def test_processes_find_the_same(long: Source) -> None:
    candidates = [Candidate(Strategy.parse(text), 48) for text in ("2/1/2/3,zero=2", "1/3/2/3")]
    alone, together = (StepBounds.of(long, MACHINE, candidates) for _ in range(2))
    assert alone is not None
    assert together is not None
    for with_data in (False, True):
        together.prepare(candidates, with_data, 2)
        for candidate in candidates:
            assert together.seconds(candidate, with_data) == alone.seconds(candidate, with_data)


FAST = replace(
    MACHINE, dispatch=0.0, levels=tuple(replace(x, latency=0.0, bandwidth=1e15, uplink=0.0) for x in MACHINE.levels)
)
SLOW = replace(MACHINE, dispatch=0.0, levels=tuple(replace(x, bandwidth=1e9, uplink=0.0) for x in MACHINE.levels))


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("machine", "text"),
    [
        (FAST, "1/1/9/4,schedule=gpipe"), (FAST, "1/1/3/6,schedule=interleaved,chunks=3"), (SLOW, "2/1/3/8,zero=3"),
    ],
)  # fmt: skip
def test_a_bubble_and_sums_of_gradients_are_part_of_the_bound(long: Source, machine: Profile, text: str) -> None:
    """Of a pipeline with few microbatches the bound is close, and of one that sums gradients in each of them."""
    candidate = Candidate(Strategy.parse(text), 48)
    bounds = StepBounds.of(long, machine, [candidate])
    assert bounds is not None
    found = long.with_strategy(candidate.strategy).simulate(machine, 48).makespan
    assert 0.6 * found < bounds.seconds(candidate, with_data=True) <= found, text


def test_a_search_with_bounds_finds_the_best_of_all() -> None:
    """On fast hosts and links most candidates are ruled out, none is left, and the best is that of the grid."""
    levels = tuple(replace(x, latency=0.0, bandwidth=1e13, uplink=0.0) for x in MACHINE.levels)
    fast = replace(MACHINE, dispatch=0.0, overhead=0.0, levels=levels)
    space, model = Space(4, (48,), True, (3, 6)), source(4)
    found, every = (run(model, fast, space, workers=1) for run in (search_locally, search_grid))
    assert found.untried == 0
    assert found.ranked[0] == every.ranked[0]
    refused = [outcome.refused for outcome in found.outcomes]
    assert len(refused) == len(space.candidates())
    assert refused.count(TOO_SLOW) > 3
    # They are slower.
    seconds = {outcome.candidate: outcome.seconds for outcome in every.outcomes}
    assert all(seconds[o.candidate] > every.ranked[0].seconds for o in found.outcomes if o.refused == TOO_SLOW)
