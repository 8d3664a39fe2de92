"""The features of which every pair is tried: how each changes a small language model and its distribution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import distir_relax as dr
from distir_relax.schedules.registry import schedule_named, schedule_names

TRAINING, GENERATION, SERVING = "training", "generation", "serving"
"""How a pair is run: three steps of training, or tokens of prompts, alone or from an engine."""


@dataclass(frozen=True)
class Feature:
    """A feature, by its name in the table: degrees and options of a strategy, arguments of the compilation, and others.

    `runs` are the ways in which it can be run, best first.
    """

    name: str
    degrees: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)
    runs: tuple[str, ...] = (TRAINING, GENERATION, SERVING)


class Overlap(Exception):
    """Two features set the same thing to different values."""


class Apart(Exception):
    """One feature is that of a training, the other of a plan that generates."""


@dataclass(frozen=True)
class Setup:
    """Two features together."""

    run: str
    strategy: str
    devices: int
    arguments: Mapping[str, Any]
    others: Mapping[str, Any]


def _pipeline(name: str) -> Feature:
    chunks = schedule_named(name).chunks or (2 if name == "interleaved" else 1)
    runs = (GENERATION, SERVING) if schedule_named(name).weights == "none" else (TRAINING, GENERATION, SERVING)
    return Feature(
        f"pipeline {name}", {"pipeline": 2, "microbatches": 1 if runs[0] == GENERATION else 2},
        {"schedule": name, "chunks": chunks}, runs=runs,
    )  # fmt: skip


FEATURES: tuple[Feature, ...] = (
    Feature("data", {"data": 2}),
    Feature("tensor", {"tensor": 3}),
    Feature("sequence", {"tensor": 3}, {"sequence_parallel": True}),
    Feature("context", options={"context": 2}),
    Feature("ring", options={"context": 2, "ring": "on"}),
    Feature("whole rows", options={"context": 2, "rows": "whole"}, runs=(SERVING, GENERATION)),
    Feature("experts by data", {"data": 2}, {"experts": "data"}, others={"model": "experts"}),
    Feature("experts by tensor", {"tensor": 3}, {"experts": "tensor"}, others={"model": "experts"}),
    *map(_pipeline, schedule_names()),
    *(Feature(f"ZeRO {stage}", {"data": 2}, {"zero": stage}, runs=(TRAINING,)) for stage in (1, 2, 3)),
    *(Feature(f"recompute {kind}", options={"checkpoint": kind}, runs=(TRAINING,)) for kind in ("block", "selective")),
    Feature("microbatches", {"microbatches": 2}, runs=(TRAINING,)),
    Feature("packing", others={"batch": "packed"}, runs=(TRAINING,)),
    Feature("bf16", arguments={"precision": "bf16"}),
    Feature("int8", arguments={"precision": "int8"}, runs=(GENERATION, SERVING)),
    Feature("generation", runs=(GENERATION,)),
    Feature("serving", runs=(SERVING,)),
    Feature("dynamic sizes", others={"lengths": (13, 8, 11)}),
    Feature("adapters", others={"adapters": 2}),
    Feature("EMA", arguments={"averaging": dr.optim.EMA(0.9)}, others={"of trainings": True}, runs=(TRAINING,)),
    Feature("elastic", others={"elastic": True}, runs=(TRAINING,)),
    Feature("overlap", arguments={"overlap": 64}, runs=(TRAINING,)),
)


def together(one: Feature, other: Feature) -> Setup:
    """Return two features together, run in the first way that both have, or that the one without training has.

    On two data-parallel devices, if neither is about devices.

    Raises Overlap if both set a degree, an option or an argument, to different values, and Apart if there is no way.
    """
    common = [run for run in one.runs if run in other.runs]
    if not common and any(feature.others for feature in (one, other) if feature.runs == (TRAINING,)):
        raise Apart
    run = common[0] if common else next(run for run in (*one.runs, *other.runs) if run != TRAINING)
    degrees = _merged(one.degrees, other.degrees)
    if run != TRAINING and "pipeline" in degrees and "microbatches" not in (one.name, other.name):
        degrees["microbatches"] = 1
    options = _merged(one.options, other.options)
    arguments, others = _merged(one.arguments, other.arguments), _merged(one.others, other.others)
    if not {"data", "tensor", "pipeline"} & degrees.keys() and "context" not in options:
        degrees["data"] = 2
    numbers = [degrees.get(name, 1) for name in ("data", "tensor", "pipeline", "microbatches")]
    text = "/".join(map(str, numbers)) + "".join(f",{name}={value}" for name, value in options.items())
    devices = numbers[0] * numbers[1] * numbers[2] * options.get("context", 1)
    return Setup(run, text.replace("=True", ""), devices, arguments, others)


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    for name in one.keys() & other.keys():
        if one[name] != other[name]:
            raise Overlap(name)
    return {**one, **other}
