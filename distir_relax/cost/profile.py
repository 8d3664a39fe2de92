"""Machine profile: devices and the links between them, read from TOML.

The format is described in ``docs/simulator.md``. Bandwidths are bytes per second, times seconds, sizes bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from distir_relax.cost.heterogeneous import Group, check_groups, read_ranges
from distir_relax.cost.uncertainty import Uncertainty
from distir_relax.errors import ProfileError
from distir_relax.layout import Collective
from distir_relax.support import is_finite, parse_toml, read_text, shown

SHAPE_OP = "shape_op"
"""The name of ops on shapes in `Profile.waits`."""
RUNTIME = (
    "dispatch", "view", SHAPE_OP, "call", "python", "python_collective", "recorded", "step", "request_step", "request",
)  # fmt: skip
"""The figures in a profile's table of the runtime."""
KINDS = ("gpu", "cpu")
"""The kinds of devices."""
MAX_BYTES = 1 << 20
"""Maximum length of a profile: a thousand measured points take a tenth of it."""
SMALLEST, LARGEST = 1e-30, 1e30
"""Range of all times, sizes and speeds: their products are finite."""
MAX_DEVICES = 1 << 20
"""Maximum number of devices of a machine."""


MAX_DEVIATION = 10.0
"""Maximum relative standard deviation of an error: more says nothing."""


@dataclass(frozen=True)
class Matrix:
    """Speed of matrix products: flop/s of a large one, and the rows, columns and inner size at half that speed.

    A product of m x k with k x n takes ``2 ((m + half_rows) (n + half_columns) + half_area) (k + half_inner) / flops``:
    a GPU is at half its speed for `half_area` elements of the result, however they are arranged. One of few
    rows takes ``2 m n k / thin`` if that is less: it is computed row by row, without packing. Its operands are in a
    cache, or are read at `bandwidth`, which is less than the device's if accesses are not contiguous. Either is 0 if it
    was not measured.

    Small products are slow mostly because they do not fill the device. A batch of them, as in attention, does: on a
    device that works in tiles of `tile` rows and columns, the first of a batch takes as long as alone, and each other
    one at most the time of its whole tiles, ``2 m' n' k / flops``, with m' and n' rounded up to tiles. 0 if products of
    a batch run sequentially.

    `call` is the time of Python to call a product, as `Profile.calls` for other ops.
    """

    flops: float
    half_rows: float = 0.0
    half_columns: float = 0.0
    half_inner: float = 0.0
    thin: float = 0.0
    bandwidth: float = 0.0
    tile: float = 0.0
    half_area: float = 0.0
    call: float = 0.0

    def seconds(self, batch: int, rows: int, columns: int, inner: int) -> float:
        """Return the compute seconds of `batch` products of ``rows x inner`` with ``inner x columns``."""
        if min(batch, rows, columns, inner) <= 0:
            return 0.0
        area = (rows + self.half_rows) * (columns + self.half_columns) + self.half_area
        padded = area * (inner + self.half_inner)
        following = padded
        if self.tile:
            tiled = math.ceil(rows / self.tile) * math.ceil(columns / self.tile) * self.tile**2 * inner
            following = min(padded, tiled)
        blocked = 2.0 * (padded + (batch - 1) * following) / self.flops
        return min(blocked, 2.0 * batch * rows * columns * inner / self.thin) if self.thin else blocked


@dataclass(frozen=True)
class Level:
    """A topology level: units of `size` devices whose links have this latency and bandwidth, per device.

    `uplink` is the bandwidth that all devices of a unit share to leave it, in each direction, such as that of the only
    NIC of a node, or of the uplinks of a switch in a tapered fat tree. If it is 0, nothing is shared.

    Collectives on a stream overlap with computation unless `overlaps` is false, as where ranks that share memory reduce
    with the processors that compute.
    """

    name: str
    size: int
    latency: float
    bandwidth: float
    overlaps: bool = True
    uplink: float = 0.0


@dataclass(frozen=True)
class Line:
    """A measured collective over `ranks` devices: ``latency + bytes * seconds_per_byte``; it overrides the formulas.

    Between measured `points` (bytes, seconds) times are interpolated, and the line holds beyond them. A `recorded` line
    is that of programs that are recorded, in which Python calls no collective that has a native kernel. It is for
    groups within a unit of `level`, by name, and no smaller unit; of all if that is empty.
    """

    collective: str
    ranks: int
    latency: float
    seconds_per_byte: float
    points: tuple[tuple[float, float], ...] = ()
    recorded: bool = False
    level: str = ""

    def seconds(self, size: float) -> float:
        """Return the seconds for `size` bytes."""
        if not self.points or size > self.points[-1][0]:
            return self.latency + size * self.seconds_per_byte
        previous = self.points[0]
        for point in self.points:
            if size <= point[0]:
                share = (size - previous[0]) / (point[0] - previous[0]) if point[0] > previous[0] else 0.0
                return previous[1] + max(0.0, share) * (point[1] - previous[1])
            previous = point
        return previous[1]

    @property
    def min_seconds_per_byte(self) -> float:
        """Return the minimum of `seconds` per byte, over all sizes."""
        if not self.points:
            return self.seconds_per_byte if self.latency >= 0 else 0.0
        last = self.points[-1][0]
        ends = [seconds / size for size, seconds in self.points if size]
        return min(*ends, self.seconds_per_byte, self.latency / last + self.seconds_per_byte)


@dataclass(frozen=True)
class Profile:
    """A machine. `matrix` and `vector` (flop/s of all other ops) are by dtype; `overhead` is added to each op.

    `packed` is `matrix` for products with constant weights, which a backend packs once, if that differs. A program of
    one device has `bandwidth_alone`, if devices share their memory. A device whose weights fit in half of its `cache`
    reads them at `cache_bandwidth` (`roofline.uncached_share`), as it does the operands and results of an op if they
    fit. `ops` has, by dtype and name, the flop/s of ops that were measured individually, as their entries count
    operations. `starts` has the seconds that such an op takes besides. `products` has, by dtype and name, the speed of
    ops whose products have kernels of their own, such as attention.

    `dispatch` is the host's time to issue an op. A device computes asynchronously: it starts an op as soon as it has
    finished the one before, and its host has issued it; meanwhile the host goes on. If `dispatch` is 0, host and device
    take turns, as on a CPU. `view` is the host's time for each result of an op that only views a tensor, `shape_op`
    that for an op on shapes of the model's own program, which is folded at import: 0 if the runtime folds them too.
    `waits` are the ops in which a host waits until its device has finished: ``"shape_op"``, if shapes are tensors of
    the device, and names of collectives, if they block. `in_place` is whether elementwise results take the memory of
    an operand that is not needed any more, `caching_allocator` whether memory is as torch's allocator of CUDA devices
    reserves it.

    On a CPU, Python takes `calls` seconds, by dtype and name, to call an op, and `call` for others. In whole programs
    an op takes `python` more, and a communication `python_collective`, as its ranks arrive at different times. A
    program is recorded (`runtime.backends.recorded_calls`) if it is no training step, and its results take at most
    `recorded` bytes: ops with native kernels then take none of these, and views no time. `is_recorded` says so of the
    program that runs; it is no figure of the machine. The host takes `step` seconds around each call of a program: it
    takes inputs, and hands out results. Around a step of text generation it takes `request_step`, and `request` for
    each of its requests.

    `overlap` is how well an op overlaps memory access with compute: it takes ``(computing ** overlap + moving **
    overlap) ** (1 / overlap)``, the sum for 1, the roofline's maximum for infinity. `beside` is the fraction of the
    time of a communication on a stream in which its devices continue their own work: 1 for full overlap, 0 if they
    wait.

    `kind` is ``gpu``, or ``cpu`` if devices are cores of a host: they use torch's CPU kernels, and rank 0 assembles
    outputs in the same memory.

    Of a calibrated CPU, `processor` is the name and `instructions` the widest instruction sets, as `instruction_sets`
    returns them. Its devices share `cores` cores: more devices than cores compute in turns; 0 if each has its own.
    `uncertainty` are the errors of the fit.

    `levels` are ordered from the innermost to the outermost; devices are numbered so that neighbors share a unit.
    `groups` are devices that differ in speed or memory.
    """

    name: str
    devices: int
    memory: float
    bandwidth: float
    overhead: float
    matrix: Mapping[str, Matrix]
    vector: Mapping[str, float]
    levels: tuple[Level, ...]
    lines: tuple[Line, ...] = ()
    overlap: float = math.inf
    dispatch: float = 0.0
    view: float = 0.0
    shape_op: float = 0.0
    waits: frozenset[str] = frozenset()
    in_place: bool = True
    caching_allocator: bool = False
    call: float = 0.0
    python: float = 0.0
    python_collective: float = 0.0
    recorded: float = 0.0
    step: float = 0.0
    request_step: float = 0.0
    request: float = 0.0
    ops: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    starts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    calls: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    products: Mapping[str, Mapping[str, Matrix]] = field(default_factory=dict)
    packed: Mapping[str, Matrix] = field(default_factory=dict)
    bandwidth_alone: float = 0.0
    cache: float = 0.0
    cache_bandwidth: float = 0.0
    collective_overhead: float = 0.0
    beside: float = 1.0
    groups: tuple[Group, ...] = ()
    kind: str = "gpu"
    processor: str = ""
    instructions: str = ""
    cores: int = 0
    uncertainty: Uncertainty | None = None
    is_recorded: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def folds(self) -> bool:
        """Whether the runtime computes what depends on weights alone once, when it loads a program."""
        return not self.shape_op and SHAPE_OP not in self.waits

    @property
    def is_asynchronous(self) -> bool:
        """Whether devices compute while their hosts issue the next ops."""
        return self.dispatch > 0

    def speed_of(self, device: int) -> float:
        """Return the factor of the machine's rates for a device."""
        return self._device_spec(device)[0]

    def memory_of(self, device: int) -> float:
        """Return the bytes of a device."""
        return self._device_spec(device)[1]

    def device_specs(self, count: int) -> list[tuple[float, float]]:
        """Return speed and memory of each of the first `count` devices."""
        return [self._device_spec(device) for device in range(count)] if self.groups else [(1.0, self.memory)] * count

    def without(self, count: int) -> Profile:
        """Return the machine without its first `count` devices, the others renumbered."""
        groups = tuple(group for group_ in self.groups if (group := group_.without(count)) is not None)
        return replace(self, devices=self.devices - count, groups=groups)

    def reordered(self, devices: Sequence[int]) -> Profile:
        """Return the machine of some devices, numbered in this order; links are those between any others."""
        specs: dict[tuple[float, float], list[int]] = {}
        for number, device in enumerate(devices):
            specs.setdefault(self._device_spec(device), []).append(number)
        groups = [Group(tuple((n, n) for n in numbers), *spec) for spec, numbers in specs.items()]
        return replace(self, devices=len(devices), groups=tuple(groups))

    def _device_spec(self, device: int) -> tuple[float, float]:
        group = next((g for g in self.groups if any(a <= device <= b for a, b in g.ranges)), None)
        if group is None:
            return 1.0, self.memory
        return group.speed, self.memory if group.memory is None else group.memory

    def of_one_device(self) -> Profile:
        """Return the machine for a program of one device, which does not share its memory with others."""
        if not self.bandwidth_alone:
            return self
        ratio = self.bandwidth_alone / self.bandwidth

        def products(table: Mapping[str, Matrix]) -> dict[str, Matrix]:
            return {dtype: replace(m, bandwidth=m.bandwidth * ratio) for dtype, m in table.items()}

        return replace(
            self, bandwidth=self.bandwidth_alone, matrix=products(self.matrix), packed=products(self.packed),
            bandwidth_alone=0.0,
        )  # fmt: skip

    def with_nodes(self, nodes: int) -> Profile:
        """Return the machine with `nodes` units of its second outermost level: 32 devices for 4 of ``dgx-h100``."""
        inner = self.levels[-2].size if len(self.levels) > 1 else self.levels[-1].size
        return replace(self, devices=inner * nodes)

    def with_devices(self, devices: int) -> Profile:
        """Return the machine with at least `devices`, as if it had more units of its outermost level."""
        return self if self.devices >= devices else replace(self, devices=devices)

    def rate(self, table: Mapping[str, Any], dtype: str) -> Any:
        """Return the entry of a table for a dtype; the slowest one if the dtype has none."""
        if dtype in table:
            return table[dtype]
        return min(table.values(), key=lambda entry: entry.flops if isinstance(entry, Matrix) else entry)


def load_profile(name: str | Path) -> Profile:
    """Load a profile by name (``dgx2-v100``, ``dgx-h100:4`` for 4 nodes) or from a TOML file.

    Raises `ProfileError` if it does not exist, or a field is missing or invalid.
    """
    text, colon, nodes = str(name).partition(":") if not str(name).endswith(".toml") else (str(name), "", "")
    path = Path(text)
    if path.suffix == ".toml":
        source = read_text(path, ProfileError, MAX_BYTES)
    else:
        folder = resources.files("distir_relax.cost.profiles")
        file = folder / f"{text}.toml"
        if not file.is_file():
            names = ", ".join(
                sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))
            )
            raise ProfileError(f"there is no profile {text!r}", "", f"profiles are {names}, or give a .toml file")
        source = file.read_text()
    profile = read_profile(source, str(name))
    if colon:
        if not (nodes.isdecimal() and len(nodes) < 7 and int(nodes) > 0):
            raise ProfileError(f"expected a number of nodes after the colon, found {nodes!r}", str(name))
        profile = profile.with_nodes(int(nodes))
    return profile


def as_profile(profile: Profile | str | Path) -> Profile:
    """Return a profile from its name or itself. Raises `ProfileError` as `load_profile` does."""
    return profile if isinstance(profile, Profile) else load_profile(profile)


def read_profile(text: str, where: str = "") -> Profile:
    """Parse a TOML text. Raises `ProfileError` as `load_profile` does."""
    data = parse_toml(text, ProfileError, where)
    reader = _Reader(where)
    device = reader.device(data)
    matrix = reader.products(device, "matrix")
    packed = reader.products(device, "packed") if "packed" in device else {}
    vector = reader.table(device, "vector", "device.")
    runtime = reader.runtime(data)
    levels = tuple(
        Level(
            reader.text(row, "name", "link"),
            reader.whole(row, "size", "level"),
            reader.number(row, "latency", "level", least=0.0),
            reader.number(row, "bandwidth", "level"),
            reader.flag(row, "overlaps", True),
            reader.number(row, "uplink", "level") if "uplink" in row else 0.0,
        )
        for row in reader.rows(data, "level")
    )
    lines = tuple(
        Line(
            reader.text(row, "name", ""),
            reader.whole(row, "ranks", "collective"),
            reader.number(row, "latency", "collective", least=0.0),
            reader.number(row, "seconds_per_byte", "collective"),
            reader.points(row),
            reader.flag(row, "recorded", False),
            reader.text(row, "level", ""),
        )
        for row in reader.rows(data, "collective")
    )
    if not levels:
        raise ProfileError("a profile has at least one [[level]] of links", where)
    names = ["", *(level.name for level in levels)]
    if unknown := next((line.level for line in lines if line.level not in names), ""):
        raise ProfileError(f"expected the name of a [[level]], found {unknown!r}", f"{where}: [[collective]] level")
    check_uplinks(levels, where)
    cache = reader.number(device, "cache", "device", 0.0, least=0.0)
    times: dict[str, Any] = {key: reader.number(runtime, key, "runtime", 0.0, least=0.0) for key in RUNTIME}
    return Profile(
        name=reader.text(data, "name", where),
        devices=reader.whole(data, "devices", ""),
        memory=reader.number(device, "memory", "device"),
        bandwidth=reader.number(device, "bandwidth", "device"),
        overhead=reader.number(device, "overhead", "device", least=0.0),
        matrix=matrix,
        vector={dtype: reader.number(vector, dtype, "device.vector") for dtype in vector},
        levels=levels,
        lines=lines,
        overlap=reader.number(device, "overlap", "device", math.inf, least=1.0),
        **times,
        waits=reader.waits(runtime),
        in_place=reader.flag(runtime, "in_place", True),
        caching_allocator=reader.flag(runtime, "caching_allocator", False),
        ops=reader.by_op(device, "ops"),
        starts=reader.by_op(device, "starts", least=0.0),
        calls=reader.by_op(device, "calls", least=0.0),
        products=reader.products_by_op(device),
        packed=packed,
        cache=cache,
        bandwidth_alone=reader.number(device, "bandwidth_alone", "device", 0.0, least=0.0),
        cache_bandwidth=reader.number(device, "cache_bandwidth", "device") if cache else 0.0,
        collective_overhead=reader.number(data, "collective_overhead", "", 0.0, least=0.0),
        beside=reader.share(data, "beside", 1.0),
        groups=reader.groups(data),
        kind=reader.one_of(device, "kind", KINDS),
        processor=reader.text(device, "processor", ""),
        instructions=reader.text(device, "instructions", ""),
        cores=reader.whole(device, "cores", "device") if "cores" in device else 0,
        uncertainty=reader.uncertainty(data) if "uncertainty" in data else None,
    )


def check_uplinks(levels: Sequence[Level], where: str) -> None:
    """Raise `ProfileError` if the outermost level has an uplink: nothing is outside of it."""
    if levels[-1].uplink:
        raise ProfileError(
            f"expected no 'uplink' in the outermost level {levels[-1].name!r}", where,
            "an uplink leaves a unit: give it to the level inside, and order levels from the innermost",
        )  # fmt: skip


@dataclass(frozen=True)
class _Reader:
    where: str

    def table(self, data: Mapping[str, Any], key: str, above: str = "") -> Mapping[str, Any]:
        value = data.get(key)
        if not isinstance(value, dict) or not value:
            raise ProfileError(f"expected a table [{above}{key}]", self.where)
        return value

    def device(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        value = self.table(data, "device")
        figures = ("memory", "bandwidth", "bandwidth_alone", "cache", "cache_bandwidth", "overhead", "overlap")
        machine = ("kind", "processor", "instructions", "cores")
        tables = ("matrix", "packed", "products", "vector", "ops", "starts", "calls")
        return self._known(value, "device", (*machine, *figures, *tables))

    def runtime(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        value = self.table(data, "runtime") if "runtime" in data else {}
        keys = (*RUNTIME, "waits", "in_place", "caching_allocator")
        return self._known(value, "runtime", keys)

    def uncertainty(self, data: Mapping[str, Any]) -> Uncertainty:
        names = tuple(f.name for f in fields(Uncertainty))
        table = self._known(self.table(data, "uncertainty"), "uncertainty", names)
        return Uncertainty(**{name: self.share(table, name, 0.0, MAX_DEVIATION) for name in table})

    def waits(self, runtime: Mapping[str, Any]) -> frozenset[str]:
        value = runtime.get("waits", [])
        names = (SHAPE_OP, *Collective)
        if not isinstance(value, list) or not all(name in names for name in value):
            raise ProfileError(
                f"expected a list 'waits' in [runtime], found {shown(value)}", self.where, f"ops are {', '.join(names)}"
            )
        return frozenset(map(str, value))

    def products(self, device: Mapping[str, Any], kind: str) -> dict[str, Matrix]:
        tables = self.table(device, kind, "device.")
        return {dtype: self._matrix(tables, dtype, f"device.{kind}.") for dtype in tables}

    def products_by_op(self, device: Mapping[str, Any]) -> dict[str, dict[str, Matrix]]:
        """Return the speeds of products by dtype and name of an op."""
        tables = self.table(device, "products", "device.") if "products" in device else {}
        return {
            dtype: {name: self._matrix(row, name, f"device.products.{dtype}.") for name in row}
            for dtype in tables
            for row in (self.table(tables, dtype, "device.products."),)
        }

    def by_op(self, device: Mapping[str, Any], kind: str, least: float | None = None) -> dict[str, dict[str, float]]:
        """Return the numbers of a kind by dtype and name of an op."""
        tables = self.table(device, kind, "device.") if kind in device else {}
        return {
            dtype: {name: self.number(row, name, f"device.{kind}.{dtype}", least=least) for name in row}
            for dtype in tables
            for row in (self.table(tables, dtype, f"device.{kind}."),)
        }

    def rows(self, data: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
        value = data.get(key, [])
        if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
            raise ProfileError(f"expected tables [[{key}]]", self.where)
        return value

    def groups(self, data: Mapping[str, Any]) -> tuple[Group, ...]:
        value = tuple(map(self._group, self.rows(data, "group")))
        check_groups(value, self.whole(data, "devices", ""), self.where)
        return value

    def _group(self, row: Mapping[str, Any]) -> Group:
        self._known(row, "[group]", ("devices", "speed", "memory"))
        memory = self.number(row, "memory", "group") if "memory" in row else None
        return Group(read_ranges(row.get("devices"), self.where), self.number(row, "speed", "group", 1.0), memory)

    def _matrix(self, tables: Mapping[str, Any], dtype: str, above: str) -> Matrix:
        row, inside = self.table(tables, dtype, above), f"{above}{dtype}"
        others = ("half_rows", "half_columns", "half_inner", "thin", "bandwidth", "tile", "half_area", "call")
        self._known(row, inside, ("flops", *others))
        return Matrix(
            self.number(row, "flops", inside), *(self.number(row, key, inside, 0.0, least=0.0) for key in others)
        )

    def _known(self, table: Mapping[str, Any], inside: str, keys: Sequence[str]) -> Mapping[str, Any]:
        """Return a table that has only these keys."""
        if unknown := set(table) - set(keys):
            raise ProfileError(
                f"unknown key {min(unknown)!r} in [{inside}]", self.where, f"known are {', '.join(keys)}"
            )
        return table

    def points(self, row: Mapping[str, Any]) -> tuple[tuple[float, float], ...]:
        value = row.get("points", [])
        is_valid = isinstance(value, list) and all(
            isinstance(p, list) and len(p) == 2 and all(is_finite(n) and SMALLEST <= n <= LARGEST for n in p)
            for p in value
        )
        if not is_valid or sorted(p[0] for p in value) != [p[0] for p in value]:
            raise ProfileError(f"expected points [[bytes, seconds], …], in order, found {shown(value)}", self.where)
        return tuple((float(size), float(seconds)) for size, seconds in value)

    def flag(self, data: Mapping[str, Any], key: str, default: bool) -> bool:
        """Return a truth value."""
        value = data.get(key, default)
        if not isinstance(value, bool):
            raise ProfileError(f"expected true or false as {key!r}, found {shown(value)}", self.where)
        return value

    def text(self, data: Mapping[str, Any], key: str, default: str) -> str:
        value = data.get(key, default)
        if not isinstance(value, str):
            raise ProfileError(f"expected text {key!r}, found {shown(value)}", self.where)
        return value

    def one_of(self, data: Mapping[str, Any], key: str, choices: Sequence[str]) -> str:
        """Return one of some words, by default the first."""
        value = self.text(data, key, choices[0])
        if value not in choices:
            raise ProfileError(f"expected {key!r} to be {' or '.join(choices)}, found {value!r}", self.where)
        return value

    def whole(self, data: Mapping[str, Any], key: str, inside: str) -> int:
        value = self.number(data, key, inside)
        if not value.is_integer() or value > MAX_DEVICES:
            raise ProfileError(
                f"expected a whole number {key!r} in [{inside}] of at most {MAX_DEVICES:,}, found {value!r}", self.where
            )
        return int(value)

    def share(self, data: Mapping[str, Any], key: str, default: float, most: float = 1.0) -> float:
        """Return a number from 0 to `most`; `default` if missing."""
        value = data.get(key, default)
        if not is_finite(value) or not 0 <= value <= most:
            raise ProfileError(f"expected a number from 0 to {most:g} {key!r}, found {shown(value)}", self.where)
        return float(value)

    def number(
        self, data: Mapping[str, Any], key: str, inside: str, default: float | None = None, least: float | None = None
    ) -> float:
        """Return a finite number above 0, or of at least `least`; `default` if missing or equal to it."""
        value = data.get(key, default)
        is_valid = is_finite(value) and (not value or SMALLEST <= abs(value) <= LARGEST)
        is_valid = is_valid or (default is not None and value == default)
        if not is_valid or not (value > 0 if least is None else value >= least):
            expected = "a positive number" if least is None else f"a number of at least {least:g}"
            expected += f" (between {SMALLEST:g} and {LARGEST:g})" * (is_finite(value) and not is_valid)
            raise ProfileError(f"expected {expected} {key!r} in [{inside}], found {shown(value)}", self.where)
        return float(value)
