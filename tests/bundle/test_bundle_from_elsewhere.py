"""A bundle that somebody else made: nothing outside it is read, no special file is opened, no field is trusted."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import distir_relax as dr
from distir_relax.bundle import read_bundle
from distir_relax.errors import BundleError, DistIRError
from distir_relax.report import explain

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a small model on 3 ranks, which hold 3, 2 and 2 rows of the weight."""
    plan = dr.compile(torch.nn.Linear(5, 7), (torch.ones(2, 5),), mesh=3, shardings={"weight": "S[0]"})
    return plan.save(tmp_path_factory.mktemp("made") / "m.dist")


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "m.dist"))


def resign(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest as somebody does who knows how its checksum is made."""
    plain = json.loads((path / "manifest.json").read_text())
    change(plain)
    plain["checksums"].pop("manifest.json")
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    plain["checksums"]["manifest.json"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(plain))


def test_a_bundle_signed_anew_is_read(path: Path) -> None:
    resign(path, lambda plain: plain.update(name="other"))
    assert read_bundle(path).manifest.name == "other"


@pytest.mark.parametrize("name", ["../evil.py", "/tmp/evil.py", "programs/../../evil.py", "programs/\0evil.py"])
def test_a_program_outside_the_bundle_is_not_run(path: Path, name: str) -> None:
    ran = path.parent / "ran"
    (path.parent / "evil.py").write_text(f"open({str(ran)!r}, 'w')\n")

    def lead_out(plain: dict[str, Any]) -> None:
        plain["programs"][0]["torch"] = name
        plain["checksums"][name] = hashlib.sha256((path.parent / "evil.py").read_bytes()).hexdigest()

    resign(path, lead_out)
    with pytest.raises(BundleError, match=r"manifest\.json: expected the path of a file inside the folder, found"):
        dr.load(path)(torch.ones(2, 5))
    assert not ran.exists()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["manifest.json", "programs/main_0.py", "ranked.txt", "weights.safetensors"])
def test_special_files_and_links_that_lead_out_are_refused(path: Path, name: str) -> None:
    file = path / name
    shutil.copy(file, path.parent / "outside")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(BundleError, match=re.escape(f"{name}: expected a file, found a FIFO")):
        read_bundle(path)
    file.unlink()
    file.symlink_to("/dev/zero")
    with pytest.raises(BundleError, match=re.escape(f"{name}: expected a file, found a device")):
        read_bundle(path)
    file.unlink()
    file.symlink_to("../outside" if "/" not in name else "../../outside")
    with pytest.raises(BundleError, match=re.escape(f"{name}: a link leads out of the folder")):
        read_bundle(path)
    file.unlink()
    shutil.copy(path.parent / "outside", path / "renamed")
    file.symlink_to("renamed" if "/" not in name else "../renamed")
    assert read_bundle(path).manifest.mesh.size == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: (m["weights"][0].update(name="wait"), m.update(parameters={})), "lacks 'wait'"),
        (lambda m: m.update(parameters={"wait": "weight"}), "expected weights as parameters, found 'wait'"),
        (lambda m: m["weights"][0].update(name=[]), "(weights[0].name): expected text for 'name', found []"),
        (lambda m: m["mesh"].update(shape=[3.0]), "(mesh.shape[0]): expected a whole number"),
        (lambda m: m["mesh"].update(shape=[10**18]), "the mesh has 1000000000000000000 ranks"),
        (lambda m: m["inputs"][0].update(shape=[2**40, 2**40]), "(input): no machine holds a tensor of shape"),
        (lambda m: m["inputs"][0].update(shape=[10**400]), "(inputs[0].shape[0]): expected a size"),
        (lambda m: m["outputs"][0].update(ranks=[1, 0]), "expected ranks in ascending order, found [1, 0]"),
        (lambda m: m["weights"][0]["shards"][0]["intervals"][0].append([2, 4]), "that begin at 2 and end at 3 overlap"),
        (lambda m: m["weights"][0]["shards"][0]["intervals"].__setitem__(0, [[3, 0]]), "interval [3, 0) leaves dim 0"),
        (lambda m: m["weights"][0]["shards"][0]["intervals"].__setitem__(0, [[0, 1, 2]]), "a piece [start, stop]"),
        (lambda m: m["weights"][0]["shards"][0]["intervals"].__setitem__(0, {}), "a list of pieces [start, stop]"),
        (lambda m: m.update(updates={"weight": "z"}), "from a weight to an output, found 'weight' to 'z'"),
        (lambda m: m.update(ranks=[0, 0, -1]), "(ranks[2]): expected a whole number of at least 0"),
        (lambda m: m.update(format=True), "(format): expected a whole number"),
        (lambda m: m.update(format=10**30), "(format): expected a whole number"),
        (lambda m: m["inputs"][0].update(shape=[2, 6]), "does not fit the programs: rank 0 takes f32[2,5]"),
        (lambda m: m["inputs"][0].update(dtype="float64"), "does not fit the programs: rank 0 takes f32[2,5]"),
        (lambda m: m["outputs"][0].update(dtype="float16"), "does not fit the programs: rank 0 gives f32[2,"),
        (lambda m: m["outputs"][0].update(name="y"), "rank 0 gives output"),
        (lambda m: m["parameters"].pop(m["weights"].pop()["name"]), "rank 0 takes weight, bias"),
    ],
)
def test_a_manifest_that_does_not_fit_is_an_error_with_its_place(
    path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    resign(path, change)
    with pytest.raises(BundleError) as raised:
        dr.load(path)(torch.ones(2, 5))
    assert message in str(raised.value)
    assert str(path) in raised.value.where


@pytest.mark.parametrize("content", [b"[" * 200_000, b"\xff\xfe{}", b'{"format": NaN}', b'"\\ud800"', b"", b"\0" * 99])
def test_a_manifest_that_is_no_json(path: Path, content: bytes) -> None:
    (path / "manifest.json").write_bytes(content)
    with pytest.raises(BundleError, match=r"manifest\.json(:\d+)*: (damaged|expected)"):
        read_bundle(path)


def test_texts_are_utf_8(path: Path) -> None:
    (path / "sharded.txt").write_bytes(b"module \xff")
    checksum = hashlib.sha256(b"module \xff").hexdigest()
    resign(path, lambda plain: plain["checksums"].update({"sharded.txt": checksum}))
    with pytest.raises(BundleError, match=r"sharded\.txt: not UTF-8 text at byte 7"):
        read_bundle(path)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "{}", "[1]", '[{"record": "rumour"}]', '[{"record": "reason", "value": 1, "axis": 0}]',
     '[{"record": "gather", "value": "x"}]', '[{"record": "reason", "colour": "x"}]', '[{"record": []}]'],
)  # fmt: skip
def test_records_that_are_none(path: Path, text: str) -> None:
    (path / "records.json").write_text(text)
    resign(path, lambda m: m["checksums"].update({"records.json": hashlib.sha256(text.encode()).hexdigest()}))
    with pytest.raises(DistIRError, match=r"records\.json"):
        explain(read_bundle(path), "weight")


def test_a_python_file_that_somebody_else_wrote_is_not_executed(path: Path) -> None:
    ran = path.parent / "ran"
    x = torch.ones(2, 5)
    expected = dr.load(path)(x)
    for program in (path / "programs").iterdir():
        text = f"open({str(ran)!r}, 'w')\n" + program.read_text()
        program.write_text(text)
        name, checksum = f"programs/{program.name}", hashlib.sha256(text.encode()).hexdigest()
        resign(path, lambda plain, name=name, checksum=checksum: plain["checksums"].update({name: checksum}))
    assert torch.equal(dr.load(path)(x), expected)
    assert not ran.exists()
    assert torch.equal(dr.load(path, trust_code=True)(x), expected)
    assert ran.exists()


INJECTED = "raise SystemError('bundle content ran')"


def change_programs(path: Path, old: str, new: str) -> None:
    """Change the text of the programs as somebody does who corrects its checksum."""
    text = (path / "ranked.txt").read_bytes().decode()
    assert old in text
    content = text.replace(old, new).encode()
    (path / "ranked.txt").write_bytes(content)
    resign(path, lambda plain: plain["checksums"].update({"ranked.txt": hashlib.sha256(content).hexdigest()}))


@pytest.mark.parametrize("name", [f'x"""; {INJECTED}; """', 'x\\"""', '"', "x\\", "{0.__class__}", "%s"])
def test_the_name_of_a_bundle_is_no_code(path: Path, name: str) -> None:
    """The docstring of the generated module has it."""
    expected = dr.load(path)(torch.ones(2, 5))
    resign(path, lambda plain: plain.update(name=name))
    assert torch.equal(dr.load(path)(torch.ones(2, 5)), expected)


@pytest.mark.parametrize("end", ["\n", "\r", "\0", "\u2028", "\ud800"])
def test_the_name_of_a_bundle_is_printable(path: Path, end: str) -> None:
    resign(path, lambda plain: plain.update(name=f"x{end}{INJECTED}"))
    with pytest.raises(BundleError, match=r"expected (a name of printable characters|text)|damaged"):
        dr.load(path)


@pytest.mark.parametrize("step", [f"exec({INJECTED!r})", "x", "-1", ""])
def test_the_step_of_an_op_is_no_code(path: Path, step: str) -> None:
    """The table of steps in the generated module has it."""
    text = json.dumps(step) if step != "-1" else step
    change_programs(path, "linear_bias(%input, %weight, %bias)", f"linear_bias(%input, %weight, %bias) {{step={text}}}")
    with pytest.raises(BundleError, match="the step of an op is a number, found"):
        dr.load(path)(torch.ones(2, 5))


@pytest.mark.parametrize("end", ["\x0c", "\x0b", "\x1c", "\x85", "\u2028", "\0", "\\"])
def test_the_place_of_an_op_is_no_code(path: Path, end: str) -> None:
    """A comment of the generated module has it."""
    expected = dr.load(path)(torch.ones(2, 5))
    call = "linear_bias(%input, %weight, %bias)"
    change_programs(path, call, f"{call}  # model.py:1{end}    {INJECTED}")
    assert torch.equal(dr.load(path)(torch.ones(2, 5)), expected)


def test_a_comment_ends_where_python_ends_a_line(path: Path) -> None:
    call = "linear_bias(%input, %weight, %bias)"
    change_programs(path, call, f"{call}  # model.py:1\r    {INJECTED}")
    with pytest.raises(BundleError, match="not a program of the ranked stage"):
        dr.load(path)(torch.ones(2, 5))


@pytest.mark.parametrize("name", ["\uff54\uff4f\uff52\uff43\uff48", "\u017fum", "comm", "class", "__builtins__"])
def test_the_name_of_a_value_is_no_other_variable(path: Path, name: str) -> None:
    """Python reads \uff54\uff4f\uff52\uff43\uff48 as torch."""
    expected = dr.load(path)(torch.ones(2, 5))
    change_programs(path, "%linear_1", f"%{name}")
    assert torch.equal(dr.load(path)(torch.ones(2, 5)), expected)


def test_a_text_that_ends_within_a_type(path: Path) -> None:
    text = (path / "ranked.txt").read_text()
    change_programs(path, text[text.index("[2,5]") + 4 :], "")
    with pytest.raises(BundleError, match="found 'the end of the text'"):
        dr.load(path)(torch.ones(2, 5))


def test_documents_say_what_is_executed() -> None:
    for name in ("README.md", "docs/bundle.md"):
        text = " ".join((ROOT / name).read_text().split())
        bold = re.findall(r"\*\*(.+?)\*\*", text)
        assert any("bundle is data" in words and "nothing in it is executed" in words for words in bold), name
