"""The registry of strategy options, and an option that a user's file registers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from distir_relax.cli import app
from distir_relax.errors import DistIRError
from distir_relax.strategies import Strategy, StrategyOption, register_option
from distir_relax.strategies.strategy import OPTIONS, Ladder, search_values
from distir_relax.strategies.weight_memory import WeightMemory
from distir_relax.strategy_search import Space
from tests.runtime.processes import interpreter

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "extend" / "add_strategy_option.py")


class Precision(StrategyOption[int]):
    """Bits of communicated gradients, as an example of a number."""

    name = "gradient_bits"
    default = 32
    help = "Bits of communicated gradients."
    metavar = "32,16"
    choices = (16, 32)

    def makes_difference(self, strategy: Strategy, is_trained: bool) -> bool:
        return strategy.data > 1

    def memory(self, strategy: Strategy, memory: WeightMemory) -> WeightMemory:
        factor = self.of(strategy) / 32
        return WeightMemory(memory.stored, memory.gathered, memory.gradients * factor, memory.state)

    def ladders(self, strategy: Strategy, is_trained: bool) -> tuple[Ladder, ...]:
        return (Ladder(0.5, (16,)),)


@pytest.fixture
def precision() -> Iterator[Precision]:
    option = Precision()
    register_option(option)
    yield option
    del OPTIONS[option.name]


def test_a_registered_option_is_parsed_printed_and_compared(precision: Precision) -> None:
    strategy = Strategy.parse("3/1/1/2, zero=1, gradient_bits=16")
    assert str(strategy) == "3/1/1/2,zero=1,gradient_bits=16"
    assert strategy == Strategy(3, 1, 1, 2, gradient_bits=16, zero=1) != Strategy(3, 1, 1, 2, zero=1)
    assert hash(strategy) == hash(Strategy.parse(str(strategy)))
    assert (strategy.gradient_bits, precision.of(strategy), strategy.checkpoint) == (16, 16, "none")
    assert strategy.replace(gradient_bits=32, data=2) == Strategy(2, 1, 1, 2, zero=1)
    assert "gradient_bits" not in dict(Strategy(gradient_bits=32).options)
    with pytest.raises(DistIRError, match="gradient_bits is 16 or 32, found 8"):
        Strategy(gradient_bits=8)
    with pytest.raises(DistIRError, match="expected a number for gradient_bits, found 'low'"):
        Strategy.parse("1/1/1/1,gradient_bits=low")


def test_an_option_is_searched_where_it_makes_a_difference(precision: Precision) -> None:
    space = Space(3, (9,), trained=True, microbatches=(1,), gradient_bits=(32, 16))
    names = [str(candidate.strategy) for candidate in space.candidates()]
    assert names == ["1/1/3/1", "1/3/1/1", "3/1/1/1", "3/1/1/1,gradient_bits=16"]
    assert search_values({"gradient_bits": "16, 32,16"})["gradient_bits"] == (16, 32)
    for values, message in (((), "expected a list of int"), (("16",), "expected a list of int"), ((8,), "16 or 32")):
        with pytest.raises(DistIRError, match=message):
            search_values({"gradient_bits": values})
    with pytest.raises(DistIRError, match=r"expected lists of values for schedules, .*gradient_bits, found 'bits'"):
        search_values({"bits": (16,)})


def test_every_default_is_printed_as_it_is_parsed() -> None:
    assert [option.parse(option.print(option.default), "") for option in OPTIONS.values()] == [
        option.default for option in OPTIONS.values()
    ]


def test_options_compose_their_effects_on_memory(precision: Precision) -> None:
    memory = Strategy(4, zero=2, gradient_bits=16).weight_memory(2)
    assert (memory.stored, memory.gathered, memory.gradients, memory.state) == (0.25, 0.75, 0.125, 0.5)
    assert memory.total == 1.625
    assert Strategy(4, zero=2, gradient_bits=16).weight_memory(None).total == 1


def test_zero_divides_memory_by_stage() -> None:
    """The closed form of the paper: state, then gradients, then parameters are divided by the ranks."""
    totals = [Strategy(5, zero=stage).weight_memory(2).total for stage in range(4)]
    assert totals == pytest.approx([4, 2 + 2 / 5, 1 + 3 / 5, 4 / 5])


def test_experts_are_searched_along_axes_of_several_ranks() -> None:
    space = Space(3, (9,), experts=("hidden", "data", "tensor"), microbatches=(3,))
    names = [str(candidate.strategy) for candidate in space.candidates()]
    assert names == [
        "1/1/3/3", "1/3/1/1", "1/3/1/1,experts=tensor", "3/1/1/1", "3/1/1/1,experts=data",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"name": "zero"}, "expected a new identifier"),
        ({"name": "schedules"}, "expected a new identifier"),
        ({"name": "tensor"}, "expected a new identifier"),
        ({"name": "two words"}, "expected a new identifier"),
        ({"name": "rate", "default": 0.5}, "expected a default of int, str or bool for rate"),
    ],
)
def test_other_declarations_are_refused(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        register_option(type("Other", (Precision,), attributes)())
    assert list(OPTIONS) == [
        "schedule", "chunks", "zero", "checkpoint", "sequence_parallel", "context", "ring", "rows", "experts",
        "placements",
    ]  # fmt: skip


def test_commands_take_the_option_of_a_file(tmp_path: Path) -> None:
    """The file is read before the strategy is parsed, and before the values to search are."""
    model, machine = f"{EXAMPLE}:build", ("--profile", "dgx2-v100")
    bundle = str(tmp_path / "tables.dist")
    done = run("compile", model, "--strategy", "3/1/1/1,tables=rows", "-o", bundle, "--backend", "torch")
    assert done.returncode == 0, done.stderr
    assert Path(bundle, "manifest.json").exists()
    done = run("simulate", model, *machine, "--strategy", "3/1/1/1,tables=rows")
    assert "strategy 3/1/1/1,tables=rows" in done.stdout, done.stderr
    done = run("search", model, "--devices", "3", *machine, "--try", "tables=whole,rows", "--workers", "1")
    assert "3/1/1/1,tables=rows" in done.stdout, done.stderr
    done = run("search", model, "--devices", "3", *machine, "--try", "tables=columns")
    assert (done.returncode, "tables is whole, rows, found 'columns'" in done.stderr) == (2, True)
    # Found before the file is read.
    malformed = CliRunner().invoke(app, ["search", model, "--devices", "3", *machine, "--try", "tables"])
    assert "expected NAME=VALUES" in str(malformed.exception)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, which registers the options of the file."""
    command = [*interpreter(), "-m", "distir_relax", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
