"""Microbatches that do the same, written out once for the simulator: it finds what it finds of all of them."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distir_relax as dr
from distir_relax.compiler.inputs import Model
from distir_relax.compiler.options import CompileOptions
from distir_relax.compiler.source import Source
from distir_relax.compiler.training import Training
from distir_relax.cost.profile import Profile, load_profile
from distir_relax.errors import VerificationError
from distir_relax.ir import MicrobatchParts, RepeatedMicrobatches, parse_records, print_records
from distir_relax.lowering.microbatches import representative_microbatches
from distir_relax.simulation.communication_matrix import bytes_between
from distir_relax.simulation.memory_categories import ACTIVATIONS
from distir_relax.simulation.pipeline_tasks import task_times
from distir_relax.simulation.simulation import Simulation
from distir_relax.simulation.simulator import simulate_module

WORDS, LENGTH, WIDTH = 31, 7, 12


class Block(nn.Module):
    """Attention and a feed-forward, as GPT-2 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).view(x.shape[0], LENGTH, 3, 3, WIDTH // 3).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape[0], LENGTH, WIDTH))
        return x + self.down(F.gelu(self.up(x)))


class Transformer(nn.Module):
    """Blocks behind an embedding whose weights the head shares; `last` is what comes behind them."""

    def __init__(self, blocks: int = 6, last: str = "norm") -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.BatchNorm1d(LENGTH) if last == "batch norm" else nn.LayerNorm(WIDTH)
        self.is_summed = last == "sum so far"

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        x = x.cumsum(0) if self.is_summed else x
        return F.linear(self.norm(x), self.embed.weight)


def ids(rows: int) -> torch.Tensor:
    return torch.zeros(rows, LENGTH, dtype=torch.long)


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def trained(rows: int, strategy: str, profile: Profile, **options: Any) -> Source:
    return under(strategy, profile, read_training(rows, **options))


def run(rows: int, strategy: str, profile: Profile) -> Source:
    return under(strategy, profile, read_model(rows))


def under(strategy: str, profile: Profile, source: Source) -> Source:
    return replace(source, options={**source.options, "strategy": strategy, "profile": profile})


@cache
def read_training(rows: int, **options: Any) -> Source:
    """Read in once for all strategies."""
    with torch.device("meta"):
        training = Training(Transformer(**options), loss, dr.optim.AdamW(), (ids(rows), ids(rows)))
    return training.read()


@cache
def read_model(rows: int) -> Source:
    """Read in once for all strategies."""
    with torch.device("meta"):
        model = Model(Transformer().eval(), (ids(rows),))
    return model.read(CompileOptions())


def found(simulation: Simulation) -> dict[str, Any]:
    """What a simulation says: times and memory to the last bit, the tasks by name, when memory changes."""
    return {
        "makespan": simulation.makespan,
        "device ops": simulation.device_ops,
        "peaks": [(peak.bytes, peak.split) for peak in map(simulation.peak, range(simulation.devices))],
        "busy": [row.tolist() for row in (simulation.compute, simulation.communicate, simulation.overlapped)],
        "tasks": [
            (task.name, simulation.members[task.device_class].tolist(), task.start, task.end)
            for task in task_times(simulation)
        ],
        # The op at which memory peaks is that of a microbatch that does the same.
        "summary": re.sub(r"\.[0-9]+(?= = |\.[a-z])", "", str(simulation)),
    }


def assert_same(source: Source, profile: Profile, samples: int | None = None) -> Simulation:
    part = source.distributed(repeated=True, samples=samples)
    assert any(isinstance(record, RepeatedMicrobatches) for record in part.records)
    simulated, whole = simulate_module(part, profile), simulate_module(source.distributed(samples=samples), profile)
    assert found(simulated) == found(whole)
    ours, theirs = bytes_between(simulated.module), bytes_between(whole.module)
    assert np.array_equal(ours.bytes, theirs.bytes)
    assert np.array_equal(ours.target, theirs.target)
    return simulated


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "strategy",
    [
        "1/1/1/7",
        "3/1/1/5,zero=2",
        "1/3/1/4",
        "1/1/3/13",
        "1/1/3/5,schedule=gpipe",
        "2/1/2/6,zero=1,checkpoint=block",
        "1/3/2/5,schedule=zb-h1,sequence_parallel",
        "1/1/2/7,schedule=interleaved,chunks=3",
        "1/1/2/6,schedule=zb-v,chunks=2",
        "1/1/3/9,schedule=auto",
        "3/1/2/4,zero=3,schedule=dualpipe-v,chunks=2",
    ],
)
def test_a_step_of_training_is_simulated_as_if_all_were_written_out(strategy: str) -> None:
    """Of 23 samples, which nothing divides: microbatches of two sizes, data-parallel ranks with shards of two."""
    profile = load_profile("dgx2-v100")
    assert_same(trained(23, strategy, profile), profile)


def test_so_is_one_whose_gradients_are_reduced_in_several_steps() -> None:
    """Shard, all-reduce and all-gather: none of their values is taken for one of a microbatch."""
    profile = load_profile("dgx2-v100")
    assert_same(trained(40, "3/2/2/5,schedule=1f1b", profile), profile)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("rows", [29, 36])
@pytest.mark.parametrize("strategy", ["1/1/1/9", "3/1/1/5", "1/1/5/11,schedule=streaming", "2/3/2/4", "1/1/3/12"])
def test_so_is_a_model_that_runs(strategy: str, rows: int) -> None:
    """Whose last stage is sent the weights that it shares with the first: once, and not for each microbatch."""
    profile = load_profile("dgx2-v100")
    assert_same(run(rows, strategy, profile), profile)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("strategy", "samples"), [("1/1/3/5", 13), ("2/1/1/4", 19), ("3/1/2/1", 7), ("1/1/1/3", 3)])
def test_of_fewer_samples_than_the_program_has(strategy: str, samples: int) -> None:
    """The program of 31 samples, taken as if there were fewer, is that of the model exported with so many."""
    profile = load_profile("dgx2-v100")
    large, small = trained(31, strategy, profile), trained(samples, strategy, profile)
    ours, theirs = large.simulate(profile, samples), small.simulate(profile)
    assert (ours.samples, ours.makespan, ours.device_ops) == (samples, theirs.makespan, theirs.device_ops)
    assert [peak.bytes for peak in ours.peaks] == [peak.bytes for peak in theirs.peaks]


@pytest.mark.sweep
def test_a_norm_over_all_samples_is_one_more_meeting_of_microbatches() -> None:
    profile = load_profile("dgx2-v100")
    assert_same(trained(11, "1/1/1/5", profile, last="batch norm"), profile)


def test_microbatches_that_do_unlike_things_are_all_written_out() -> None:
    """A sum over the samples so far takes all of them at once."""
    profile = load_profile("dgx2-v100")
    source = trained(11, "1/1/1/5", profile, last="sum so far")
    with pytest.raises(VerificationError):
        simulate_module(source.distributed(repeated=True), profile)
    whole = simulate_module(source.distributed(), profile)
    whole.samples = 11
    assert found(source.simulate(profile)) == found(whole)


def test_activations_are_kept_of_one_microbatch_where_labels_are_counted_over_all() -> None:
    """The loss is a mean over all labels, which are counted first: their number is all that microbatches share."""
    profile = load_profile("dgx2-v100")
    one, many = (
        trained(24, f"1/1/1/{count}", profile).simulate(profile).peaks[0].split[ACTIVATIONS] for count in (1, 8)
    )
    assert many < one / 6


def test_what_stands_for_all() -> None:
    assert representative_microbatches(10, 4) == (0, 1, 2, 3)
    assert representative_microbatches(100, 10) == (0, 1, 9)
    assert representative_microbatches(103, 10) == (0, 1, 3, 9)
    assert representative_microbatches(5, 5) == (0, 1, 4)
    assert representative_microbatches(7, 1) == (0,)
    assert representative_microbatches(100, 10, summed=False) == (0, 1)
    assert representative_microbatches(103, 10, summed=False) == (0, 1, 3)
    repeated = RepeatedMicrobatches(10, (0, 1, 3, 9), {"mask.1": 1}, ("count",))
    assert repeated.ranges == (range(1), range(1, 3), range(3, 9), range(9, 10))
    assert repeated.part_of == {"mask.1": 1}
    assert parse_records(print_records([repeated])) == (repeated,)


def test_a_program_of_which_a_part_was_lost_is_refused() -> None:
    """A microbatch that misses an op, and a value that nobody makes: never a figure of less than all of it."""
    profile = load_profile("dgx2-v100")
    module = trained(20, "1/1/1/8", profile).distributed(repeated=True)
    main = module.main
    parts = next(record.parts for record in module.records if isinstance(record, MicrobatchParts))
    lost = next(op for op in main.ops if any(v.name == parts[1] for v in op.operands))
    twice = replace(main, ops=tuple(o for op in main.ops for o in ((op, _again(op)) if op is lost else (op,))))
    with pytest.raises(VerificationError, match="different ops"):
        simulate_module(replace(module, functions=(twice, *module.functions[1:])), profile)


def _again(op: Any) -> Any:
    return replace(op, results=tuple(replace(v, name=f"{v.name}.again") for v in op.results))
