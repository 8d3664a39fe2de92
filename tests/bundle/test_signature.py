"""Signatures of bundles: which changes they find, the files read before they are checked, keys, and the commands."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from safetensors.torch import save_file
from typer.testing import CliRunner

import distir_relax as dr
from distir_relax.bundle import (
    FileTensor,
    FileWeights,
    PrivateKey,
    TensorWeights,
    create_key,
    read_bundle,
    sign_bundle,
    verify_bundle,
    write_bundle,
)
from distir_relax.cli import app
from distir_relax.errors import BundleError, DistIRError, RunError, SignatureError
from distir_relax.runtime.process_session.process_requests import ProcessRequests
from distir_relax.runtime.process_session.rank_processes import RankProcesses, ServeOptions
from tests.bundle_kinds import files_of
from tests.bundle_mutations import ROOT, mutated_bundle, outside, write
from tests.runtime.handmade import mlp_bundle
from tests.runtime.processes import mpirun


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two pairs of keys, `key` and `other`."""
    folder = tmp_path_factory.mktemp("keys")
    create_key(folder / "key.pem")
    create_key(folder / "other.pem")
    return folder


@pytest.fixture
def signed(tmp_path: Path, keys: Path) -> Path:
    """A signed bundle on 2 ranks, whose weight `up` is in a file outside of it."""
    bundle = mlp_bundle([3, 2])
    whole = {t.name: bundle.weights.read(t.name, [[(0, n)] for n in t.shape]) for t in bundle.manifest.weights}
    save_file({"up": whole["up"]}, tmp_path / "up.safetensors")
    weights = {**whole, "up": FileTensor.deferred(FileWeights(tmp_path / "up.safetensors", ()), "up")}
    path = write_bundle(replace(bundle, weights=TensorWeights(weights)), tmp_path / "m.dist", refer=True)
    assert [file.path for file in read_bundle(path).manifest.weight_files] == ["../up.safetensors"]
    sign_bundle(path, PrivateKey.read(keys / "key.pem"))
    return path


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    np.savez(tmp_path / "x.npz", x=np.ones((4, 6), np.float32))
    return tmp_path / "x.npz"


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def refused(*arguments: object) -> DistIRError:
    """The user's error that a command ends with."""
    error = invoke(*arguments).exception
    assert isinstance(error, DistIRError), error
    return error


def change(file: Path) -> None:
    """Change a bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


# The curve of RFC 8032, section 5.1, in affine coordinates: slow, and independent of the library that signs.
P, L = 2**255 - 19, 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P


def add(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    (x, y), (u, v) = a, b
    t = D * x * u * y * v
    return (x * v + y * u) * pow(1 + t, -1, P) % P, (y * v + x * u) * pow(1 - t, -1, P) % P


def times(n: int, point: tuple[int, int]) -> tuple[int, int]:
    result = (0, 1)
    while n:
        result, point, n = (add(result, point) if n & 1 else result), add(point, point), n >> 1
    return result


def decoded(content: bytes) -> tuple[int, int]:
    number = int.from_bytes(content, "little")
    sign, y = number >> 255, number & (1 << 255) - 1
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    if x * x % P != square:
        x = x * pow(2, (P - 1) // 4, P) % P
    assert x * x % P == square
    return (P - x if x & 1 != sign else x), y


def is_signature(key: bytes, message: bytes, signature: bytes) -> bool:
    scalar = int.from_bytes(signature[32:], "little")
    challenge = int.from_bytes(hashlib.sha512(signature[:32] + key + message).digest(), "little") % L
    base = decoded((4 * pow(5, -1, P) % P).to_bytes(32, "little"))
    return times(scalar, base) == add(decoded(signature[:32]), times(challenge, decoded(key)))


def test_a_signature_is_one_of_ed25519(signed: Path, keys: Path) -> None:
    """As docs/bundle.md says, by arithmetic of its own."""
    public = load_pem_public_key((keys / "key.pub").read_bytes())
    plain = json.loads((signed / "signature.json").read_text())
    encoded = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert plain["algorithm"] == "Ed25519"
    assert plain["key"] == hashlib.sha256(encoded).hexdigest()
    digest = hashlib.sha256((signed / "manifest.json").read_bytes()).digest()
    raw, signature = encoded[-32:], bytes.fromhex(plain["signature"])
    assert is_signature(raw, b"distir-relax bundle signature, version 1\n" + digest, signature)
    assert not is_signature(raw, digest, signature)


def test_a_signed_bundle_runs(signed: Path, keys: Path, inputs: Path) -> None:
    x = torch.ones(4, 6)
    expected = dr.load(signed)(x)
    found = dr.load(signed, require_signature=keys / "key.pub")(x)
    trusted = dr.load(signed, trust_code=True, require_signature=str(keys / "key.pub"))(x)
    for name, value in expected.items():
        assert torch.equal(found[name], value)
        torch.testing.assert_close(trusted[name], value)
    out = inputs.parent / "y.npz"
    done = invoke("run", signed, "-i", inputs, "-o", out, "--require-signature", keys / "key.pub")
    assert done.exit_code == 0, done.exception
    np.testing.assert_allclose(np.load(out)["z"], expected["z"].numpy(), rtol=1e-6)


def test_every_file_is_covered(tmp_path: Path, keys: Path) -> None:
    """A bit in any file of a bundle, or of its evaluation: nothing of it is used."""
    key = keys / "key.pub"
    write({**files_of("training")}, tmp_path)
    path = tmp_path / ROOT
    sign_bundle(path, PrivateKey.read(keys / "key.pem"))
    read_bundle(path, require_signature=key)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    assert verify_bundle(path, key).files == len(files) - 1
    names = {str(file.relative_to(path)) for file in files}
    assert {"programs/main_0.py", "evaluation/programs/main_0.py", "evaluation/weights.safetensors"} <= names
    for file in files:
        content = file.read_bytes()
        change(file)
        for trusts in (False, True):
            with pytest.raises(BundleError):
                read_bundle(path, trust_code=trusts, require_signature=key)
        with pytest.raises(BundleError):
            verify_bundle(path, key)
        if file.name != "signature.json":
            with pytest.raises(BundleError):
                sign_bundle(path, PrivateKey.read(keys / "key.pem"))
        file.write_bytes(content)
    read_bundle(path, require_signature=key)


def test_mutated_bundles_are_refused(tmp_path: Path, keys: Path) -> None:
    """Although their checksums are right: those that are read have the files that were signed, and others."""
    valid = files_of("training")
    write({**valid}, tmp_path / "valid")
    sign_bundle(tmp_path / "valid" / ROOT, PrivateKey.read(keys / "key.pem"))
    signature = (tmp_path / "valid" / ROOT / "signature.json").read_bytes()
    count = 0
    for seed in range(150):
        folder = tmp_path / str(seed)
        write({**outside(), **mutated_bundle(valid, seed), f"{ROOT}/signature.json": signature}, folder)
        try:
            read_bundle(folder / ROOT, trust_code=True, require_signature=keys / "key.pub")
        except DistIRError:
            count += 1
        else:
            for name, content in valid.items():
                assert (folder / name).read_bytes() == content, f"{name} of seed {seed}"
    assert count > 100


def test_a_weight_file_outside_is_covered(signed: Path, keys: Path) -> None:
    change(signed.parent / "up.safetensors")
    with pytest.raises(BundleError, match=r"up\.safetensors: the weights are damaged"):
        dr.load(signed, require_signature=keys / "key.pub")
    with pytest.raises(BundleError, match=r"up\.safetensors: the weights are damaged"):
        verify_bundle(signed)


def test_a_program_that_was_edited_with_its_checksums(signed: Path, keys: Path) -> None:
    """Bundles that are accepted without a signature."""
    program = signed / "programs" / "main_0.py"
    program.write_text(program.read_text() + "\n# edited\n")
    plain = json.loads((signed / "manifest.json").read_text())
    del plain["checksums"]["manifest.json"]
    plain["checksums"]["programs/main_0.py"] = hashlib.sha256(program.read_bytes()).hexdigest()
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    plain["checksums"]["manifest.json"] = hashlib.sha256(text.encode()).hexdigest()
    (signed / "manifest.json").write_text(json.dumps(plain))
    read_bundle(signed)
    with pytest.raises(SignatureError, match=r"signature\.json: the signature is not one of manifest\.json"):
        read_bundle(signed, require_signature=keys / "key.pub")


def test_an_edited_program_is_refused_although_code_is_trusted(signed: Path, keys: Path) -> None:
    change(signed / "programs" / "main_0.py")
    read_bundle(signed, trust_code=True)
    with pytest.raises(BundleError, match=r"main_0\.py: damaged") as raised:
        dr.load(signed, trust_code=True, require_signature=keys / "key.pub")
    assert "--trust-code" not in raised.value.hint


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """The names of files that are opened."""
    names: list[str] = []
    is_on = [True]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if is_on and event == "open" and isinstance(arguments[0], (str, os.PathLike)):
            names.append(os.fspath(arguments[0]))

    sys.addaudithook(hook)
    yield names
    is_on.clear()


@pytest.mark.parametrize("manifest", [None, b"[" * 200, b"{}"])
def test_nothing_else_is_read_before_the_signature_is_checked(
    signed: Path, keys: Path, opened: list[str], manifest: bytes | None
) -> None:
    key = keys / ("other.pub" if manifest is None else "key.pub")
    if manifest is not None:
        # No manifest: it is not parsed.
        (signed / "manifest.json").write_bytes(manifest)
    opened.clear()
    with pytest.raises(SignatureError):
        read_bundle(signed, require_signature=key)
    own = [name for name in opened if name.startswith(str(signed.parent))]
    assert {Path(name).name for name in own} == {"manifest.json", "signature.json"}
    opened.clear()
    with pytest.raises(BundleError):
        read_bundle(signed, require_signature=keys / "nowhere.pub")
    assert not [name for name in opened if name.startswith(str(signed.parent))]


def test_further_files_are_ignored_and_not_signed(signed: Path, keys: Path) -> None:
    (signed / "programs" / "__pycache__").mkdir()
    (signed / "programs" / "__pycache__" / "x.pyc").write_bytes(b"")
    (signed / "notes.txt").write_text("mine")
    os.mkfifo(signed / "pipe")
    (signed / "inner").symlink_to("/")
    read_bundle(signed, require_signature=keys / "key.pub")
    expected = r"m\.dist: expected the files of the manifest, found also inner, notes\.txt, pipe and 1 more"
    with pytest.raises(BundleError, match=expected):
        verify_bundle(signed)
    before = (signed / "signature.json").read_bytes()
    with pytest.raises(BundleError, match=expected):
        sign_bundle(signed, PrivateKey.read(keys / "other.pem"))
    assert (signed / "signature.json").read_bytes() == before


def test_saving_again_removes_the_signature_and_signing_again_replaces_it(signed: Path, keys: Path) -> None:
    sign_bundle(signed, PrivateKey.read(keys / "other.pem"))
    read_bundle(signed, require_signature=keys / "other.pub")
    with pytest.raises(SignatureError, match=r"expected a signature by the key .*key\.pub\), found one by"):
        read_bundle(signed, require_signature=keys / "key.pub")
    write_bundle(mlp_bundle([3, 2]), signed, overwrite=True)
    with pytest.raises(SignatureError, match=r"signature\.json: expected a signature, found none\n.*distir sign"):
        read_bundle(signed, require_signature=keys / "other.pub")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"algorithm": "RSA"}, "expected 'Ed25519' for 'algorithm', found 'RSA'"),
        ({"key": "00"}, "expected 64 hexadecimal digits for 'key', found '00'"),
        ({"signature": "F" * 128}, "expected 128 hexadecimal digits for 'signature'"),
        ({"signature": "0" * 128}, "the signature is not one of manifest.json"),
        ({"signature": 7}, "expected text for 'signature', found 7"),
    ],
)
def test_signatures_that_are_none(signed: Path, keys: Path, changed: dict[str, Any], message: str) -> None:
    file = signed / "signature.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(SignatureError) as raised:
        read_bundle(signed, require_signature=keys / "key.pub")
    assert message in str(raised.value)
    assert str(file) in raised.value.where


def test_new_keys(tmp_path: Path) -> None:
    done = invoke("sign", "--new-key", tmp_path / "mine.pem")
    assert done.exit_code == 0, done.exception
    private, public = tmp_path / "mine.pem", tmp_path / "mine.pub"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    key = load_pem_private_key(private.read_bytes(), None)
    assert key.public_key() == load_pem_public_key(public.read_bytes())
    before = private.read_bytes(), public.read_bytes()
    assert refused("sign", "--new-key", private).message == "a file of this name exists"
    assert (private.read_bytes(), public.read_bytes()) == before
    private.unlink()
    assert refused("sign", "--new-key", private).where == str(public)
    assert not private.exists()
    assert "expected another name" in refused("sign", "--new-key", public).message
    assert "No such file" in refused("sign", "--new-key", tmp_path / "no" / "key.pem").message


def _encrypted(key: Any) -> bytes:
    content: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word"))
    return content


def _elliptic(key: Any) -> bytes:
    other = ec.generate_private_key(ec.SECP256R1())
    return other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _elliptic_public(key: Any) -> bytes:
    other = ec.generate_private_key(ec.SECP256R1()).public_key()
    return other.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _public(key: Any) -> bytes:
    content: bytes = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return content


def _private(key: Any) -> bytes:
    content: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return content


@pytest.mark.parametrize(
    ("made", "is_private", "message"),
    [
        (_public, True, "expected a private key, found a public key"),
        (_private, False, "expected a public key, found a private key"),
        (_encrypted, True, "expected a key without a password, found an encrypted one"),
        (_encrypted, False, "expected a public key, found a private key"),
        (_elliptic, True, "expected an Ed25519 key, found ECPrivate"),
        (_elliptic_public, False, "expected an Ed25519 key, found ECPublic"),
        (lambda key: b"ssh-ed25519 AAAA", False, "expected a public key as a PEM file"),
        (lambda key: b"", True, "expected a private key as a PEM file"),
        (lambda key: _public(key).replace(b"PUBLIC KEY", b"CERTIFICATE"), False, "found a certificate"),
        (lambda key: _public(key)[:40], False, "the key cannot be read"),
        (lambda key: _public(key).replace(b"MC", b"\xff\0", 1), False, "the key cannot be read"),
        (lambda key: _private(key) * 1000, True, "expected at most 65,536 bytes"),
    ],
)
def test_files_that_are_no_such_key(
    signed: Path, keys: Path, made: Callable[[Any], bytes], is_private: bool, message: str
) -> None:
    file = signed.parent / "key"
    file.write_bytes(made(load_pem_private_key((keys / "key.pem").read_bytes(), None)))
    command = ["sign", signed, "--key", file] if is_private else ["verify", signed, "--key", file]
    error = refused(*command)
    assert isinstance(error, SignatureError)
    assert message in error.message
    assert error.where == str(file)


@pytest.mark.parametrize("command", ["sign", "verify"])
def test_keys_that_are_not_there(signed: Path, command: str) -> None:
    assert refused(command, signed, "--key", signed.parent / "no").message == "there is no such key"
    assert "expected a file, found a folder" in refused(command, signed, "--key", signed).message


def test_options_of_sign(signed: Path, keys: Path) -> None:
    assert "found no --key" in refused("sign", signed).message
    assert "found no bundle" in refused("sign", "--key", keys / "key.pem").message
    assert "found --key, too" in refused("sign", signed, "--key", "k", "--new-key", "n").message
    assert "not a bundle" in refused("sign", signed.parent, "--key", keys / "key.pem").message
    done = invoke("sign", signed, "--key", keys / "other.pem")
    assert done.stdout == f"signed {signed} with the key {verify_bundle(signed, keys / 'other.pub').signature.key}\n"  # type: ignore[union-attr]


def test_verify_prints_files_signature_and_versions(signed: Path, keys: Path) -> None:
    size = sum(file.stat().st_size for file in signed.rglob("*") if file.is_file() and file.name != "signature.json")
    count = sum(file.is_file() for file in signed.rglob("*")) - 1
    done = invoke("verify", signed, "--key", keys / "key.pub")
    assert done.exit_code == 0, done.exception
    first, by, weights = done.stdout.splitlines()
    assert first == f"{signed}: {count} files of {size:,} bytes, and 1 file of weights outside as in the manifest"
    fingerprint = json.loads((signed / "signature.json").read_text())["key"]
    assert by == f"  signed   by the key {fingerprint}"
    checksum = hashlib.sha256((signed.parent / "up.safetensors").read_bytes()).hexdigest()
    assert weights == f"  weights  ../up.safetensors, sha256 {checksum}"
    assert f"{by}; not checked, since no --key was given" in invoke("verify", signed).stdout
    plain = json.loads(invoke("verify", signed, "--json").stdout)
    assert plain["signature"] == {"key": fingerprint, "checked": False}
    assert (plain["files"], plain["bytes"], plain["checkpoints"][0]["checksum"]) == (count, size, checksum)
    (signed / "signature.json").unlink()
    assert "  signed   by nobody" in invoke("verify", signed).stdout
    assert json.loads(invoke("verify", signed, "--json").stdout)["signature"] is None
    assert "found none" in refused("verify", signed, "--key", keys / "key.pub").message
    (signed / "signature.json").write_text("{")
    assert isinstance(refused("verify", signed), SignatureError)


def test_every_command_that_runs_bundles_requires_the_signature(signed: Path, keys: Path, inputs: Path) -> None:
    (signed / "signature.json").unlink()
    for command in (
        ["run", signed, "-i", inputs], ["run", signed, "-i", inputs, "--trace", signed.parent / "t.svg"],
        ["launch", signed, "-i", inputs], ["generate", signed, "--tokens", "1"], ["serve", signed, "--port", "0"],
        ["train", signed, "--data", "x.py:f", "--steps", "1", "-n", "2"],
        ["bisect", signed, "-i", inputs], ["roofline", signed], ["validate", signed, "--profile", "cpu-local"],
    ):  # fmt: skip
        error = refused(*command, "--require-signature", keys / "key.pub")
        assert isinstance(error, SignatureError), command
        assert error.message == "expected a signature, found none", command


def test_every_function_that_runs_bundles_requires_the_signature(signed: Path, keys: Path, inputs: Path) -> None:
    key = keys / "other.pub"
    for run in (
        lambda: dr.load(signed, require_signature=key), lambda: dr.launch(signed, require_signature=key),
        lambda: dr.train(signed, [], steps=1, require_signature=key),
        lambda: dr.bisect(signed, inputs, require_signature=key),
    ):  # fmt: skip
        with pytest.raises(SignatureError, match="expected a signature by the key"):
            run()
    # The bundle to compare with, too.
    other = shutil.copytree(signed, signed.parent / "other.dist")
    (other / "signature.json").unlink()
    with pytest.raises(SignatureError, match="found none"):
        dr.bisect(signed, inputs, against=other, require_signature=keys / "key.pub")
    with pytest.raises(DistIRError, match="found a bundle in memory"):
        dr.bisect(mlp_bundle([3, 2]), inputs, require_signature=key)
    batch = torch.ones(2, 5), torch.ones(2, 3)
    step = dr.compile_training(torch.nn.Linear(5, 3), torch.nn.functional.mse_loss, example_batch=batch)
    with pytest.raises(RunError, match="expected the path of a signed bundle, found a TrainingStep"):
        dr.train(step, [], steps=1, require_signature=key)


def test_launches_pass_the_key_to_their_ranks(
    signed: Path, keys: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def launch(size: int, arguments: list[str], *more: Any, **options: Any) -> int:
        commands.append(arguments)
        return 0

    monkeypatch.setattr("distir_relax.runtime.launch.launch", launch)
    monkeypatch.setattr("distir_relax.runtime.launch.launch_with_torchrun", launch)
    key = str(keys / "key.pub")
    data = signed.parent / "data.py"
    data.write_text("def f(): return []\n")
    for command in (
        ["launch", signed, "-i", inputs], ["launch", signed, "-i", inputs, "--with", "torchrun"], ["roofline", signed],
        ["train", signed, "--data", f"{data}:f", "--steps", "1", "-n", "2"],
    ):  # fmt: skip
        done = invoke(*command, "--require-signature", key)
        assert done.exit_code == 0, done.exception
        arguments = commands.pop()
        assert arguments[arguments.index("--require-signature") + 1] == key

    class Started(Exception):
        pass

    def start(size: int, options: ServeOptions, *more: Any) -> None:
        assert options.bundle.require_signature == key
        raise Started

    monkeypatch.setattr(RankProcesses, "start", start)
    monkeypatch.chdir(keys)
    with pytest.raises(Started):
        dr.launch(signed, require_signature="key.pub")
    with pytest.raises(Started):
        ProcessRequests(read_bundle(signed, require_signature="key.pub"))


@pytest.mark.mpirun
def test_ranks_check_the_signature(signed: Path, keys: Path, inputs: Path) -> None:
    key = keys / "key.pub"
    change(signed / "programs" / "main_0.py")
    command = ["-m", "distir_relax", "run", signed, "-i", inputs, "--trust-code", "--require-signature", key]
    done = mpirun(2, *command)
    assert done.returncode == 2
    assert done.stderr.count("main_0.py: damaged: its checksum is not the manifest's") == 1


def test_without_the_package(signed: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for command in (
        ["sign", signed, "--key", keys / "key.pem"], ["sign", "--new-key", signed.parent / "new.pem"],
        ["verify", signed, "--key", keys / "key.pub"], ["run", signed, "--require-signature", keys / "key.pub"],
    ):  # fmt: skip
        error = refused(*command)
        assert error.message.startswith("signatures need the package cryptography, which cannot be imported")
        assert error.hint == "pip install 'distir-relax[sign]'"
    assert invoke("verify", signed).exit_code == 0
    assert not (signed.parent / "new.pem").exists()


def test_the_package_is_imported_for_signatures_alone(signed: Path) -> None:
    text = f"import sys, distir_relax as dr; dr.load({str(signed)!r}); sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0
