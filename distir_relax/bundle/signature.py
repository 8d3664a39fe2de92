"""Signatures of bundles: Ed25519 over the manifest, whose checksums cover all other files.

https://www.rfc-editor.org/rfc/rfc8032 describes Ed25519. Keys are PEM files, as ``openssl genpkey -algorithm ed25519``
writes them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distir_relax.errors import SignatureError
from distir_relax.support import Fields, check_regular, file_within, parse_json, read_bytes, shown_path
from distir_relax.support.files import write_text

SIGNATURE_FILE = "signature.json"
_ALGORITHM = "Ed25519"
# A signature of this kind is not one of other software that uses the same key.
_CONTEXT = b"distir-relax bundle signature, version 1\n"
_MOST_KEY, _MOST_SIGNATURE = 1 << 16, 1 << 12
_LABEL = re.compile(rb"^-----BEGIN ([A-Z0-9 ]{1,40})-----\s*$", re.MULTILINE)
_CREATE = "distir sign --new-key key.pem makes a key, and key.pub beside it"


@dataclass(frozen=True)
class Signature:
    """A signature, 64 bytes in hex, and the fingerprint of its public key (`PublicKey.fingerprint`)."""

    key: str
    value: str

    @classmethod
    def read(cls, folder: Path) -> Signature:
        """Read the signature of the bundle in a folder. Raises SignatureError without one, and for a damaged one."""
        file = file_within(folder, SIGNATURE_FILE, SignatureError, _MISSING)
        data = parse_json(read_bytes(file, SignatureError, _MOST_SIGNATURE, _MISSING), SignatureError, str(file))
        table = Fields.of(data, SignatureError, str(file))
        if table.text("algorithm") != _ALGORITHM:
            raise table.refuse(f"{_ALGORITHM!r}", "algorithm", table.text("algorithm"))
        for name, digits in (("key", 64), ("signature", 128)):
            if not re.fullmatch(f"[0-9a-f]{{{digits}}}", table.text(name)):
                raise table.refuse(f"{digits} hexadecimal digits", name, table.text(name))
        return cls(table.text("key"), table.text("signature"))

    def write(self, folder: Path) -> None:
        """Write it to the folder of a bundle, atomically. Raises `DistIRError` if that fails."""
        plain = {"algorithm": _ALGORITHM, "key": self.key, "signature": self.value}
        write_text(folder / SIGNATURE_FILE, json.dumps(plain, indent=1) + "\n")


_MISSING = "expected a signature, found none"


class PublicKey:
    """An Ed25519 public key. `fingerprint` is the SHA-256, in hex, of its DER encoding (SubjectPublicKeyInfo)."""

    def __init__(self, key: Any, path: Path) -> None:
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        self.path = path
        self._key = key
        encoded: bytes = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        self.fingerprint = hashlib.sha256(encoded).hexdigest()

    @classmethod
    def read(cls, path: str | Path) -> PublicKey:
        """Read a PEM file. Raises SignatureError for another kind of file, and without the package cryptography."""
        _, serialization, ed25519 = _cryptography()
        content = _read_pem(path, "public")
        key = _parsed(path, lambda: serialization.load_pem_public_key(content), ed25519.Ed25519PublicKey)
        return cls(key, Path(path))

    def check(self, manifest: bytes, folder: Path) -> Signature:
        """Raise SignatureError unless the bundle in a folder has a signature of its manifest by this key; return it."""
        exceptions, _, _ = _cryptography()
        try:
            signature = Signature.read(folder)
        except SignatureError as wrong:
            hint = wrong.hint or "sign the bundle: distir sign BUNDLE --key key.pem"
            raise SignatureError(wrong.message, wrong.where, hint) from None
        where = shown_path(folder / SIGNATURE_FILE)
        if signature.key != self.fingerprint:
            raise SignatureError(
                f"expected a signature by the key {self.fingerprint[:16]}… ({shown_path(self.path)}), found one by "
                f"{signature.key[:16]}…", where, "give the public key of who signed it, or sign it again",
            )  # fmt: skip
        try:
            self._key.verify(bytes.fromhex(signature.value), _message(manifest))
        except exceptions.InvalidSignature:
            raise SignatureError(
                "the signature is not one of manifest.json: one of them was edited", where,
                "get the bundle anew from who signed it",
            ) from None  # fmt: skip
        return signature


class PrivateKey:
    """An Ed25519 private key."""

    def __init__(self, key: Any, path: Path) -> None:
        self._key = key
        self.public = PublicKey(key.public_key(), path)

    @classmethod
    def read(cls, path: str | Path) -> PrivateKey:
        """Read a PEM file without a password. Raises SignatureError as `PublicKey.read` does."""
        _, serialization, ed25519 = _cryptography()
        content = _read_pem(path, "private")
        key = _parsed(path, lambda: serialization.load_pem_private_key(content, None), ed25519.Ed25519PrivateKey)
        return cls(key, Path(path))

    def sign(self, manifest: bytes) -> Signature:
        """Return the signature of a manifest's bytes."""
        return Signature(self.public.fingerprint, self._key.sign(_message(manifest)).hex())


def create_key(path: str | Path) -> PublicKey:
    """Write a new private key to `path`, which only its owner may read, and the public one, which ends in ``.pub``.

    Raises SignatureError if one of the files exists, or cannot be written; none is left then.
    """
    _, serialization, ed25519 = _cryptography()
    private = Path(path)
    public = private.with_suffix(".pub")
    if private == public:
        raise SignatureError("expected another name than that of the public key", shown_path(path), "name it key.pem")
    key = ed25519.Ed25519PrivateKey.generate()
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    known = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    _create(private, secret, 0o600)
    try:
        _create(public, known, 0o644)
    except BaseException:
        private.unlink(missing_ok=True)
        raise
    return PublicKey(key.public_key(), public)


def _create(path: Path, content: bytes, mode: int) -> None:
    """Write a new file. Raises SignatureError if it exists, or cannot be written."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise SignatureError("a file of this name exists", shown_path(path), "choose another name") from None
    except (OSError, ValueError) as wrong:
        raise SignatureError(f"cannot be written: {wrong}", shown_path(path)) from None
    try:
        with os.fdopen(file, "wb") as opened:
            opened.write(content)
    except OSError as wrong:
        with suppress(OSError):
            path.unlink()
        raise SignatureError(f"cannot be written: {wrong.strerror}", shown_path(path)) from None


def _message(manifest: bytes) -> bytes:
    return _CONTEXT + hashlib.sha256(manifest).digest()


def _cryptography() -> tuple[Any, Any, Any]:
    """Return the modules for exceptions, serialization and Ed25519. Raises SignatureError without the package."""
    try:
        from cryptography import exceptions
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as missing:
        raise SignatureError(
            f"signatures need the package cryptography, which cannot be imported: {missing}",
            hint="pip install 'distir-relax[sign]'",
        ) from None
    return exceptions, serialization, ed25519


def _read_pem(path: str | Path, kind: str) -> bytes:
    """Return the PEM file of a `kind` of key, public or private. Raises SignatureError for the other kind."""
    check_regular(path, SignatureError, "there is no such key")
    content = read_bytes(path, SignatureError, _MOST_KEY)
    label = next((match[1].decode() for match in _LABEL.finditer(content)), None)
    where = shown_path(path)
    if label is None:
        raise SignatureError(f"expected a {kind} key as a PEM file, found another kind of file", where, _CREATE)
    found = "private" if label.endswith("PRIVATE KEY") else "public" if label.endswith("PUBLIC KEY") else label.lower()
    if found != kind:
        hint = "key.pub is the public key; keep key.pem to yourself" if kind == "public" else "sign with key.pem"
        raise SignatureError(f"expected a {kind} key, found a {found}{' key' * (found in _KINDS)}", where, hint)
    if label.startswith("ENCRYPTED"):
        raise SignatureError("expected a key without a password, found an encrypted one", where, _CREATE)
    return content


_KINDS = ("private", "public")


def _parsed(path: str | Path, parse: Any, kind: type) -> Any:
    """Return the key that `parse` returns. Raises SignatureError if it fails, and for a key of another `kind`."""
    from cryptography.exceptions import UnsupportedAlgorithm

    where = shown_path(path)
    try:
        key = parse()
    except (ValueError, TypeError, UnsupportedAlgorithm) as wrong:
        raise SignatureError(f"the key cannot be read: {str(wrong).partition(chr(10))[0]}", where, _CREATE) from None
    if not isinstance(key, kind):
        name = type(key).__name__.removeprefix("_").removesuffix("Key")
        raise SignatureError(f"expected an {_ALGORITHM} key, found {name}", where, _CREATE)
    return key
