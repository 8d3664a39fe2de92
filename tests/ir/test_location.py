"""Places in the model: of a block, inside it, and put together again."""

from __future__ import annotations

import pytest

from distir_relax.ir import absolute_location, relative_location


@pytest.mark.parametrize(
    ("block", "place", "location", "told"),
    [
        ("layers.1", "layers.1", "layers.1.mlp.up, model.py:7", "mlp.up, model.py:7"),
        ("layers.1", "layers.1", "layers.1, model.py:7", "model.py:7"),
        ("layers.1", "layers.1", "layers.1.mlp", "mlp"),
        ("0", "0", "0, model.py:7", "model.py:7"),
        ("/layers.1", "net.onnx:/layers.1", "net.onnx:/layers.1/mlp/Mul", "mlp/Mul"),
    ],
)
def test_a_block_tells_places_without_its_own(block: str, place: str, location: str, told: str) -> None:
    assert relative_location(block, location) == told
    assert absolute_location(place, told) == location


@pytest.mark.parametrize("location", ["@main, lv7", "net.onnx:Mul_3", "model.py:7", ""])
def test_other_places_are_told_as_they_are(location: str) -> None:
    assert relative_location("layers.1", location) == location
    assert absolute_location("", location) == location


def test_an_op_without_a_place_is_where_its_block_is() -> None:
    assert absolute_location("layers.1", "") == "layers.1"
    assert absolute_location("model.py:4", "") == "model.py:4"
    assert relative_location("layers.1", "layers.10, model.py:7") == "layers.10, model.py:7"
