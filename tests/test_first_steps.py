"""What a user meets in the first hour: names, repr, meshes, numpy, loading, and what mistakes say."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import distir_relax as dr
from distir_relax.cli import app
from distir_relax.cli.progress import Progress
from distir_relax.compiler.inputs import read_target
from distir_relax.errors import BundleError, ImportModelError, ParseError, PlacementError, RunError, VerificationError
from distir_relax.interpret.distributed_executor import execute_program
from distir_relax.ir import parse, print_module
from distir_relax.lowering import FuseLocal

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
FILE = """
import torch

import distir_relax as dr
from distir_relax.ir import parse

PROGRAM = open("program.distir").read()


def parts():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 10), torch.nn.ReLU(), torch.nn.Linear(10, 8)).eval()
    return model, (torch.ones(4, 8),)


def plan():
    return dr.compile(*parts(), shardings={"0.*": "S[0]"}, mesh=3)


def split_by_hand():
    return parse(PROGRAM), {"w": torch.arange(24.0).reshape(8, 3)}


def not_split():
    made = plan()
    return made.modules["global"], made.imported.tensors
"""
PROGRAM = """module @distributed {
  mesh[0] = device_mesh((2,), ("tp",))
  func @main(
    input %x: f32[5,4] @ {0,1} as R.DTensor((5, 8), "float32", "mesh[0]", "S[1]"),
    parameter %w: f32[4,3] @ {0,1} as R.DTensor((8, 3), "float32", "mesh[0]", "S[0]"),
  ) {
    %p = matmul(%x, %w)
    %y = all_reduce(%p) {axis="tp", op="sum"}
    return "y": %y as R.DTensor((5, 3), "float32", "mesh[0]", "R")
  }
}
"""


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 10), torch.nn.ReLU(), torch.nn.Linear(10, 8)).eval()


def plan(**options: object) -> dr.Plan:
    return dr.compile(model(), (X,), **{"shardings": {"0.*": "S[0]"}, "mesh": 3, **options})  # type: ignore[arg-type]


@dataclass
class Done:
    code: int
    out: str


@pytest.fixture
def distir(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The command line, in this process: what it says, or the error that it would print."""
    monkeypatch.chdir(folder)

    def run(*arguments: str) -> Done:
        capsys.readouterr()
        try:
            app(list(arguments), standalone_mode=False)
        except dr.DistIRError as error:
            return Done(2, str(error))
        return Done(0, capsys.readouterr().out)

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("first")
    (found / "model.py").write_text(FILE, encoding="utf-8")
    (found / "program.distir").write_text(PROGRAM, encoding="utf-8")
    return found


def test_names_are_listed() -> None:
    assert set(dr.__all__) <= set(dir(dr))
    assert all(getattr(dr, name) is not None for name in dr.__all__)
    assert [name for name in dir(dr) if not name.startswith("_")] == sorted(dr.__all__)


def test_a_plan_and_a_simulation_are_five_lines() -> None:
    made = plan()
    shown = repr(made).splitlines()
    assert len(shown) == 5
    assert shown[0].startswith("sequential: 3 ranks, 2 distinct programs; a rank holds 236 B to 304 B of weights and")
    # 4 x 8 floats in a ring of three: two thirds of 128 bytes, twice.
    assert shown[0].endswith("sends 171 B in a run")
    assert len(repr(dr.simulate(made, profile="dgx-a100")).splitlines()) <= 5


def test_the_footprint_is_what_ranks_hold_and_send() -> None:
    from distir_relax.runtime.session import Session

    made = plan(shardings={"0.*": "S[0]", "input": "S[1]"})
    bundle = made.bundle(("torch",))
    session = Session(bundle)
    session({"input": X})
    sent = tuple(sum(comm.traffic.bytes.values()) for comm in session.communicators)
    assert made.footprint.sent == pytest.approx(sent, abs=1)
    ranks = made.modules["ranked"]
    held = [sum(i.value.tensor.bytes for i in ranks.function(f).inputs if i.role != "input") for f in ranks.ranks]
    assert list(made.footprint.weights) == held


@pytest.mark.parametrize("mesh", [3, (3,), [3], dr.DeviceMesh((3,), ("axis0",))])
def test_a_mesh_may_be_a_number_or_a_shape(mesh: object) -> None:
    assert plan(mesh=mesh).mesh == dr.DeviceMesh((3,))


@pytest.mark.parametrize("mesh", ["3", 2.5, True, (2, "x"), ()])
def test_what_is_no_mesh(mesh: object) -> None:
    with pytest.raises(PlacementError):
        plan(mesh=mesh)


def test_a_mark_takes_such_meshes_too() -> None:
    class Marked(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return dr.annotate_sharding(x, 3, "S[0]") * 2

    assert dr.compile(Marked(), (X,)).mesh == dr.DeviceMesh((3,))
    with pytest.raises(PlacementError, match="expected a DeviceMesh, a shape"):
        dr.annotate_sharding(X, "3", "S[0]")  # type: ignore[arg-type]


def test_a_mesh_over_which_nothing_is_split_warns() -> None:
    with pytest.warns(dr.NothingSplit, match="every rank will compute everything"):
        plan(shardings=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan()
        plan(shardings=None, mesh=1)


def test_arrays_of_numpy_are_taken() -> None:
    made, expected = plan(), model()(X)
    torch.testing.assert_close(made(X.numpy()), expected)
    torch.testing.assert_close(made(input=X.numpy()), expected)
    with pytest.raises(RunError, match="expected a tensor of torch or numpy for the input 'input', found 3"):
        made(3)


def test_a_saved_bundle_is_loaded_and_called(tmp_path: Path) -> None:
    plan().save(tmp_path / "m.dist", backends=("torch",))
    loaded, expected = dr.load(tmp_path / "m.dist"), model()(X)
    assert len(repr(loaded).splitlines()) == 5
    for found in (loaded(X), loaded(X.numpy()), loaded(input=X)):
        torch.testing.assert_close(found, expected)
    for arguments, message in [((X, X), "each of the inputs"), ((), "is missing"), ((3,), "expected an array")]:
        with pytest.raises(RunError, match=message):
            loaded(*arguments)
    with pytest.raises(RunError, match="found 1 by position and input by name"):
        loaded(X, input=X)
    with pytest.raises(BundleError):
        dr.load(tmp_path / "none.dist")


def test_a_wrong_shape_says_what_to_do() -> None:
    with pytest.raises(RunError, match=r"expected float32 \(4, 8\), found float32 \(7, 8\)") as caught:
        plan()(torch.randn(7, 8))
    assert "compile the model again with an example of (7, 8)" in caught.value.hint
    with pytest.raises(RunError) as caught:
        plan()(np.zeros((4, 8)))
    assert "input.astype('float32') of numpy, input.to(torch.float32) of torch" in caught.value.hint


def test_a_stage_of_a_pipeline_is_no_mark() -> None:
    message = r"At\[1\] keeps a tensor on one pipeline stage"
    with pytest.raises(PlacementError, match=message):
        plan(shardings={"0.weight": "At[1]"})
    with pytest.raises(PlacementError, match=message) as caught:
        dr.annotate_sharding(X, dr.DeviceMesh((3,)), "At[1]")
    assert caught.value.where.startswith("test_first_steps.py:")


def test_programs_from_functions_compile(folder: Path, distir: Callable[..., Done]) -> None:
    """By hand, with sizes left out; and of the global stage, annotated."""
    done = distir("compile", "model.py:split_by_hand", "-o", "hand.dist", "--backend", "torch")
    assert done.code == 0, done.out
    x, w = torch.randn(5, 8), torch.arange(24.0).reshape(8, 3)
    torch.testing.assert_close(dr.load(folder / "hand.dist")(x), x @ w)
    done = distir("compile", "model.py:not_split", "-o", "whole.dist", "--backend", "torch")
    assert done.code == 0, done.out
    torch.testing.assert_close(dr.load(folder / "whole.dist")(X), model()(X))


def test_a_global_program_and_its_tensors_compile() -> None:
    made = plan()
    again = dr.compile((made.modules["global"], made.imported.tensors), verify=True)
    assert again.modules["sharded"] == made.modules["sharded"]
    torch.testing.assert_close(again(X), model()(X))
    with pytest.raises(ImportModelError, match=r"a tensor for the parameter '0\.weight'"):
        dr.compile((made.modules["global"], {}))
    with pytest.raises(ImportModelError, match="found the ranked stage"):
        dr.compile((made.modules["ranked"], {}))


def test_pieces_unlike_the_layout_are_refused() -> None:
    from distir_relax.compiler.compile import program_bundle
    from distir_relax.interpret.type_propagation import infer_types

    wrong = infer_types(parse(PROGRAM.replace("(5, 8)", "(5, 9)")))
    with pytest.raises(VerificationError, match=r"is f32\[5,5\|4\].*the program declares f32\[5,4\]"):
        program_bundle("wrong", wrong, {"w": torch.zeros(8, 3)})


def test_compile_says_what_it_made(distir: Callable[..., Done]) -> None:
    done = distir("compile", "model.py:plan", "-o", "m.dist", "--backend", "torch")
    first, second = done.out.splitlines()
    assert first == "3 ranks, 2 distinct programs; a rank holds 236 B to 304 B of weights and sends 171 B in a run"
    assert re.fullmatch(r"wrote m\.dist in \d+\.\d\d s", second)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_when_it_takes_long(terminal: bool) -> None:
    written = StringIO()
    console = Console(file=written, force_terminal=terminal, width=80)
    with Progress(console, "compiling it", patience=0.05) as progress:
        assert written.getvalue() == ""
        progress.begin(1, FuseLocal())
        time.sleep(0.4)
    assert "fuse" in written.getvalue().lower()
    assert "compiling it" not in written.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_of_weights_says_how_much_is_left(terminal: bool) -> None:
    written = StringIO()
    console = Console(file=written, force_terminal=terminal, width=80)
    with Progress(console, "compiling it", patience=0.0, line_seconds=0.0) as progress:
        time.sleep(0.3)  # the first line comes after the first weight, which took as long as the others will
        progress.written(1_000_000, 4_000_000)
    expected = r"1\.0/4\.0 MB" if terminal else r"wrote 1 MB of 4 MB of weights, [1-9]\d* s left"
    assert re.search(expected, written.getvalue())


def test_a_quick_compilation_shows_nothing() -> None:
    written = StringIO()
    with Progress(Console(file=written), "compiling it") as progress:
        plan(observers=[progress])
    assert written.getvalue() == ""


def test_simulate_lays_out_what_a_function_returns(distir: Callable[..., Done]) -> None:
    options = ("--profile", "dgx-a100", "--mesh", "3", "--shard", "0.*=S[0]")
    done = distir("simulate", "model.py:parts", *options)
    assert " on 3 devices" in done.out, done.out
    assert "communication 0.0%" not in done.out
    found = dr.simulate((model(), (X,)), profile="dgx-a100", mesh=3, shardings={"0.*": "S[0]"})
    assert repr(found).splitlines()[0] == done.out.splitlines()[0]
    done = distir("simulate", "model.py:plan", *options)
    assert done.code == 2
    assert "shardings and mesh cannot be applied to a plan" in done.out


def test_the_strategy_stands_in_all_forms() -> None:
    from distir_relax.report.page import page

    target = "benchmarks/paper/models.py:mlp_1b"
    found = dr.simulate(
        str(Path(__file__).parent.parent / target), profile="dgx2-v100", strategy="2/2/1/2", global_batch=64
    )
    assert found.as_json()["strategy"] == "2/2/1/2"
    assert "dgx2-v100, strategy 2/2/1/2: " in repr(found)
    assert re.search(r"<dt>strategy</dt><dd>2/2/1/2</dd>", page(found, "it"))


def test_nothing_is_minus_zero() -> None:
    """Two devices that never wait: the shares of three kinds of time, none a little below zero."""
    made = dr.simulate(plan(), profile="dgx-a100")
    assert (made.idle >= 0).all()
    assert "-0.0%" not in repr(made)
    assert made.computing + made.communication + made.bubble == pytest.approx(1, abs=1e-12)


WRONG = [
    ("matmul(", "matmull(", 7, "there is no op 'matmull'"),
    ("%x, %w)", "%w, %x)", 7, "matmul cannot take"),
    ("f32[5,4]", "q32[5,4]", 4, "expected a dtype"),
    ("f32[5,4]", "f32[5.5,4]", 4, "expected a whole number of at least 0, found"),
    ("f32[5,4]", "f32[5,4|4|4]", 4, "lists 3 sizes for 2 devices"),
    (": f32[5,4] @ {0,1}", "", 4, "has no type"),
    ('"S[1]"', '"Q[1]"', 4, "'Q[1]' is not a placement"),
    ('("tp",)', '("tp","dp")', 2, "needs 1 distinct axis names"),
    ('axis="tp"', 'axis="xx"', 8, "no mesh of the program has an axis 'xx', found tp"),
    ('axis="tp", ', "", 8, "all_reduce needs the attribute axis"),
    ('op="sum"', r'op="\s"', 8, "not a JSON string: Invalid"),
    ("%p = ", "%p: f32[5,4] @ {0,1} = ", 7, "the program declares f32[5,4]"),
    ("f32[4,3] @ {0,1}", "f32[4,3] @ {2,3}", 5, "%w is on devices {2,3}, the mesh has 2"),
    ('"y": %y', '"y": %z', 9, "expected a value defined above"),
]


@pytest.mark.parametrize(("old", "new", "line", "message"), WRONG)
def test_errors_in_a_programs_text_name_the_line(tmp_path: Path, old: str, new: str, line: int, message: str) -> None:
    file = tmp_path / "wrong.distir"
    assert old in PROGRAM
    file.write_text(PROGRAM.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(
        (ParseError, PlacementError, VerificationError, dr.DistIRError), match=re.escape(message)
    ) as caught:
        read_target(file)
    assert caught.value.where.split(" ")[0] == f"{file}:{line}"


def test_lines_are_places_where_there_are_no_others() -> None:
    text = PROGRAM.replace("%w)\n", "%w)  # mine.py:3\n")
    placed = parse(text, "p.distir", places=True)
    assert [op.location for op in placed.main.ops] == ["mine.py:3", "p.distir:8"]
    assert [item.location for item in placed.main.inputs] == ["p.distir:4", "p.distir:5"]
    assert parse(print_module(placed), places=True) == placed
    assert [op.location for op in parse(text).main.ops] == ["mine.py:3", ""]


def test_a_program_of_few_words_runs() -> None:
    """The text that the mistakes above are made in is right itself."""
    from distir_relax.interpret.type_propagation import infer_types

    x, w = torch.randn(5, 8), torch.randn(8, 3)
    settled = PROGRAM.replace('"S[1]"', '"S[1: 4|4]"').replace('"S[0]"', '"S[0: 4|4]"')
    found = execute_program(infer_types(parse(settled)), {"x": x, "w": w})
    torch.testing.assert_close(found["y"], x @ w)
