"""The torch frontend on small models: names, structure, constants, in-place ops, errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from distir_relax.errors import AnnotationError, ImportModelError, RunError, UnsupportedOpError
from distir_relax.frontends.imported_model import Imported
from distir_relax.frontends.torch.importer import import_torch
from distir_relax.interpret.global_executor import interpret
from distir_relax.ir import TensorType, verify
from distir_relax.layout import DeviceMesh, print_placements
from distir_relax.ops import check
from distir_relax.sharding.annotate import annotate_sharding

MESH = DeviceMesh((2,), ("tp",))
HERE = Path(__file__).name


class Call(nn.Module):
    """A model whose forward is a plain function."""

    def __init__(self, function: Any, **buffers: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)
        for name, data in buffers.items():
            self.register_buffer(name, data)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def run(imported: Imported, *args: Any, **kwargs: Any) -> Any:
    verify(imported.module, check)
    inputs = {**imported.tensors, **imported.flatten(args, kwargs)}
    with torch.no_grad():
        return imported.rebuild(interpret(imported.module.main, inputs))


def agrees(function: Any, **buffers: torch.Tensor) -> Imported:
    """The model read in, after checking on fresh data that its program computes the same."""
    model = Call(function, **buffers).eval()
    imported = import_torch(model, (torch.randn(3, 4),))
    x = torch.randn(3, 4)
    with torch.no_grad():
        expected = model(x.clone())
    found = run(imported, x)
    for a, b in zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, b)
    return imported


def line_of(text: str) -> str:
    """The place in this file of the one line that ends in a comment with `text`."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [i + 1 for i, line in enumerate(lines) if line.endswith(f"# {text}")]
    return f"{HERE}:{number}"


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, input: torch.Tensor, pair: Any, *, scale: Any = None, flag: bool = False) -> Any:
        y = self.linear(input) + pair[0]
        if scale is not None:
            y = y * scale["by"]
        return {"main": y, "rest": (y + 1, None, 3), "flag": flag}


def test_names_come_from_arguments_and_results() -> None:
    example = {"scale": {"by": torch.ones(4)}, "flag": True}
    imported = import_torch(Structured(), (torch.ones(2, 4), [torch.ones(4), None]), example)
    main = imported.module.main
    assert [(i.role, i.value.name) for i in main.inputs] == [
        ("input", "input"),
        ("input", "pair_0"),
        ("input", "scale.by"),
        ("parameter", "linear.weight"),
        ("parameter", "linear.bias"),
    ]
    assert [output.name for output in main.outputs] == ["main", "rest_0"]

    x = torch.randn(2, 4)
    found = run(imported, x, [torch.ones(4), None], scale={"by": torch.full((4,), 2.0)}, flag=True)
    assert found["flag"] is True
    assert found["rest"][1:] == (None, 3)
    torch.testing.assert_close(found["rest"][0], found["main"] + 1)


@pytest.mark.parametrize(
    ("result", "names"),
    [
        (lambda x: x + 1, ["output"]),
        (lambda x: (x + 1, [x, x * 2]), ["output_0", "output_1_0", "output_1_1"]),
        (lambda x: {"a": x, "b": {"c": x + 1}}, ["a", "b.c"]),
    ],
)
def test_output_names(result: Any, names: list[str]) -> None:
    imported = agrees(lambda m, x: result(x))
    assert [output.name for output in imported.module.main.outputs] == names


def test_a_call_unlike_the_example_is_refused() -> None:
    imported = import_torch(Structured(), (torch.ones(2, 4), [torch.ones(4), None]), {"flag": True})
    pair = [torch.ones(4), None]
    with pytest.raises(RunError, match="expected a tensor of torch or numpy for the input 'pair_0', found None"):
        imported.flatten((torch.ones(2, 4), [None, None]), {"flag": True})
    with pytest.raises(RunError, match="'flag' was True when the model was compiled, found False"):
        imported.flatten((torch.ones(2, 4), pair), {"flag": False})
    with pytest.raises(RunError, match=r"'scale.by' was not given"):
        imported.flatten((torch.ones(2, 4), pair), {"flag": True, "scale": {"by": torch.ones(4)}})
    with pytest.raises(RunError, match="do not match the model's forward: missing a required argument: 'pair'"):
        imported.flatten((torch.ones(2, 4),), {})
    by_name = imported.flatten((), {"pair": pair, "input": torch.ones(2, 4), "scale": None, "flag": True})
    assert list(by_name) == ["input", "pair_0"]


def test_constants_are_folded_and_lifted_once() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        mask = torch.ones(4, 4).tril().sum(0)
        again = torch.ones(4, 4).tril().sum(0)
        return x * mask + again + m.offset * torch.arange(4) + torch.tensor(3.0)

    main = agrees(forward, offset=torch.tensor([5.0])).module.main
    assert [item.role for item in main.inputs] == ["input", "constant", "constant"]
    assert [op.name for op in main.ops] == ["multiply", "add", "add", "constant", "add"]


def test_buffers_keep_their_names_and_unused_things_go() -> None:
    imported = agrees(lambda m, x: x + m.table, table=torch.randn(4), unused=torch.randn(4))
    assert [(i.role, i.value.name) for i in imported.module.main.inputs] == [("input", "x"), ("constant", "table")]
    assert set(imported.names) == {"x"}


def test_an_unused_input_stays() -> None:
    imported = agrees(lambda m, x: m.linear.weight * 2)
    assert [item.value.name for item in imported.module.main.inputs] == ["x", "linear.weight"]


def test_an_input_may_be_called_as_a_parameter() -> None:
    class Clash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.x

    imported = import_torch(Clash(), (torch.ones(4),))
    assert dict(imported.names) == {"x": "x", "x_1": "x_1"}
    torch.testing.assert_close(run(imported, torch.ones(4)), torch.full((4,), 2.0))


def in_place_add(m: Any, x: torch.Tensor) -> Any:
    y = m.linear(x)
    y += 1
    return F.relu(y, inplace=True) * 2


def fill_of_a_constant(m: Any, x: torch.Tensor) -> Any:
    c = torch.zeros(4)
    c[1] = 3
    return x + c


def no_grad_and_autocast_off(m: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        y = x * torch.tensor(2.0)
    with torch.autocast("cpu", enabled=False):
        return y + 1


def a_part_under_autocast(m: Any, x: torch.Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.T + 1
        with torch.autocast("cpu", enabled=False):
            z = x @ x.T
    return y, z, x @ x.T


@pytest.mark.parametrize("forward", [in_place_add, fill_of_a_constant, no_grad_and_autocast_off, a_part_under_autocast])
def test_forms_of_ordinary_code(forward: Any) -> None:
    agrees(forward)


def view_used_after_a_change(m: Any, x: torch.Tensor) -> Any:
    y = m.linear(x)
    z = y.view(12)
    y.add_(1)
    return z


def change_through_a_view(m: Any, x: torch.Tensor) -> Any:
    y = m.linear(x)
    y[:, 0].add_(1)
    return y


@pytest.mark.parametrize("forward", [view_used_after_a_change, change_through_a_view])
def test_a_change_is_seen_through_every_view(forward: Any) -> None:
    agrees(forward)


def test_an_op_without_an_entry_is_named_with_its_place() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        return torch.linalg.inv(x @ x.T)  # unknown

    with pytest.raises(UnsupportedOpError) as raised:
        import_torch(Call(forward), (torch.ones(3, 4),))
    assert "linalg_inv" in raised.value.message
    assert raised.value.where == line_of("unknown")
    assert "define_op" in raised.value.hint


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.rand(4),
        lambda x: F.dropout(torch.ones(4), 0.5, training=True),
        lambda x: F.dropout1d(torch.ones(3, 4), 0.5, training=True),
        lambda x: F.scaled_dot_product_attention(*[torch.ones(1, 3, 4)] * 3, dropout_p=0.5)[0],
        torch.rand_like,
        lambda x: F.gumbel_softmax(x),
        lambda x: F.rrelu(x, training=True),
    ],
)
def test_random_numbers_are_refused(draw: Any) -> None:
    with pytest.raises(UnsupportedOpError, match="draws random numbers") as raised:
        import_torch(Call(lambda m, x: x + draw(x)), (torch.ones(3, 4),))
    assert raised.value.where


@pytest.mark.parametrize(
    ("mask", "is_masked"),
    [
        (lambda x: torch.ones(3, 1, 5, 5, dtype=torch.bool), False),
        (lambda x: torch.ones(5, 5, dtype=torch.bool).tril(4), False),
        (lambda x: torch.ones(5, 5, dtype=torch.bool).tril(3), True),
        (lambda x: torch.zeros(5, 5), True),
        (lambda x: x[0, 0, :, :5] > -100, True),
    ],
    ids=["expanded", "all true", "one false", "added", "of the input"],
)
def test_constant_masks_that_allow_all_are_dropped(mask: Any, is_masked: bool) -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        return F.scaled_dot_product_attention(x, x.flip(2), x, mask(x))

    x = torch.randn(3, 2, 5, 7, generator=torch.Generator().manual_seed(0))
    imported = import_torch(Call(forward), (x,))
    (op,) = (op for op in imported.module.main.ops if op.name == "nn.scaled_dot_product_attention")
    assert op.attrs["masked"] == is_masked == (len(op.operands) == 4)
    assert {item.role for item in imported.module.main.inputs} <= {"input", "constant" if is_masked else "input"}
    torch.testing.assert_close(run(imported, x), forward(None, x))


def test_dropout_of_constants_in_eval_mode_is_none() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        kept = F.dropout(torch.ones(3, 4), 0.5, training=False)
        return x + kept + F.scaled_dot_product_attention(*[torch.ones(1, 3, 4)] * 3)[0]

    agrees(forward)


@pytest.mark.parametrize(
    ("op", "spelling"),
    [
        (lambda x: x.nonzero(), "nonzero.default"),
        (lambda x: x[x > 0], "index.Tensor"),
        (lambda x: x.unique(), "_unique2.default"),
        (lambda x: torch.bincount(x.flatten().long()), "bincount.default"),
    ],
)
def test_results_that_data_shape_are_refused(op: Any, spelling: str) -> None:
    with pytest.raises(UnsupportedOpError, match=f"aten.{spelling}: how many elements its result has") as raised:
        import_torch(Call(lambda m, x: op(x)), (torch.ones(3, 4),))  # data shape it
    assert raised.value.where
    assert "fixed number of elements" in raised.value.hint


def test_active_dropout_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    with pytest.raises(ImportModelError, match=r"training mode: its dropout '1' drops 10%") as raised:
        import_torch(model, (torch.ones(2, 4),))
    assert "model.eval()" in raised.value.hint
    assert [op.name for op in import_torch(model.eval(), (torch.ones(2, 4),)).module.main.ops] == ["linear", "add"]
    with pytest.raises(UnsupportedOpError, match="dropout is active"):
        import_torch(Call(lambda m, x: F.dropout(x, 0.5)).eval(), (torch.ones(2, 4),))


def test_a_model_that_cannot_be_captured() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        return x + 1 if x.sum() > 0 else x  # branch

    with pytest.raises(ImportModelError, match=r"torch\.export cannot capture Call") as raised:
        import_torch(Call(forward), (torch.ones(3, 4),))
    assert raised.value.where == line_of("branch")
    with pytest.raises(ImportModelError, match="the example does not fit"):
        import_torch(Call(forward), ())


def test_annotations_survive_with_their_place() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        w = annotate_sharding(m.linear.weight, MESH, "S[-2]")  # mark
        return annotate_sharding(F.linear(x, w), MESH, "R")

    imported = agrees(forward)
    assert imported.module.meshes == (MESH,)
    marks = [op for op in imported.module.main.ops if op.name == "annotate_sharding"]
    assert [print_placements(op.placements) for op in marks] == ["S[0]", "R"]
    assert marks[0].location == line_of("mark")
    assert marks[0].operands[0].name == "linear.weight"


def test_all_annotations_have_one_mesh() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        x = annotate_sharding(x, MESH, "R")  # first mesh
        return annotate_sharding(x, DeviceMesh((3,), ("tp",)), "R")  # second mesh

    with pytest.raises(AnnotationError) as raised:
        import_torch(Call(forward), (torch.ones(3, 4),))
    assert raised.value.where == line_of("second mesh")
    assert line_of("first mesh") in raised.value.message


def test_types_with_no_program_form() -> None:
    with pytest.raises(UnsupportedOpError, match=r"x has dtype torch\.complex64, expected one of float64"):
        import_torch(Call(lambda m, x: x.real), (torch.ones(3, 4, dtype=torch.complex64),))
    assert agrees(lambda m, x: x.double()).module.main.outputs[0].value.type == TensorType((3, 4), "float64")


def test_torch_logs_no_traceback_of_an_op(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, x)

    with pytest.raises(ImportModelError, match="a and b must have same reduction dim"):
        import_torch(Wrong(), (torch.zeros(2, 3),))
    assert "Traceback" not in capfd.readouterr().err + caplog.text


class Branches(nn.Module):
    """Takes a branch by a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("traced", file=sys.stderr)
        return x * 2 if x.sum() > 0 else x


def test_a_branch_by_a_value_is_an_error_without_the_traced_graph(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ImportModelError, match=r"test_torch\.py:\d+: torch.export cannot capture Branches: Guard"):
        import_torch(Branches(), (torch.ones(3, 5),))
    assert capsys.readouterr().err == "traced\n"
