"""Type and device propagation, mixed interpretation, polymorphic functions, ops of a user's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import distir_relax as dr
from distir_relax.errors import UnsupportedOpError, VerificationError
from distir_relax.interpret.distributed_executor import run_devices
from distir_relax.interpret.type_propagation import Number, infer_types, propagate_types
from distir_relax.ir import CALL, Module, Op, PlacedType, TensorType, Value, parse, print_module, verify
from distir_relax.ops import TABLE, Cost, Semantics, Split, check
from distir_relax.ops.table.dispatch import dispatch
from distir_relax.simulation.simulator import simulate_module
from tests.machines import machine

FIGURE_4 = """
module @distributed {
  mesh[0] = device_mesh((1,), ("device",))
  func @main(
    input %v211: f32[256,8,768] @ {0},
    input %v3114: i64[1] @ {0},
    parameter %w: f32[768,2304] @ {0},
  ) {
    %v218 = shape_of(%v211)
    %v219 @ {0} = constant() {value=2, dtype="int64"}
    %v220 = take(%v218, %v219) {axis=0}
    %v223 = reshape(%v220) {shape=(1,)}
    %v224 = concat(%v3114, %v223) {axis=0}
    %v225 = dynamic_reshape(%v211, %v224)  # gpt2.py:225
    %v226 = matmul(%v225, %w)
    return "y": %v226
  }
}
"""


def test_figure_4_of_the_paper() -> None:
    """A shape that the program computes itself is found where the number that it depends on is given."""
    module, known = propagate_types(parse(FIGURE_4), {"v3114": torch.tensor([-1])})
    assert known["v225"] == PlacedType((2048, 768), "float32", (0,))
    assert known["v226"] == PlacedType((2048, 2304), "float32", (0,))
    numbers = {name: found.value.tolist() for name, found in known.items() if isinstance(found, Number)}
    assert numbers == {
        "v3114": [-1], "v218": [256, 8, 768], "v219": 2, "v220": 768, "v223": [768], "v224": [-1, 768]
    }  # fmt: skip
    verify(module, check)
    events = simulate_module(module, machine(1, flops=1e12)).events()
    (product,) = (event.duration for event, _ in events if event.op.name == "matmul")
    assert product == 2 * 2048 * 768 * 2304 * 1000, "femtoseconds"


def test_figure_4_runs() -> None:
    module = infer_types_of_figure_4(torch.tensor([-1]))
    x, w = torch.randn(256, 8, 768), torch.randn(768, 2304)
    found = run_devices(module, {"v211": {0: x}, "v3114": {0: torch.tensor([-1])}, "w": {0: w}})
    torch.testing.assert_close(found["y"][0], x.reshape(-1, 768) @ w, rtol=1e-5, atol=1e-3)


def infer_types_of_figure_4(number: torch.Tensor) -> Module:
    return propagate_types(parse(FIGURE_4), {"v3114": number})[0]


def test_without_the_number_the_error_names_the_op() -> None:
    with pytest.raises(VerificationError, match=r"gpt2.py:225: dynamic_reshape.* the shape must be known numbers"):
        infer_types(parse(FIGURE_4))


def test_a_number_that_does_not_fit_is_named() -> None:
    with pytest.raises(
        VerificationError, match=r"gpt2.py:225: dynamic_reshape: f32\[256,8,768\] cannot take .*\(7, 768\)"
    ):
        infer_types_of_figure_4(torch.tensor([7]))
    with pytest.raises(VerificationError, match=r"cannot take the shape \(3, 768\)"):
        infer_types_of_figure_4(torch.tensor([3]))


UNEVEN = """
module @distributed {
  mesh[0] = device_mesh((2,), ("d",))
  func @main(input %x: f64[3|2,4] @ {0,1}) {
    %s = shape_of(%x)
    %y = OP
    return "y": %y
  }
}
"""


def test_what_differs_by_device_is_not_one_number() -> None:
    _, known = propagate_types(parse(UNEVEN.replace("OP", "add(%s, %s)")))
    assert known["s"] == PlacedType((2,), "int64", (0, 1))
    assert known["y"] == PlacedType((2,), "int64", (0, 1))
    with pytest.raises(VerificationError, match=r"dynamic_reshape.* known numbers"):
        infer_types(parse(UNEVEN.replace("OP", "dynamic_reshape(%x, %s)")))


def test_a_known_number_meets_a_tensor_that_differs_by_device() -> None:
    text = UNEVEN.replace("OP", "multiply(%x, %c)").replace(
        "%s = shape_of(%x)", '%c @ {0,1} = constant() {value=2.0, dtype="float64"}'
    )
    _, known = propagate_types(parse(text))
    assert str(known["y"]) == "f64[3|2,4] @ {0,1}"


TWO = """
module @distributed {
  mesh[0] = device_mesh((3,), ("d",))
  func @main(
    input %x: f64[4,6] @ {0},
    input %z: f64[4,6] @ {1},
    input %w: f64[6,5] @ {0},
  ) {
    %y = LINE
    return "y": %y
  }
  func @f(input %a, input %b) {
    %c = matmul(%a, %b)  # layers.py:7
    return "c": %c
  }
}
"""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("matmul(%w, %x)  # a.py:1", "a.py:1: matmul cannot take (f64[6,5], f64[4,6])"),
        (
            "add(%x, %z)  # a.py:2",
            "a.py:2: the operands of add are on different devices: {0}, {1}\n  hint: send them to one place",
        ),
        ("send(%x)  # a.py:3", "a.py:3: send must name its devices\n  hint: write them: %y @ {1} = send"),
        ("call @f(%x, %z) on {0}", "@f is called on {0} with an operand on {1}"),
        ("call @f(%z, %z) on {1}", "layers.py:7: matmul cannot take (f64[4,6], f64[4,6])"),
        ("call @g(%z, %z) on {1}", "a call names a function of its module, found @g"),
    ],
)
def test_type_errors_name_the_op_and_the_devices(line: str, message: str) -> None:
    with pytest.raises(VerificationError) as raised:
        infer_types(parse(TWO.replace("LINE", line)))
    assert message in str(raised.value)


def test_an_op_on_devices_that_its_operands_are_not_on() -> None:
    with pytest.raises(
        VerificationError, match=r"a.py:4: nn.relu on \{2\} takes %x, which is on \{0\}\n.*send it there"
    ):
        infer_types(parse(TWO.replace("%y = LINE", "%y @ {2} = nn.relu(%x)  # a.py:4")))


def test_a_written_type_that_is_not_what_follows() -> None:
    text = TWO.replace("%y = LINE", "%y: f64[4,6] @ {0} = matmul(%x, %w)  # a.py:5")
    with pytest.raises(
        VerificationError, match=r"a.py:5: %y is f64\[4,5\] @ \{0\}, the program declares f64\[4,6\] @ \{0\}"
    ):
        infer_types(parse(text))


def test_inputs_need_types_and_programs_the_distributed_stage() -> None:
    with pytest.raises(VerificationError, match=r"the input %x has no type\n.*write it: %x: f32\[4,8\] @ {0}"):
        infer_types(parse(TWO.replace("%x: f64[4,6] @ {0}", "%x").replace("LINE", "nn.relu(%z)")))
    with pytest.raises(VerificationError, match="in the distributed stage, found the global stage"):
        infer_types(parse('module @global {\n func @main(input %x: f32[2]) { %y = nn.relu(%x) return "y": %y }\n}'))
    complete = parse('module @global {\n func @main(input %x: f32[2]) { return "x": %x }\n}')
    assert infer_types(complete) is complete


@pytest.mark.parametrize("inner", ["call @f(%a, %b) on {0}", "call @g(%a, %b) on {0}"])
def test_a_function_that_calls_itself_is_an_error(inner: str) -> None:
    text = TWO.replace("LINE", "call @f(%x, %w) on {0}").replace("%c = matmul(%a, %b)  # layers.py:7", f"%c = {inner}")
    text = text.rstrip()[:-1] + '  func @g(input %a, input %b) {\n %c = call @f(%a, %b) on {0}\n return "c": %c }\n}\n'
    with pytest.raises(VerificationError, match="a function does not call itself, found main -> f -> "):
        infer_types(parse(text))


POLYMORPHIC = """
module @distributed {
  mesh[0] = device_mesh((5,), ("d",))
  func @main(
    input %x: f64[4,6] @ {0},
    input %z: f64[4,6] @ {1},
    input %n: f32[7,3] @ {1},
    input %u: f64[4|1,6] @ {2,4},
  ) {
    %a = call @f(%x) on {0}
    %b = call @f(%z) on {1}
    %c = call @f(%n) on {1}
    %d = call @f(%a) on {0}
    %e = call @f(%u) on {2,4}
    return "b": %b, "c": %c, "d": %d, "e": %e
  }
  func @f(input %x) {
    %y = call @g(%x) on DEVICES
    return "y": %y
  }
  func @g(input %x) {
    %y = nn.relu(%x)
    return "y": %y
  }
}
"""


def test_a_polymorphic_function_is_written_once_for_each_way_of_calling_it() -> None:
    text = POLYMORPHIC.replace("    %y = call @g(%x) on DEVICES\n", "    %y = nn.relu(%x)\n")
    module = infer_types(parse(text))
    verify(module, check)
    types = {f.name: str(f.inputs[0].value.type) for f in module.functions[1:]}
    assert sorted(types.values()) == ["f32[7,3] @ {0}", "f64[4,6] @ {0}", "f64[4|1,6] @ {0,1}"]
    called = [str(op.attrs["callee"]) for op in module.main.ops if op.name == CALL]
    assert [types[name] for name in called] == [
        "f64[4,6] @ {0}", "f64[4,6] @ {0}", "f32[7,3] @ {0}", "f64[4,6] @ {0}", "f64[4|1,6] @ {0,1}"
    ]  # fmt: skip
    assert parse(print_module(module)) == module


@pytest.fixture
def own_op() -> Iterator[None]:
    """An op that a user's module might register: a scaled sum of squares of each row, half a second long."""

    def infer(types: tuple[TensorType, ...], attrs: dict[str, object]) -> tuple[TensorType, ...]:
        if len(types[0].shape) != 2:
            raise ValueError("a matrix is needed")
        return (TensorType(types[0].shape[:1], types[0].dtype),)

    with TABLE.extended():
        dr.define_op(
            "lab.energy",
            Semantics(infer=infer, torch="{scale} * {0}.square().sum(1)"),
            Split("m [n] -> m"),
            cost=Cost(
                flops=lambda types, attrs, results: 2.0 * types[0].elements,
                seconds=lambda types, attrs, results: 0.125 * types[0].shape[0],
            ),
        )
        yield


OWN = """
module @distributed {
  mesh[0] = device_mesh((2,), ("d",))
  func @main(input %x: f64[3|2,7] @ {0,1}) {
    %e = lab.energy(%x) {scale=0.5}
    return "e": %e
  }
}
"""


@pytest.mark.usefixtures("own_op")
def test_a_users_own_op() -> None:
    module = infer_types(parse(OWN))
    assert str(module.main.ops[0].results[0].type) == "f64[3|2] @ {0,1}"
    verify(module, check)
    assert parse(print_module(module)) == module
    found = simulate_module(module, machine(2))
    assert [found.clocks[c] for c in found.class_of] == [375 * 10**12, 250 * 10**12]
    held = {0: torch.randn(3, 7, dtype=torch.float64), 1: torch.randn(2, 7, dtype=torch.float64)}
    energies = run_devices(module, {"x": held})["e"]
    for device, x in held.items():
        torch.testing.assert_close(energies[device], 0.5 * x.norm(dim=1) ** 2)
    with pytest.raises(VerificationError, match=r"lab.energy cannot take .* a matrix is needed"):
        infer_types(parse(OWN.replace("[3|2,7]", "[3|2,7,1]")))
    with pytest.raises(ValueError, match=r"op 'lab.energy' is defined twice"):
        dr.define_op("lab.energy", Semantics(infer=None, torch=""), Split(""))


def test_an_own_op_that_no_module_registered() -> None:
    with pytest.raises(UnsupportedOpError, match=r"there is no op 'lab.energy'"):
        infer_types(parse(OWN))


def test_dispatch_picks_the_most_precise_implementation() -> None:
    def op(name: str, count: int, **attrs: object) -> Op:
        kinds = [Value(f"x{i}", TensorType((2, 3), "int64")) for i in range(count)]
        return Op(name, tuple(kinds), (), attrs)

    kind, numbers = TensorType((2, 3), "int64"), torch.arange(6).reshape(2, 3)
    (known,) = dispatch(op("add", 2), (numbers, numbers))
    assert known.tolist() == (2 * numbers).tolist()
    assert dispatch(op("add", 2), (kind, numbers)) == (kind,)
    (shape,) = dispatch(op("shape_of", 1), (kind,))
    assert shape.tolist() == [2, 3]
    reshape = op("dynamic_reshape", 2)
    assert dispatch(reshape, (kind, torch.tensor([3, -1]))) == (TensorType((3, 2), "int64"),)
    (moved,) = dispatch(reshape, (numbers, torch.tensor([3, -1])))
    assert moved.tolist() == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(VerificationError, match="known numbers"):
        dispatch(reshape, (kind, TensorType((2,), "int64")))
