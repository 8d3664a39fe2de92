"""What a machine can do: its devices and the links between them, as a TOML file that a person can read and write.

The format is described in ``docs/simulator.md``. Bandwidths are bytes per second, times seconds, sizes bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from distir_relax.cost.heterogeneous import Group, check_groups, read_ranges
from distir_relax.errors import ProfileError
from distir_relax.support import is_finite, parse_toml, read_text, shown

KINDS = ("gpu", "cpu")
"""The kinds of devices."""
MOST_BYTES = 1 << 20
"""No profile is longer: a thousand measured points take a tenth of it."""
SMALLEST, LARGEST = 1e-30, 1e30
"""Between these lie all times, sizes and speeds: products of such numbers are numbers."""
MOST_DEVICES = 1 << 20
"""No machine has more devices than this."""


@dataclass(frozen=True)
class Matrix:
    """How fast matrix products are: flop/s of a large one, and the rows, columns and inner size of half that speed.

    A product of m x k with k x n takes ``2 (m + half_rows) (n + half_columns) (k + half_inner) / flops``. One of few
    rows takes ``2 m n k / thin`` where that is less: it is done row by row, with nothing laid out anew. What a product
    reads is in a cache, or else comes at `bandwidth`, which is less than the device's where it is read in bits and
    pieces. Either is 0 where it was not measured.

    What a product loses by being small is mostly that it does not fill the device. Many at once, as in attention, do:
    where a device works in tiles of `tile` rows and columns, the first of a batch takes as long as it does alone, and
    each other no longer than its whole tiles, ``2 m' n' k / flops``, with m' and n' rounded up to tiles. 0 where
    products of a batch run one after the other.
    """

    flops: float
    half_rows: float = 0.0
    half_columns: float = 0.0
    half_inner: float = 0.0
    thin: float = 0.0
    bandwidth: float = 0.0
    tile: float = 0.0

    def seconds(self, batch: int, rows: int, columns: int, inner: int) -> float:
        """The computing of so many products of ``rows x inner`` with ``inner x columns``."""
        if min(batch, rows, columns, inner) <= 0:
            return 0.0
        padded = (rows + self.half_rows) * (columns + self.half_columns) * (inner + self.half_inner)
        others = padded
        if self.tile:
            tiled = math.ceil(rows / self.tile) * math.ceil(columns / self.tile) * self.tile**2 * inner
            others = min(padded, tiled)
        blocked = 2.0 * (padded + (batch - 1) * others) / self.flops
        return min(blocked, 2.0 * batch * rows * columns * inner / self.thin) if self.thin else blocked


@dataclass(frozen=True)
class Level:
    """One level of a topology: units of `size` devices whose links have this latency and bandwidth, per device."""

    name: str
    size: int
    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Line:
    """A measured collective over `ranks` devices: ``latency + bytes * seconds_per_byte``, whatever the formulas say.

    Where `points` (bytes, seconds) were measured, times between them are interpolated and the line holds beyond them.
    """

    collective: str
    ranks: int
    latency: float
    seconds_per_byte: float
    points: tuple[tuple[float, float], ...] = ()

    def seconds(self, size: float) -> float:
        """The time for so many bytes."""
        if not self.points or size > self.points[-1][0]:
            return self.latency + size * self.seconds_per_byte
        before = self.points[0]
        for point in self.points:
            if size <= point[0]:
                share = (size - before[0]) / (point[0] - before[0]) if point[0] > before[0] else 0.0
                return before[1] + max(0.0, share) * (point[1] - before[1])
            before = point
        return before[1]

    @property
    def least_seconds_per_byte(self) -> float:
        """What `seconds` says of a number of bytes, by that number: the least for any."""
        if not self.points:
            return self.seconds_per_byte if self.latency >= 0 else 0.0
        last = self.points[-1][0]
        ends = [seconds / size for size, seconds in self.points if size]
        return min(*ends, self.seconds_per_byte, self.latency / last + self.seconds_per_byte)


@dataclass(frozen=True)
class Profile:
    """A machine. `matrix` and `vector` (flop/s of all other ops) are by dtype; `overhead` is added to each op.

    `packed` is `matrix` for products with weights that never change, which a backend lays out once, where that differs.
    A program of one device has `bandwidth_alone`, where devices share their memory. A device half of whose `cache`
    holds its weights reads them at `cache_bandwidth`, as it does what an op moves if it fits.
    `ops` has, by dtype and name, the flop/s of ops that were measured one by one, as their entries count operations.

    `dispatch` is the least time from one op to the next: a host that launches kernels on an accelerator gets no
    further, but long kernels hide it.

    `view` is the time of each result of an op that only views a tensor, where the host waits for ops.

    `overlap` tells how well an op hides reading and writing behind computing: it takes
    ``(computing ** overlap + moving ** overlap) ** (1 / overlap)``, the sum for 1, the roofline's maximum for infinity.
    `beside` is the share of the time of a communication on a stream in which its devices go on with their own work: 1
    where it costs them nothing, 0 where they wait for it.

    `kind` is ``gpu``, or ``cpu`` where devices are cores of a host: they compute by torch's CPU kernels, and rank 0
    assembles outputs in the same memory.

    `levels` go from the innermost to the outermost; devices are numbered so that neighbours share a unit. `groups` are
    devices that are unlike the others in speed or memory.
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
    ops: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    packed: Mapping[str, Matrix] = field(default_factory=dict)
    bandwidth_alone: float = 0.0
    cache: float = 0.0
    cache_bandwidth: float = 0.0
    collective_overhead: float = 0.0
    beside: float = 1.0
    groups: tuple[Group, ...] = ()
    kind: str = "gpu"

    def __str__(self) -> str:
        return self.name

    def speed_of(self, device: int) -> float:
        """By what the machine's rates are to be multiplied for a device."""
        return self._kind(device)[0]

    def memory_of(self, device: int) -> float:
        """The bytes that a device has."""
        return self._kind(device)[1]

    def kinds(self, count: int) -> list[tuple[float, float]]:
        """Speed and memory of each of the first `count` devices."""
        return [self._kind(device) for device in range(count)] if self.groups else [(1.0, self.memory)] * count

    def without(self, count: int) -> Profile:
        """The machine without its first `count` devices, the others numbered anew."""
        kept = tuple(group for each in self.groups if (group := each.without(count)) is not None)
        return replace(self, devices=self.devices - count, groups=kept)

    def _kind(self, device: int) -> tuple[float, float]:
        group = next((g for g in self.groups if any(a <= device <= b for a, b in g.ranges)), None)
        if group is None:
            return 1.0, self.memory
        return group.speed, self.memory if group.memory is None else group.memory

    def with_nodes(self, nodes: int) -> Profile:
        """The machine with so many of its outermost but one units: ``dgx-h100`` with 4 nodes has 32 devices."""
        inner = self.levels[-2].size if len(self.levels) > 1 else self.levels[-1].size
        return replace(self, devices=inner * nodes)

    def with_devices(self, devices: int) -> Profile:
        """The machine with at least so many devices, as if it had more units of its outermost level."""
        return self if self.devices >= devices else replace(self, devices=devices)

    def rate(self, table: Mapping[str, Any], dtype: str) -> Any:
        """The entry of a table for a dtype; the slowest one where the dtype has none."""
        if dtype in table:
            return table[dtype]
        return min(table.values(), key=lambda entry: entry.flops if isinstance(entry, Matrix) else entry)


def load_profile(name: str | Path) -> Profile:
    """A profile by its name (``dgx2-v100``, ``dgx-h100:4`` for 4 nodes) or from a TOML file.

    Raises `ProfileError` when there is none, or when something in it is missing or is not what it should be.
    """
    text, colon, nodes = str(name).partition(":") if not str(name).endswith(".toml") else (str(name), "", "")
    path = Path(text)
    if path.suffix == ".toml":
        source = read_text(path, ProfileError, MOST_BYTES)
    else:
        folder = resources.files("distir_relax.cost.profiles")
        file = folder / f"{text}.toml"
        if not file.is_file():
            known = ", ".join(
                sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))
            )
            raise ProfileError(f"there is no profile {text!r}", "", f"there are {known}, or give a .toml file")
        source = file.read_text()
    profile = read_profile(source, str(name))
    if colon:
        if not (nodes.isdecimal() and len(nodes) < 7 and int(nodes) > 0):
            raise ProfileError(f"expected a number of nodes after the colon, found {nodes!r}", str(name))
        profile = profile.with_nodes(int(nodes))
    return profile


def as_profile(profile: Profile | str | Path) -> Profile:
    """A profile as a user may give one. Raises `ProfileError` as `load_profile` does."""
    return profile if isinstance(profile, Profile) else load_profile(profile)


def read_profile(text: str, where: str = "") -> Profile:
    """The profile that a TOML text describes. Raises `ProfileError` as `load_profile` does."""
    data = parse_toml(text, ProfileError, where)
    reader = _Reader(where)
    device = reader.table(data, "device")
    matrix = reader.products(device, "matrix")
    packed = reader.products(device, "packed") if "packed" in device else {}
    vector = reader.table(device, "vector", "device.")
    levels = tuple(
        Level(
            reader.text(row, "name", "link"),
            reader.whole(row, "size", "level"),
            reader.number(row, "latency", "level", least=0.0),
            reader.number(row, "bandwidth", "level"),
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
        )
        for row in reader.rows(data, "collective")
    )
    measured = reader.table(device, "ops", "device.") if "ops" in device else {}
    ops = {
        dtype: {name: reader.number(row, name, f"device.ops.{dtype}") for name in row}
        for dtype in measured
        for row in (reader.table(measured, dtype, "device.ops."),)
    }
    if not levels:
        raise ProfileError("a profile has at least one [[level]] of links", where)
    cache = reader.number(device, "cache", "device", 0.0, least=0.0)
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
        dispatch=reader.number(device, "dispatch", "device", 0.0, least=0.0),
        view=reader.number(device, "view", "device", 0.0, least=0.0),
        ops=ops,
        packed=packed,
        cache=cache,
        bandwidth_alone=reader.number(device, "bandwidth_alone", "device", 0.0, least=0.0),
        cache_bandwidth=reader.number(device, "cache_bandwidth", "device") if cache else 0.0,
        collective_overhead=reader.number(data, "collective_overhead", "", 0.0, least=0.0),
        beside=reader.share(data, "beside", 1.0),
        groups=reader.groups(data),
        kind=reader.one_of(device, "kind", KINDS),
    )


@dataclass(frozen=True)
class _Reader:
    where: str

    def table(self, data: Mapping[str, Any], key: str, above: str = "") -> Mapping[str, Any]:
        found = data.get(key)
        if not isinstance(found, dict) or not found:
            raise ProfileError(f"expected a table [{above}{key}]", self.where)
        return found

    def products(self, device: Mapping[str, Any], kind: str) -> dict[str, Matrix]:
        tables = self.table(device, kind, "device.")
        return {dtype: self._matrix(tables, dtype, f"device.{kind}.") for dtype in tables}

    def rows(self, data: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
        found = data.get(key, [])
        if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
            raise ProfileError(f"expected tables [[{key}]]", self.where)
        return found

    def groups(self, data: Mapping[str, Any]) -> tuple[Group, ...]:
        found = tuple(map(self._group, self.rows(data, "group")))
        check_groups(found, self.whole(data, "devices", ""), self.where)
        return found

    def _group(self, row: Mapping[str, Any]) -> Group:
        known = ("devices", "speed", "memory")
        if unknown := set(row) - set(known):
            raise ProfileError(
                f"there is no {min(unknown)!r} in [[group]]", self.where, f"there are {', '.join(known)}"
            )
        memory = self.number(row, "memory", "group") if "memory" in row else None
        return Group(read_ranges(row.get("devices"), self.where), self.number(row, "speed", "group", 1.0), memory)

    def _matrix(self, tables: Mapping[str, Any], dtype: str, above: str) -> Matrix:
        row, inside = self.table(tables, dtype, above), f"{above}{dtype}"
        others = ("half_rows", "half_columns", "half_inner", "thin", "bandwidth", "tile")
        if unknown := set(row) - {"flops", *others}:
            raise ProfileError(
                f"there is no {min(unknown)!r} in [{inside}]", self.where, f"there are flops, {', '.join(others)}"
            )
        return Matrix(
            self.number(row, "flops", inside), *(self.number(row, key, inside, 0.0, least=0.0) for key in others)
        )

    def points(self, row: Mapping[str, Any]) -> tuple[tuple[float, float], ...]:
        found = row.get("points", [])
        numbers = isinstance(found, list) and all(
            isinstance(p, list) and len(p) == 2 and all(is_finite(n) and SMALLEST <= n <= LARGEST for n in p)
            for p in found
        )
        if not numbers or sorted(p[0] for p in found) != [p[0] for p in found]:
            raise ProfileError(f"expected points [[bytes, seconds], …], in order, found {shown(found)}", self.where)
        return tuple((float(size), float(seconds)) for size, seconds in found)

    def text(self, data: Mapping[str, Any], key: str, default: str) -> str:
        found = data.get(key, default)
        if not isinstance(found, str):
            raise ProfileError(f"expected text {key!r}, found {shown(found)}", self.where)
        return found

    def one_of(self, data: Mapping[str, Any], key: str, choices: Sequence[str]) -> str:
        """One of some words, by default the first."""
        found = self.text(data, key, choices[0])
        if found not in choices:
            raise ProfileError(f"expected {key!r} to be {' or '.join(choices)}, found {found!r}", self.where)
        return found

    def whole(self, data: Mapping[str, Any], key: str, inside: str) -> int:
        found = self.number(data, key, inside)
        if not found.is_integer() or found > MOST_DEVICES:
            raise ProfileError(
                f"expected a whole number {key!r} in [{inside}] of at most {MOST_DEVICES:,}, found {found!r}",
                self.where,
            )
        return int(found)

    def share(self, data: Mapping[str, Any], key: str, default: float) -> float:
        """A number from 0 to 1; `default` where there is none."""
        found = data.get(key, default)
        if not is_finite(found) or not 0 <= found <= 1:
            raise ProfileError(f"expected a number from 0 to 1 {key!r}, found {shown(found)}", self.where)
        return float(found)

    def number(
        self, data: Mapping[str, Any], key: str, inside: str, default: float | None = None, least: float | None = None
    ) -> float:
        """A finite number above 0, or one of at least `least`; `default` where there is none, or where it is named."""
        found = data.get(key, default)
        right = is_finite(found) and (not found or SMALLEST <= abs(found) <= LARGEST)
        right = right or (default is not None and found == default)
        if not right or not (found > 0 if least is None else found >= least):
            wanted = "a positive number" if least is None else f"a number of at least {least:g}"
            wanted += f" (between {SMALLEST:g} and {LARGEST:g})" * (is_finite(found) and not right)
            raise ProfileError(f"expected {wanted} {key!r} in [{inside}], found {shown(found)}", self.where)
        return float(found)
