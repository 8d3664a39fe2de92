"""Distribution strategies: degrees of parallelism, microbatches, and registered options.

An option is one class in one file: its syntax after D/T/P/K, its passes, the values that a search tries, and its effect
on memory. The options of this package are in `strategies.options`; a user's own registers the same way
(``examples/extend/add_strategy_option.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from distir_relax.errors import DistIRError
from distir_relax.layout import DeviceMesh, Placement, R
from distir_relax.strategies.weight_memory import WeightMemory

if TYPE_CHECKING:
    from distir_relax.ir import Pass

T = TypeVar("T", int, str, bool)

DEGREES = ("data", "tensor", "pipeline", "microbatches")
OPTIONS: dict[str, StrategyOption[Any]] = {}
"""The registered options by name, in the order in which strategies print them."""


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Strategy:
    """How a model is distributed: ``Strategy.parse("4/2/2/32,zero=1")`` is for 16 devices.

    `data`, `tensor`, `pipeline` and `microbatches` are the D/T/P/K of the DistIR paper. The other arguments are
    registered options (`StrategyOption`), attributes of a strategy by their names; their defaults are omitted:

    - `schedule` is the order of pipeline tasks, `chunks` the number of stages per device.
    - `zero` is what is sharded along the data axis: 1 the optimizer's state, 2 gradients too, 3 parameters too
      (Rajbhandari et al., ZeRO, 2020).
    - `checkpoint` selects the activations that are recomputed in the backward: ``none``, all inside of a ``block``, or
      ``selective``, those of a block that are cheap to recompute (Korthikanti et al., 2022).
    - With `sequence_parallel`, activations between blocks are split along the sequence over the tensor axis (same).
    - `context` is the number of devices that share each sequence (Liu et al., Ring Attention, 2023). With
      ``rows=whole`` they share the growing states of a program that continues sequences, and each has all rows.
    - `experts` of a mixture are split along their ``hidden`` dim, like other layers, or by expert along the ``data`` or
      the ``tensor`` axis.
    - `placements` selects the layouts within a stage: the ``rules`` of data and tensor parallelism, or ``auto``, the
      fastest layouts (`autosharding`); then the first two degrees are only the shape of the mesh.

    Raises TypeError for an option that is not registered, and `DistIRError` for a degree or a number of microbatches
    below one, and for an invalid value of an option: an unknown schedule, or chunks that it does not support; for
    options of ``rules`` together with ``placements=auto``.
    """

    data: int
    tensor: int
    pipeline: int
    microbatches: int
    options: tuple[tuple[str, Any], ...]
    """The names and values of options that differ from their defaults, in the order of the registry."""

    def __init__(
        self, data: int = 1, tensor: int = 1, pipeline: int = 1, microbatches: int = 1, **options: Any
    ) -> None:
        for name, degree in zip(DEGREES, (data, tensor, pipeline, microbatches), strict=True):
            object.__setattr__(self, name, degree)
        for name in options:
            if name not in OPTIONS:
                raise TypeError(f"there is no strategy option {name!r}; expected one of {', '.join(OPTIONS)}")
        present = tuple((n, options[n]) for n, o in OPTIONS.items() if n in options and options[n] != o.default)
        object.__setattr__(self, "options", present)
        if min(data, tensor, pipeline, microbatches) < 1:
            raise DistIRError(f"the degrees of a strategy are at least 1, found {self}")
        where = f"strategy {self}"
        for name, option in OPTIONS.items():
            option.check(self[name], where)
        for option in OPTIONS.values():
            option.check_combination(self)

    def __getitem__(self, name: str) -> Any:
        """Return a degree or the value of an option."""
        if name in DEGREES:
            return getattr(self, name)
        return dict(self.options).get(name, OPTIONS[name].default)

    def __getattr__(self, name: str) -> Any:
        """Return the value of an option."""
        if name not in OPTIONS:
            raise AttributeError(f"a strategy has no option {name!r}")
        return self[name]

    @property
    def devices(self) -> int:
        """Return the number of devices."""
        return self.mesh.size * self.pipeline

    @property
    def mesh(self) -> DeviceMesh:
        """Return the mesh of one stage: data x tensor, and the axes of options that have several devices."""
        axes = {"data": self.data, "tensor": self.tensor, **self.option_axes}
        return DeviceMesh(tuple(axes.values()), tuple(axes))

    @property
    def option_axes(self) -> dict[str, int]:
        """Return the mesh axes of options that have several devices, with their number."""
        sizes = {name: OPTIONS[name].axis_size(value) for name, value in self.options}
        return {name: size for name, size in sizes.items() if size > 1}

    def layout(self, data: Placement = R, tensor: Placement = R, **others: Placement) -> tuple[Placement, ...]:
        """Return a layout on the mesh of one stage, from placements by axis."""
        by_axis = {"data": data, "tensor": tensor, **others}
        return tuple(by_axis.get(axis, R) for axis in self.mesh.axes)

    @property
    def values(self) -> dict[str, Any]:
        """Return all degrees and options by name."""
        return {name: self[name] for name in (*DEGREES, *OPTIONS)}

    def weight_memory(self, states: int | None) -> WeightMemory:
        """Return the memory for weights, with an optimizer of `states` tensors per weight; None without training."""
        if states is None:
            return WeightMemory()
        memory = WeightMemory(gradients=1.0, state=float(states))
        for option in OPTIONS.values():
            memory = option.memory(self, memory)
        return memory

    def replace(self, **changes: Any) -> Strategy:
        """Return the strategy with other degrees or options. Raises as the constructor does."""
        return Strategy(**{**self.values, **changes})

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Parse ``D/T/P/K``, followed by options: ``2/4/1/8,zero=1,checkpoint=block,sequence_parallel``.

        Raises `DistIRError` for other texts.
        """
        degrees, *options = (part.strip() for part in text.split(","))
        if not re.fullmatch(r"[0-9]+(/[0-9]+){3}", degrees):
            raise DistIRError(f"expected a strategy D/T/P/K such as 4/2/2/32, found {text!r}")
        if len(degrees) > 64:
            raise DistIRError("expected a strategy D/T/P/K such as 4/2/2/32, found numbers of too many digits")
        data, tensor, pipeline, microbatches = map(int, degrees.split("/"))
        return cls(data, tensor, pipeline, microbatches, **dict(_parse_option(part, text) for part in options))

    def __str__(self) -> str:
        text = f"{self.data}/{self.tensor}/{self.pipeline}/{self.microbatches}"
        return text + "".join(f",{name}" if value is True else f",{name}={value}" for name, value in self.options)

    def __repr__(self) -> str:
        return f"Strategy.parse({str(self)!r})"


def as_strategy(strategy: Strategy | str) -> Strategy:
    """Return a strategy from its text or itself. Raises `DistIRError` for an invalid text."""
    return strategy if isinstance(strategy, Strategy) else Strategy.parse(strategy)


class PassPoint(Enum):
    """A point of the compilation at which options insert passes; the program is in the global stage."""

    ANNOTATED = "after the annotations of inputs and parameters"
    GRADIENTS = "after differentiation, of the program for one microbatch"
    STEP = "after the accumulation of gradients, before the optimizer's update"


@dataclass(frozen=True, slots=True)
class Ladder:
    """Values of an option in the order of falling memory, tried where a strategy does not fit (`memory_fit`).

    Ladders of a lower `cost` are tried first. Those of cost `EXPENSIVE` and above are combined with others last.
    """

    cost: float
    values: tuple[Any, ...]

    EXPENSIVE: ClassVar[float] = 3.0


class StrategyOption(Generic[T]):
    """Base class of strategy options, of type int, str or bool: ``NAME=VALUE`` after the degrees, ``NAME`` for True.

    A subclass sets `name`, `default` and `help`, and overrides what differs from the methods here. `choices` are the
    valid values, if they are few. A search takes lists of values by `search_name`; options of one `group` change in one
    step of the local search. An option without `with_autosharding` excludes ``placements=auto``.
    """

    name: ClassVar[str]
    default: T
    help: ClassVar[str]
    metavar: ClassVar[str]
    choices: Sequence[T] = ()
    with_autosharding: ClassVar[bool] = True

    @property
    def search_name(self) -> str:
        """The keyword of `dr.search`, and with hyphens the flag of ``distir search``."""
        return self.name

    @property
    def group(self) -> str:
        """The name of the options that the local search changes together."""
        return self.name

    def of(self, strategy: Strategy) -> T:
        """Return the value of this option in a strategy."""
        value: T = strategy[self.name]
        return value

    def parse(self, text: str, where: str) -> T:
        """Parse a value; `where` is its source. Raises `DistIRError` for a text of another type."""
        kind = type(self.default)
        value = _PARSERS[kind](text)
        if value is None:
            raise DistIRError(f"expected {_EXPECTED[kind]} for {self.name}, found {text!r}", where)
        return value  # type: ignore[no-any-return]

    def print(self, value: T) -> str:
        """Print a value as `parse` reads it: ``on`` or ``off`` for bool."""
        return ("on" if value else "off") if isinstance(value, bool) else str(value)

    def parse_list(self, text: str, where: str) -> tuple[T, ...]:
        """Parse values for a search, separated by commas. Raises as `parse` and `check` do, and for an empty list."""
        words = [word.strip() for word in text.split(",")]
        values = tuple(dict.fromkeys(self.parse(word, where) for word in words if word))
        if not values:
            raise DistIRError(f"expected values such as {self.metavar}, found {text!r}", where)
        for value in values:
            self.check(value, where)
        return values

    def check(self, value: T, where: str) -> None:
        """Check a value by itself; `where` is its source. Raises `DistIRError` for an invalid one."""
        if self.choices and value not in self.choices:
            *others, last = map(str, self.choices)
            separator = " or " if isinstance(self.default, int) else ", "
            expected = f"{', '.join(others)}{separator}{last}"
            found = repr(value) if isinstance(value, str) else value
            raise DistIRError(f"{self.name} is {expected}, found {found}", where)

    def check_combination(self, strategy: Strategy) -> None:
        """Check the value of a strategy with its other options. Raises `DistIRError` for an invalid combination."""

    def axis_size(self, value: T) -> int:
        """Return the number of devices of a mesh axis of its own, with its name; by default it has none."""
        return 1

    def needs_batch(self, value: T) -> bool:
        """Return whether its passes need to know the batch dim of the model."""
        return False

    def passes(self, strategy: Strategy, point: PassPoint, is_trained: bool) -> Sequence[Pass]:
        """Return the passes that it inserts at a point, in training or in inference; by default none."""
        return ()

    def makes_difference(self, strategy: Strategy, is_trained: bool) -> bool:
        """Return whether a search tries its values with these degrees."""
        return True

    def is_searched(self, value: T, strategy: Strategy, is_trained: bool) -> bool:
        """Return whether a search tries this value in a strategy whose other options are set."""
        return True

    def search_rank(self, value: T, values: Sequence[T]) -> int:
        """Return the place of a value among those that a local search starts with: the least first."""
        return values.index(value) if value in values else 0

    def are_neighbors(self, value: T, other: T) -> bool:
        """Return whether a local search changes one value to the other in a single step."""
        return True

    def memory(self, strategy: Strategy, memory: WeightMemory) -> WeightMemory:
        """Return the memory for weights, gradients and optimizer state under its value; the least, if it varies."""
        return memory

    def ladders(self, strategy: Strategy, is_trained: bool) -> Sequence[Ladder]:
        """Return values that need less memory than that of a strategy."""
        return ()


def register_option(option: StrategyOption[Any]) -> None:
    """Register an option; from then on strategies, searches and `compile` take it.

    Raises ValueError for a name that is no identifier or is taken, and for a default of another type than int, str or
    bool.
    """
    taken = {name for o in OPTIONS.values() for name in (o.name, o.search_name)} | {*DEGREES}
    if not option.name.isidentifier() or {option.name, option.search_name} & taken:
        raise ValueError(f"expected a new identifier for the name of an option, found {option.name!r}")
    if type(option.default) not in _PARSERS:
        raise ValueError(f"expected a default of int, str or bool for {option.name}, found {option.default!r}")
    OPTIONS[option.name] = option


def search_values(given: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the values to search for each registered option, from lists by search name, or from texts.

    Raises `DistIRError` for a name that no option has, for an empty list, and for an invalid value.
    """
    remaining = dict(given)
    values = {}
    for name, option in OPTIONS.items():
        listed = remaining.pop(option.search_name, (option.default,))
        where = f"search, {option.search_name}"
        if isinstance(listed, str):
            listed = option.parse_list(listed, where)
        if not listed or any(type(value) is not type(option.default) for value in listed):
            kind = type(option.default).__name__
            raise DistIRError(f"expected a list of {kind}, found {listed!r}", where)
        for value in listed:
            option.check(value, where)
        values[name] = tuple(listed)
    if remaining:
        names = ", ".join(option.search_name for option in OPTIONS.values())
        raise DistIRError(f"expected lists of values for {names}, found {next(iter(remaining))!r}", "search")
    return values


def _parse_option(part: str, text: str) -> tuple[str, Any]:
    name, _, value = (word.strip() for word in part.partition("="))
    if name not in OPTIONS:
        raise DistIRError(f"expected {', '.join(OPTIONS)} after D/T/P/K, found {part!r}", f"strategy {text!r}")
    return name, OPTIONS[name].parse(value.lower(), f"strategy {text!r}")


_PARSERS: Mapping[type, Any] = {
    int: lambda text: int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None,
    str: lambda text: text or None,
    bool: {"": True, "true": True, "on": True, "1": True, "false": False, "off": False, "0": False}.get,
}
_EXPECTED: Mapping[type, str] = {int: "a number", str: "a word", bool: "on or off"}
