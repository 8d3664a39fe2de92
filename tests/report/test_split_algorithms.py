"""The algorithm of each split attention, with its communication, which is that of the distributed program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.cli import app
from distir_relax.report.overview import Overview, overview
from tests.strategies.test_context import Attention, long_training


class Heads(nn.Module):
    """Attention by heads, of queries, keys and values by rows; its results are placed by rows again, or left."""

    def __init__(self, returns: bool) -> None:
        super().__init__()
        self.returns = returns

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        by_heads = [dr.annotate_sharding(x, 3, "S[1]") for x in (q, k, v)]
        y = F.scaled_dot_product_attention(*by_heads).transpose(1, 2)
        return dr.annotate_sharding(y, 3, "S[1]") if self.returns else y


def found(plan: dr.Plan) -> Overview:
    return overview(plan.bundle(("torch",)))


def assert_all_bytes_are_named(report: Overview) -> None:
    """Those of a program that communicates for attention alone."""
    ranks = len(report.rank_bytes)
    for row in report.traffic:
        assert row.bytes is not None
        named = sum(r.collectives.get(row.name, 0.0) * len(r.places) for r in report.algorithms)
        assert named == pytest.approx(row.bytes / ranks, rel=0.02)


def test_gathered_keys_of_all_layers_are_one_row() -> None:
    report = found(long_training(5))
    forward, backward = report.algorithms
    assert (forward.op, forward.algorithm, forward.axis) == (
        "nn.scaled_dot_product_attention", "keys are gathered", "context",
    )  # fmt: skip
    assert forward.places == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    assert set(forward.collectives) == {"all_gather"}
    # Keys and values of 3 heads, float32, of which a device lacks four fifths.
    assert forward.bytes == pytest.approx(2 * 1009 * 3 * 4 * 4 * 4 / 5, rel=0.002)
    assert backward.collectives == {"all_gather": forward.bytes, "reduce_scatter": forward.bytes}
    assert "model.layers.*.self_attn" in str(report)


def test_split_keys_exchange_normalizers_and_results() -> None:
    x, memory = (torch.randn(2, n, 12, dtype=torch.float64) for n in (5, 6))
    report = found(dr.compile(Attention(False).double().eval(), (x, memory), mesh=3, shardings={"memory": "S[1]"}))
    (row,) = report.algorithms
    assert row.algorithm == "keys stay split, parts joined by log-sum-exp"
    assert_all_bytes_are_named(report)


def test_heads_are_exchanged_there_and_back(tmp_path: Path) -> None:
    operands = tuple(torch.randn(2, 3, 6, 4) for _ in range(3))
    plan = dr.compile(Heads(True), operands, mesh=3, shardings=dict.fromkeys("qkv", "S[2]"))
    report = found(plan)
    (row,) = report.algorithms
    assert row.algorithm == "all-to-all to heads"
    assert set(row.collectives) == {"all_to_all"}
    # Queries, keys, values and results: a device has a third, of which it sends two thirds.
    assert row.bytes == pytest.approx(4 * (2 * 3 * 6 * 4 * 4) / 3 * 2 / 3)
    assert_all_bytes_are_named(report)
    plan.save(tmp_path / "heads.dist")
    (plain,) = json.loads(CliRunner().invoke(app, ["explain", str(tmp_path / "heads.dist"), "--json"]).output)[
        "algorithms"
    ]
    assert (plain["algorithm"], plain["axis"], plain["collectives"]) == (row.algorithm, row.axis, row.collectives)


def test_heads_that_are_split_already_send_nothing() -> None:
    operands = tuple(torch.randn(2, 3, 6, 4) for _ in range(3))
    report = found(dr.compile(Heads(False), operands, mesh=3, shardings=dict.fromkeys("qkv", "S[1]")))
    assert report.algorithms == report.traffic == ()
