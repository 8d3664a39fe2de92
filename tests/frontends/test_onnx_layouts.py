"""Convolutions with channels last, and dims that ONNX models leave open."""

from __future__ import annotations

import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper

import distir_relax as dr
from distir_relax.errors import ImportModelError
from distir_relax.frontends.onnx.importer import import_onnx


def channels_last(dims: int, spelled: str) -> tuple[onnx.ModelProto, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A convolution of data (n, d..., c), by Conv between two transposes or by NhwcConv; its data, weight and bias."""
    generator = torch.Generator().manual_seed(0)
    spatial, kernel = (7, 6, 5)[:dims], (3, 2, 1)[:dims]
    x = torch.randn(2, *spatial, 4, generator=generator)
    weight, bias = torch.randn(6, 4, *kernel, generator=generator), torch.randn(6, generator=generator)
    inner, last = [0, dims + 1, *range(1, dims + 1)], [0, *range(2, dims + 2), 1]
    attrs = {"pads": [1] * 2 * dims, "strides": [2] + [1] * (dims - 1)}
    if spelled == "Conv":
        stored = weight
        nodes = [
            helper.make_node("Transpose", ["x"], ["inner"], perm=inner),
            helper.make_node("Conv", ["inner", "w", "b"], ["found"], **attrs),
            helper.make_node("Transpose", ["found"], ["y"], perm=last),
        ]
    else:
        stored = weight.permute(last)
        nodes = [helper.make_node("NhwcConv", ["x", "w", "b"], ["y"], domain="com.microsoft", **attrs)]
    data = {"w": stored.contiguous().numpy(), "b": bias.numpy()}
    graph = helper.make_graph(
        nodes,
        "nhwc",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, tuple(x.shape))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in data.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets), x, weight, bias


@pytest.mark.parametrize("placement", ["S[1]", "S[0]", "S[1: 1|5|1]"])
@pytest.mark.parametrize("spelled", ["Conv", "NhwcConv"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_channels_last_split_in_space(dims: int, spelled: str, placement: str) -> None:
    model, x, weight, bias = channels_last(dims, spelled)
    plan = dr.compile(model, mesh=3, shardings={"x": placement})
    conv = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    expected = conv(x.movedim(-1, 1), weight, bias, stride=(2,) + (1,) * (dims - 1), padding=1).movedim(1, -1)
    torch.testing.assert_close(plan(x=x), expected, rtol=1e-5, atol=1e-5)
    # Halos are sent; the picture is not gathered for it.
    assert "all_gather" not in plan.text("distributed").split("nn.conv")[0]


def pair(a: list[int | str | None], b: list[int | str | None]) -> onnx.ModelProto:
    """Two inputs, each of which is made positive."""
    graph = helper.make_graph(
        [helper.make_node("Abs", [name], [f"{name}.abs"]) for name in ("a", "b")],
        "pair",
        [
            helper.make_tensor_value_info("a", TensorProto.FLOAT, a),
            helper.make_tensor_value_info("b", TensorProto.FLOAT, b),
        ],
        [helper.make_tensor_value_info(f"{name}.abs", TensorProto.FLOAT, None) for name in ("a", "b")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


@pytest.mark.parametrize("name", ["?", "unk", "", None, "Unknown"])
def test_a_dim_without_a_name_is_its_own(name: str | None) -> None:
    model = pair([name, name, 3], [name, 5])
    imported = import_onnx(model, {"a": (2, 7, 3), "b": (4, 5)})
    assert [item.value.tensor.shape for item in imported.module.main.inputs] == [(2, 7, 3), (4, 5)]
    sizes = [item.value.tensor.shape for item in import_onnx(model, {"a": (2, 7, 3)}).module.main.inputs]
    assert str(sizes) == "[(2, 7, 3), (b_dim0, 5)]"


def test_a_name_given_twice_in_a_shape_is_its_own() -> None:
    imported = import_onnx(pair(["n", "n"], ["n", 5]), {"a": (2, 7), "b": (4, 5)})
    assert [item.value.tensor.shape for item in imported.module.main.inputs] == [(2, 7), (4, 5)]


def test_a_name_that_inputs_share_is_one_size() -> None:
    imported = import_onnx(pair(["batch", 3], ["batch", 5]), {"a": (2, 3)})
    assert imported.module.main.inputs[1].value.tensor.shape == (2, 5)
    with pytest.raises(ImportModelError, match="'batch' of input 'b' is 4, and 2 elsewhere"):
        import_onnx(pair(["batch", 3], ["batch", 5]), {"a": (2, 3), "b": (4, 5)})
