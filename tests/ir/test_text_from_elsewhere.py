"""Program text that somebody made up: a parse error with its line, or a verification error with the op's place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from distir_relax.compiler.inputs import read_target
from distir_relax.compiler.simulate import simulate
from distir_relax.errors import DistIRError, ParseError, RunError, VerificationError
from distir_relax.ir import Op, TensorType, Value, parse, verify
from distir_relax.ops import check, evaluate

HEAD = 'module @distributed {\n  mesh[0] = device_mesh((3,), ("tp",))\n'
BODY = '  func @main(input %x: f32[4,7] @ {0,1,2}) {\nLINE\n    return "y": %y\n  }\n}\n'


def program(line: str) -> str:
    """A program of the distributed stage with this op, on line 4."""
    return HEAD + BODY.replace("LINE", "    " + line)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("f32[4,7]", "f32[1.5]", "t:3: expected a whole number of at least 0, found '1.5'"),
        ("f32[4,7]", "f32[inf]", "t:3: expected a whole number of at least 0, found 'inf'"),
        ("f32[4,7]", "f32[-3]", "t:3: expected a whole number of at least 0, found '-3'"),
        ("f32[4,7]", "f32[9223372036854775808]", "t:3: expected a whole number of at least 0"),
        ("f32[4,7]", f"f32[{'9' * 5000}]", "t:3: expected a whole number of at least 0, found '9999"),
        ("f32[4,7]", "f32[4*10000000000]", "t:3: expected at most 1,048,576 sizes by device"),
        ("f32[4,7] @ {0,1,2}", "f32[4|3]", "t:3: expected devices, such as @ {0,1}, after sizes by device"),
        ("{0,1,2}", "{0..10000000000}", "t:3: expected devices below 1,048,576"),
        ("{0,1,2}", "{0..1e10}", "t:3: expected a whole number of at least 0, found '1e10'"),
        ("{0,1,2}", "{-1}", "t:3: expected a whole number of at least 0"),
        ('((3,), ("tp",))', "(2,3)", "t:2: expected the shape of a mesh such as (2, 3), found '2'"),
        ("((3,)", "((2.5,)", "t:2: expected the shape of a mesh such as (2, 3), found '(2.5,)'"),
        ("((3,)", "((True,)", "t:2: expected the shape of a mesh"),
        ("((3,)", "((0,)", "t:2: a device mesh needs at least one device along each axis"),
        ("((3,)", "((1000000000000,)", "t:2: expected a mesh of at most 1,048,576 devices"),
        ('("tp",)', "(3,)", "t:2: expected the names of a mesh's axes"),
        ('("tp",)', '"tp"', "t:2: expected the names of a mesh's axes"),
        ("mesh[0]", "mesh[x]", "t:2: expected a whole number, found 'x'"),
        ('"y"', '"\\x"', "t:5: not a JSON string: Invalid \\escape"),
        ('"y"', '"\\ud800"', "t:5: expected text, found half of a character"),
        ('"y"', '"y', "t:5: cannot read"),
        ("{0,1,2}) {", '{0,1,2} as R.DTensor((4, 7), "float32", "mesh[0]", "S[0: 99999999999*(1|1|1)]")) {',
         "t:3: 'S[0: 99999999999*(1|1|1)]': expected at most 1,048,576 intervals"),
        ("{0,1,2}) {", f'{{0,1,2}} as R.DTensor((4, 7), "float32", "mesh[0]", "S[{"9" * 5000}]")) {{',
         "t:3: 'S[99999"),
        ("{0,1,2}) {", '{0,1,2} as R.DTensor((4, -7), "float32", "mesh[0]", "R")) {', "t:3: expected a shape such as"),
        ("{0,1,2}) {", '{0,1,2} as R.DTensor(4, "float32", "mesh[0]", "R")) {', "t:3: expected a shape such as"),
    ],
)  # fmt: skip
def test_text_that_is_none_says_the_line(old: str, new: str, message: str) -> None:
    text = program("%y: f32[4,7] @ {0,1,2} = nn.relu(%x)")
    verify(parse(text, "t"), check)
    assert text.count(old) >= 1
    with pytest.raises(DistIRError) as raised:
        parse(text.replace(old, new, 1), "t")
    assert str(raised.value).startswith(message)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("line", ["%y = f(%x) {a=" + "(" * 50_000, "%y = f(%x) {a=" + "(" * 100 + ")" * 100 + "}"])
def test_tuples_are_nested_so_deep_at_most(line: str) -> None:
    with pytest.raises(ParseError, match="t:4: expected tuples nested at most 64 deep"):
        parse(program(line), "t")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%y: f32[4,7] @ {0,1,3} = nn.relu(%x)", "%y is on devices {0,1,3}, the mesh has 3"),
        ("%y: f32[4,7] @ {1,0} = nn.relu(%x)", "%y is on a set of devices in ascending order, found {1,0}"),
        ("%y: f32[4,7] @ {} = nn.relu(%x)", "%y is on a set of devices in ascending order, found {}"),
        ("%y: f32[9223372036854775807,7] @ {0,1,2} = nn.relu(%x)", "%y is too large for any machine"),
        ("%y: f32[4,7] @ {0,1,2} = nn.relu()", "nn.relu takes 1 operand, found 0"),
        ("%y: f32[4,7] @ {0,1,2} = nn.relu(%x, %x)", "nn.relu takes 1 operand, found 2"),
        ("%y: f32[4,7] @ {0,1,2} = add(%x)", "add takes 2 operands, found 1"),
        ("%y: f32[4,7] @ {0,1,2}, %z: f32[4,7] @ {0,1,2} = nn.relu(%x)", "nn.relu gives (f32[4,7])"),
        (" = nn.relu(%x)", "nn.relu gives nothing"),
        ("%y: f32[4,7] @ {0,1,2} = all_reduce(%x) {op=\"sum\"}", "all_reduce needs the attribute axis"),
        ("%y: f32[4,7] @ {0,1,2} = all_reduce(%x) {axis=\"dp\", op=\"sum\"}", "no mesh of the program has an axis"),
        ("%y: f32[4,7] @ {0,1,2} = strided_slice(%x) {axes=(0,), begin=(0,), end=(4,), strides=(0,)}", "stride"),
        ("%y: f32[4,7] @ {0,1,2} = permute_dims(%x) {axes=3}", "permute_dims cannot take"),
        ("%y: f32[4,7] @ {0,1,2} = permute_dims(%x)", "permute_dims cannot take"),
        ("%y: f32[4,7] @ {0,1,2} = permute_dims(%x) {axes=(0, 0)}", "permute_dims"),
        ("%y: f32[4,7] @ {0,1,2} = reshape(%x) {shape=(-4, -7)}", "reshape cannot take"),
        ("%y: f32[4,7] @ {0,1,2} = reshape(%x) {shape=\"all\"}", "reshape cannot take"),
        ("%y: f32[4,7] @ {0,1,2} = astype(%x) {dtype=\"float31\"}", "astype cannot take"),
        ("%y: f32[4,7] @ {0,1,2} = astype(%x) {dtype=(1, 2)}", "astype cannot take"),
        ("%y: f32[4,7] @ {0,1} = call @main(%x) on {0,1}", "a function does not call itself"),
        ("%y: f32[4,7] @ {0,1} = call @other(%x) on {0,1}", "a call names a function of its module"),
    ],
)  # fmt: skip
def test_ops_that_are_none_are_told_by_verification(line: str, message: str, tmp_path: Path) -> None:
    text = program(line)
    if not line.startswith("%y"):
        text = text.replace('"y": %y', '"y": %x')
    with pytest.raises(VerificationError) as raised:
        verify(parse(text, "t", places=True), check)
    assert message in str(raised.value)
    (tmp_path / "t.distir").write_text(text)
    with pytest.raises(VerificationError):
        simulate(str(tmp_path / "t.distir"), profile="dgx-h100")


def calls(count: int, twice: bool = False) -> str:
    """Functions each of which calls the next, once or twice."""
    functions = []
    for i in range(count):
        inner = f"    %a: f32[4] = call @f{i + 1}(%x)\n    %y: f32[4] = call @f{i + 1}({'%a' if twice else '%x'})"
        inner = inner if twice else f"    %y: f32[4] = call @f{i + 1}(%x)"
        inner = "    %y: f32[4] = nn.relu(%x)" if i == count - 1 else inner
        functions.append(f'  func @f{i}(input %x: f32[4]) {{\n{inner}\n    return "y": %y\n  }}\n')
    return "module @global {\n" + "".join(functions) + "}\n"


@pytest.mark.timeout(20)
def test_calls_are_nested_so_deep_at_most() -> None:
    verify(parse(calls(20, twice=True)), check)
    verify(parse(calls(60)), check)
    for text in (calls(3_000), "\n".join(["module @global {", *_reversed(calls(3_000)), "}"])):
        with pytest.raises(VerificationError, match="calls are nested at most 64 deep"):
            verify(parse(text), check)
    with pytest.raises(VerificationError, match="at most 10,000,000 ops after inlining"):
        verify(parse(calls(60, twice=True)), check)


def _reversed(text: str) -> list[str]:
    """The functions of a text, the last one first."""
    parts = text.removesuffix("}\n").split("  func ")[:0:-1]
    return ["  func " + part for part in parts]


def test_text_cannot_bring_in_code(tmp_path: Path) -> None:
    """Constants are computed when types are found: their attributes are no Python."""
    ran = tmp_path / "ran"
    evil = f"float32) + __import__('pathlib').Path('{ran}').write_text('') + (0"
    line = f'%c @ {{0,1,2}} = constant() {{value=1.0, dtype="{evil}"}}\n    %y = multiply(%x, %c)'
    (tmp_path / "t.distir").write_text(program(line))
    with pytest.raises(DistIRError):
        read_target(tmp_path / "t.distir")
    evil = f"0) + __import__('pathlib').Path('{ran}').write_text('') + (0"
    x = Value("x", TensorType((4, 7), "float32"))
    op = Op("pad_tail", (x,), (), {"dim": 1, "blocks": 1, "size": 7, "padded": 9, "rank": 2, "value": 0.0, "x": evil})
    with pytest.raises(RunError, match=r"pad_tail cannot run on .*: the attribute x may not be"):
        evaluate(op, [torch.zeros(4, 7)])
    assert not ran.exists()


def test_what_torch_refuses_is_told_with_the_place() -> None:
    x = Value("x", TensorType((4, 7), "float32"))
    with pytest.raises(RunError, match=re.escape("a.py:7: nn.softmax cannot run on (float32 (4, 7)): Dimension out")):
        evaluate(Op("nn.softmax", (x,), (), {"axis": 5}, "a.py:7"), [torch.zeros(4, 7)])
