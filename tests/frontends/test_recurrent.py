"""Recurrent layers on several ranks: torch's against eager, ONNX's with lengths against torch's packed sequences."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

import distir_relax as dr
from distir_relax.errors import ImportModelError, UnsupportedOpError

T, N, WIDTH, H = 5, 7, 3, 6
MESH = dr.DeviceMesh((3,), ("x",))

LAYERS = [
    (torch.nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    (torch.nn.LSTM, {"proj_size": 2, "bidirectional": True}),
    (torch.nn.GRU, {"bidirectional": True, "bias": False}),
    (torch.nn.RNN, {"nonlinearity": "relu", "num_layers": 2}),
]


class Layer(torch.nn.Module):
    def __init__(self, kind: Any, options: dict[str, Any]) -> None:
        super().__init__()
        self.layer = kind(WIDTH, H, **options)

    def forward(self, x: torch.Tensor, *states: torch.Tensor) -> Any:
        return self.layer(x, (states if len(states) > 1 else states[0]) if states else None)


@pytest.mark.drawn(6)
@pytest.mark.parametrize("layout", [{"x": "S[1]"}, {"*weight_ih_l0": "S[0]"}, {"*weight_ih*": "S[1]"}, {"x": "S[0]"}])
@pytest.mark.parametrize(("kind", "options"), LAYERS)
def test_layers_give_what_torch_gives(kind: Any, options: dict[str, Any], layout: dict[str, str]) -> None:
    torch.manual_seed(0)
    model, x = Layer(kind, options).eval(), torch.randn(T, N, WIDTH)
    plan = dr.compile(model, (x,), mesh=MESH, shardings=layout)
    for found, expected in zip(tree_leaves(plan(x)), tree_leaves(model(x)), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_batch_that_is_split_needs_no_communication() -> None:
    model = Layer(torch.nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}).eval()
    x, states = torch.randn(N, T, WIDTH), (torch.randn(4, N, H), torch.randn(4, N, H))
    plan = dr.compile(model, (x, *states), mesh=MESH, shardings={"x": "S[0]"}, tail="pad")
    for found, expected in zip(tree_leaves(plan(x, *states)), tree_leaves(model(x, *states)), strict=True):
        torch.testing.assert_close(found, expected)
    assert 'axis="x"' not in plan.text("distributed")
    layers = [line for line in plan.text("sharded").splitlines() if " nn.lstm(" in line]
    assert len(layers) == 4
    assert all('"S[1: 3|2|2]"' in line for line in layers)


GATES = {"LSTM": [0, 3, 1, 2], "GRU": [1, 0, 2], "RNN": [0]}
"""For each of ONNX's gates, which of torch's it is."""


def onnx_model(layer: Any, op: str, **attrs: Any) -> onnx.ModelProto:
    """`layer`, both ways, with lengths; ONNX has its gates in another order."""

    def ordered(names: list[str]) -> np.ndarray[Any, Any]:
        rows = [getattr(layer, name).detach().chunk(len(GATES[op])) for name in names]
        return torch.stack([torch.cat([parts[i] for i in GATES[op]]) for parts in rows]).numpy()

    both = [ordered([f"{part}_l0", f"{part}_l0_reverse"]) for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    data = {"W": both[0], "R": both[1], "B": np.concatenate(both[2:], 1)}
    states = ["Y_h", "Y_c"] if op == "LSTM" else ["Y_h"]
    node = helper.make_node(
        op, ["X", "W", "R", "B", "lengths"], ["Y", *states], direction="bidirectional", hidden_size=H, **attrs
    )
    graph = helper.make_graph(
        [node],
        "recurrent",
        [
            helper.make_tensor_value_info("X", TensorProto.FLOAT, (T, N, WIDTH)),
            helper.make_tensor_value_info("lengths", TensorProto.INT32, (N,)),
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("Y", *states)],
        [numpy_helper.from_array(array, name) for name, array in data.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)])


@pytest.mark.parametrize(
    ("kind", "op", "attrs"),
    [(torch.nn.LSTM, "LSTM", {}), (torch.nn.GRU, "GRU", {"linear_before_reset": 1}), (torch.nn.RNN, "RNN", {})],
)
def test_sequences_of_several_lengths(kind: Any, op: str, attrs: dict[str, Any]) -> None:
    torch.manual_seed(1)
    layer, x = kind(WIDTH, H, bidirectional=True), torch.randn(T, N, WIDTH)
    lengths = torch.tensor([5, 1, 3, 2, 5, 4, 1])
    plan = dr.compile(onnx_model(layer, op, **attrs), mesh=MESH, shardings={"X": "S[1]"})
    found = plan(X=x, lengths=lengths.int())
    packed, states = layer(pack_padded_sequence(x, lengths, enforce_sorted=False))
    outputs = pad_packed_sequence(packed)[0].reshape(T, N, 2, H).permute(0, 2, 1, 3)
    torch.testing.assert_close(found["Y"], outputs)
    for name, state in zip(("Y_h", "Y_c"), states if op == "LSTM" else [states], strict=False):
        torch.testing.assert_close(found[name], state)


@pytest.mark.parametrize(
    ("op", "attrs", "named"),
    [
        ("LSTM", {"input_forget": 1}, "input_forget"),
        ("RNN", {"activations": ["Affine", "Tanh"]}, "the activation Affine"),
        ("RNN", {"activations": ["HardSigmoid", "Tanh"], "activation_alpha": [0.25]}, "activation_alpha of 0.25"),
    ],
)
def test_what_cells_lack_is_refused_by_name(op: str, attrs: dict[str, Any], named: str) -> None:
    layer = getattr(torch.nn, op)(WIDTH, H, bidirectional=True)
    with pytest.raises(UnsupportedOpError, match=named) as caught:
        dr.compile(onnx_model(layer, op, **attrs), mesh=MESH, shardings={"X": "S[1]"})
    assert "\n" not in caught.value.message


def test_dropout_between_layers_is_refused() -> None:
    model = Layer(torch.nn.LSTM, {"num_layers": 2, "dropout": 0.5})
    with pytest.raises(ImportModelError, match="its dropout 'layer' drops 50% at random"):
        dr.compile(model, (torch.randn(T, N, WIDTH),), mesh=MESH, shardings={"x": "S[1]"})


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
def test_batches_first_is_the_same_layer(op: str) -> None:
    """With states to start from: all that has a batch has it first."""
    torch.manual_seed(3)
    layer, inputs = getattr(torch.nn, op)(WIDTH, H, bidirectional=True), {"X": torch.randn(T, N, WIDTH)}
    found = []
    for layout in (0, 1):
        model = onnx_model(layer, op, layout=layout)
        starts = ["initial_h", "initial_c"] if op == "LSTM" else ["initial_h"]
        model.graph.node[0].input.extend(starts)
        for name in starts:
            shape = (N, 2, H) if layout else (2, N, H)
            model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
            inputs.setdefault(name, torch.randn(2, N, H))
        if layout:
            model.graph.input[0].CopyFrom(helper.make_tensor_value_info("X", TensorProto.FLOAT, (N, T, WIDTH)))
        given = {name: x.transpose(0, 1) if layout else x for name, x in inputs.items()}
        lengths = torch.tensor([5, 1, 3, 2, 5, 4, 1], dtype=torch.int32)
        found.append(dr.compile(model, mesh=2, shardings={"initial_h": f"S[{1 - layout}]"})(**given, lengths=lengths))
    for name, orders in (("Y", (2, 0, 1, 3)), ("Y_h", (1, 0, 2)), ("Y_c", (1, 0, 2))):
        if name in found[0]:
            torch.testing.assert_close(found[1][name], found[0][name].permute(orders))


class Stack(torch.nn.Module):
    """Layers as exporters meet them: several, both ways, batches first, with a head on the last state."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layers = kind(WIDTH, H, num_layers=2, bidirectional=True, batch_first=True)
        self.head = torch.nn.Linear(2 * H, 4)

    def forward(self, x: torch.Tensor) -> Any:
        outputs, state = self.layers(x)
        last = state[0] if isinstance(state, tuple) else state
        return self.head(outputs), last


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_what_torch_exports_to_onnx(kind: Any, tmp_path: Path) -> None:
    torch.manual_seed(2)
    model, x, path = Stack(kind).eval(), torch.randn(N, T, WIDTH), str(tmp_path / "stack.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (x,), path, input_names=["x"], dynamic_axes={"x": {0: "n"}}, dynamo=False)
    assert kind.__name__ in {node.op_type for node in onnx.load(path).graph.node}
    for layout in ({"x": "S[0]"}, {"/head/MatMul.B": "S[1]"}):
        plan = dr.compile(path, input_shapes={"x": (N, T, WIDTH)}, mesh=3, shardings=layout)
        for found, expected in zip(plan(x=x).values(), model(x), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
