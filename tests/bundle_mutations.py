"""Mutations of whole bundles: of one of their files, of names, links and sizes, and attempts to become code.

Checksums are corrected afterwards, in inner bundles first, so that the readers see the mutation.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from distir_relax.bundle import Manifest
from distir_relax.bundle.write import manifest_checksum
from distir_relax.errors import BundleError, DistIRError
from distir_relax.support import parse_json
from tests import mutations
from tests.bundle_kinds import Files

ROOT = "m.dist"
INNER = ("encoder", "evaluation")
MARK = "INJECTED"
"""Stands in every text that tries to become code."""


@dataclass(frozen=True)
class Special:
    """Something that is not a regular file: a link to `target`, a FIFO or a folder."""

    kind: str
    target: str = ""


Entries = dict[str, bytes | Special]

CODE = (
    '__import__("os").system("INJECTED")',
    "__import__('os').system('INJECTED')",
    'x"""\nINJECTED()\n"""',
    "x'''\nINJECTED()",
    '"\nINJECTED()\n"',
    "'\nINJECTED()\n'",
    "\nINJECTED()\n",
    "\rINJECTED()\r",
    "\x0cINJECTED()",
    "\u2028INJECTED()",
    '")\nINJECTED()\n("',
    '\\"\nINJECTED()',
    "\\",
    "x\\",
    "{INJECTED}",
    "{0.__class__}",
    "{{INJECTED}}",
    "%s",
    "x]INJECTED[",
    "comm",
    "weights",
    "torch",
    "F",
    "main",
    "print",
    "eval",
    "__builtins__",
    "class",
    "\uff54\uff4f\uff52\uff43\uff48",
    "prepare",
    "INJECTED.dist",
    "x.INJECTED",
    "x[INJECTED]",
    "INJECTED",
    "a # INJECTED()",
    "lambda: INJECTED",
    "\x00INJECTED",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% for x in range(10**9) %}INJECTED{% endfor %}",
    "\ud800INJECTED",
)
BREAKS = ('"""\nINJECTED()\n"""', "\nINJECTED()\n", "\r    INJECTED()\r", '"\nINJECTED()\n"', '__import__("INJECTED")')
"""Texts that end a docstring, a comment, a line or a string, or are an expression."""
NAMES = (
    "../x", "/etc/passwd", "../outside.txt", "a/../../x", "./x", "", ".", "..", "a\\b", "a\nb", "x" * 300, "/dev/zero",
    "programs", "weights.safetensors", "manifest.json", "ranked.txt", "encoder/manifest.json", "outside.safetensors",
    "../outside.safetensors", "../../../../../../etc/hostname.safetensors", "fifo.safetensors", "../m.dist/ranked.txt",
)  # fmt: skip
SIZES = (10**18, 2**63 - 1, 2**63, 2**62, 2**40, 2**31, 10**9, 10**30, -(10**18), 1e308, 65537, 1048577)


def mutated_bundle(files: Files, seed: int) -> Entries:
    """The files of one mutated bundle; a path is below the folder that has ``m.dist``."""
    random = Random(seed)
    entries: Entries = dict(files)
    for _ in range(random.choice((1, 1, 1, 2))):
        random.choice(_MUTATIONS)(entries, random)
    if random.random() < 0.97:
        mend(entries)
    return entries


def write(entries: Entries, folder: Path) -> int:
    """Write entries below a folder; return the bytes of regular files. Names that no file system takes are left out."""
    total = 0
    for name, content in entries.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
                total += len(content)
            elif content.kind == "link":
                path.symlink_to(content.target)
            elif content.kind == "fifo":
                os.mkfifo(path)
            else:
                path.mkdir(exist_ok=True)
        except (OSError, ValueError):
            continue
    return total


def mend(entries: Entries) -> None:
    """Set all checksums that manifests have of files which exist, and those of the manifests."""
    for folder in (*(f"{ROOT}/{inner}" for inner in INNER), ROOT):
        content = entries.get(f"{folder}/manifest.json")
        if not isinstance(content, bytes):
            continue
        try:
            plain = json.loads(content)
        except (ValueError, RecursionError):
            continue
        if not isinstance(plain, dict) or not isinstance(checksums := plain.get("checksums"), dict):
            continue
        for name in checksums:
            file = entries.get(f"{folder}/{name}")
            if isinstance(file, bytes):
                checksums[name] = hashlib.sha256(file).hexdigest()
        for row in plain["weight_files"] if isinstance(plain.get("weight_files"), list) else ():
            file = entries.get(os.path.normpath(f"{folder}/{row.get('path')}")) if isinstance(row, dict) else None
            if isinstance(file, bytes):
                row |= {"size": len(file), "checksum": hashlib.sha256(file).hexdigest()}
        try:
            text = json.dumps(plain)
            checksums["manifest.json"] = manifest_checksum(Manifest.from_json(parse_json(text, BundleError)))
        except (DistIRError, RecursionError, UnicodeEncodeError):
            pass
        entries[f"{folder}/manifest.json"] = json.dumps(plain).encode("utf-8", "surrogatepass")


def _pick(entries: Entries, random: Random, *suffixes: str) -> str | None:
    """A regular file of the bundle whose name ends so."""
    names = [n for n, content in entries.items() if n.endswith(suffixes) and isinstance(content, bytes)]
    return random.choice(names) if names else None


def _mutate(entries: Entries, random: Random, suffixes: tuple[str, ...], *by: mutations.Mutation) -> None:
    name = _pick(entries, random, *suffixes)
    if name is None:
        return
    content = entries[name]
    assert isinstance(content, bytes)
    try:
        entries[name] = random.choice(by)(content, random)
    except (
        ValueError,
        LookupError,
        TypeError,
        RecursionError,
        struct.error,
    ):  # mutated before
        entries[name] = mutations.of_bytes(content, random)


def of_program(entries: Entries, random: Random) -> None:
    """Ops, operands, attributes, words and numbers of the programs."""
    _mutate(
        entries, random, ("ranked.txt",), *(mutations.of_program,) * 4, mutations.of_words, mutations.of_numbers,
        mutations.of_lines, mutations.of_sizes, mutations.of_bytes,
    )  # fmt: skip


def of_manifest(entries: Entries, random: Random) -> None:
    """Values anywhere in a manifest."""
    _mutate(entries, random, ("manifest.json",), *(mutations.of_json,) * 5, mutations.of_numbers, mutations.of_bytes)


def of_weights(entries: Entries, random: Random) -> None:
    """The header of a file of weights, or its bytes."""
    _mutate(entries, random, (".safetensors",), *(mutations.of_safetensors,) * 3, mutations.of_bytes)


def of_texts(entries: Entries, random: Random) -> None:
    """Texts besides the programs: stages for people, records, tokenizers, queries."""
    name = _pick(entries, random, "distir.txt", "sharded.txt", "global.txt", ".json", ".toml", ".jinja", ".py")
    if name is not None:
        kinds = (mutations.of_json, mutations.of_numbers) if name.endswith(".json") else (mutations.of_words,)
        _mutate(entries, random, (name,), *kinds, mutations.of_bytes)


def of_code(entries: Entries, random: Random) -> None:
    """A text in the programs or in a manifest, or a comment, tries to become code."""
    code = random.choice(BREAKS if random.random() < 0.4 else CODE)
    name = _pick(
        entries, random, *random.choice((("ranked.txt",), ("manifest.json",), ("text.json", ".jinja", ".json")))
    )
    if name is None:
        return
    content = entries[name]
    assert isinstance(content, bytes)
    if name.endswith(".json"):

        def replace(document: bytes, random: Random) -> bytes:
            value = json.loads(document)
            places = [(a, k) for a, k in mutations.json_places(value) if isinstance(a[k], str)]
            keys = [(a, k) for a, k in mutations.json_places(value) if isinstance(a, dict)]
            if keys and (not places or random.random() < 0.2):
                inside, key = random.choice(keys)
                inside[code] = inside.pop(key)
            elif isinstance(value, dict) and "name" in value and random.random() < 0.3:
                value["name"] = code
            elif places:
                inside, key = random.choice(places)
                inside[key] = code
            return json.dumps(value).encode()

        _mutate(entries, random, (name,), replace)
        return
    text = content.decode("utf-8", "replace")
    kinds: tuple[Callable[[str, str, Random], str], ...] = (
        _comment, _string, _attribute_of_code, _identifier, _identifier
    )  # fmt: skip
    entries[name] = random.choice(kinds)(text, code, random).encode("utf-8", "replace")


def _lines_with(text: str, mark: str, random: Random) -> tuple[list[str], int] | None:
    lines = text.split("\n")
    places = [i for i, line in enumerate(lines) if mark in line]
    return (lines, random.choice(places)) if places else None


def _comment(text: str, code: str, random: Random) -> str:
    found = _lines_with(text, " = ", random)
    if found is None:
        return text
    lines, at = found
    lines[at] = f"{lines[at].split('  # ')[0]}  # a.py:1 {code}"
    return "\n".join(lines)


def _string(text: str, code: str, random: Random) -> str:
    places = [m.span() for m in re.finditer(r'"(?:[^"\\\n]|\\.)*"', text)]
    if not places:
        return text
    start, stop = random.choice(places)
    return text[:start] + json.dumps(code) + text[stop:]


def _attribute_of_code(text: str, code: str, random: Random) -> str:
    """An attribute of any op is a text, under a name that generators read."""
    key = random.choice(
        ("step", "distance", "task", "stage", "kind", "microbatch", "value", "axis", "dtype", "op", "stream")
    )
    found = _lines_with(text, " = ", random)
    if found is None:
        return text
    lines, at = found
    head, _, place = lines[at].partition("  # ")
    value = random.choice((json.dumps(code), f"({json.dumps(code)},)", str(random.choice(SIZES))))
    head = f"{head[:-1]}, {key}={value}}}" if head.endswith("}") else f"{head} {{{key}={value}}}"
    lines[at] = head + (f"  # {place}" if place else "")
    return "\n".join(lines)


def _identifier(text: str, code: str, random: Random) -> str:
    """A value, function or symbol has the name of something that generated modules use, everywhere."""
    names = sorted(set(re.findall(r"[%@][A-Za-z_][\w.]*|(?<=size )\w+", text)))
    if not names:
        return text
    old = random.choice(names)
    new = random.choice(
        (*(c for c in CODE if c.isidentifier()), "a.b", "main_0", "x_1", "STEPS", "SIZES", "step", "max")
    )
    mark = old[0] if old[0] in "%@" else ""
    return re.sub(rf"{re.escape(old)}(?![\w.])", mark + new, text)


def of_names(entries: Entries, random: Random) -> None:
    """A path or a name in a manifest, or a file's own, is an odd one."""
    odd = random.choice(NAMES)

    def rename(document: bytes, random: Random) -> bytes:
        plain = json.loads(document)
        match random.randrange(4):
            case 0:
                random.choice(plain["programs"])["torch"] = odd
                plain["checksums"][odd] = "0" * 64
            case 1:
                plain["checksums"][odd] = plain["checksums"].pop(random.choice(list(plain["checksums"])))
            case 2:
                weights = [tensor["name"] for tensor in plain["weights"]]
                taken = {name: name for name in weights if random.random() < 0.5}
                plain["weight_files"] = [{"path": odd, "size": 99, "checksum": "0" * 64, "tensors": taken}]
            case _:
                for row in plain["weight_files"]:
                    row["path"] = odd
        return json.dumps(plain).encode()

    _mutate(entries, random, ("manifest.json",), rename)


def of_files(entries: Entries, random: Random) -> None:
    """A file is a link, a FIFO, a folder, missing, exchanged with another, empty, or one more."""
    name = random.choice(list(entries))
    other = random.choice(list(entries))
    match random.randrange(7):
        case 0:
            targets = (
                "/etc/passwd",
                "/dev/zero",
                "../outside.txt",
                "../../outside.txt",
                "ranked.txt",
                os.path.basename(name),
            )
            entries[name] = Special("link", random.choice(targets))
        case 1:
            entries[name] = Special("fifo")
        case 2:
            entries[name] = Special("folder")
        case 3:
            del entries[name]
        case 4:
            entries[name], entries[other] = entries[other], entries[name]
        case 5:
            entries[name] = b""
        case _:
            entries[
                f"{ROOT}/{random.choice(('extra.txt', 'encoder/manifest.json', '__init__.py', 'sitecustomize.py'))}"
            ] = b"INJECTED()\n"


def of_sizes(entries: Entries, random: Random) -> None:
    """A number somewhere is far too large."""
    size = random.choice(SIZES)
    name = _pick(entries, random, "manifest.json", "ranked.txt", ".safetensors")
    if name is None:
        return

    def in_json(document: bytes, random: Random) -> bytes:
        value = json.loads(document)
        places = [(a, k) for a, k in mutations.json_places(value) if type(a[k]) is int]
        for inside, key in random.sample(places, min(len(places), random.choice((1, 1, 2, 5)))):
            inside[key] = size
        return json.dumps(value).encode()

    def in_text(text: bytes, random: Random) -> bytes:
        numbers = list(mutations.NUMBER.finditer(text))
        place = random.choice(numbers)
        if random.random() < 0.5:  # everywhere, so that types still fit
            return text.replace(place.group(), str(size).encode())
        return text[: place.start()] + str(size).encode() + text[place.end() :]

    def in_header(content: bytes, random: Random) -> bytes:
        if random.random() < 0.3:
            return random.choice((2**63, 2**64 - 1, 10**8, 10**12)).to_bytes(8, "little") + content[8:]
        length = int.from_bytes(content[:8], "little")
        header = in_json(content[8 : 8 + length], random)
        return len(header).to_bytes(8, "little") + header + content[8 + length :]

    _mutate(
        entries, random, (name,), in_json if name.endswith(".json") else in_header if name.endswith("s") else in_text
    )


def of_depth(entries: Entries, random: Random) -> None:
    """A document or a program is nested far too deep."""
    depth = random.choice((50, 70, 500, 5000, 100_000))
    name = _pick(entries, random, ".json", "ranked.txt")
    if name is None:
        return

    def in_json(document: bytes, random: Random) -> bytes:
        places = mutations.json_places(value := json.loads(document))
        if not places or random.random() < 0.3:
            return random.choice((b"[", b'{"a":')) * depth
        inside, key = random.choice(places)
        inside[key] = MARK
        return json.dumps(value).encode().replace(b'"INJECTED"', b"[" * depth + b"]" * depth)

    def in_text(text: bytes, random: Random) -> bytes:
        places = list(mutations.NUMBER.finditer(text))
        place = random.choice(places)
        deep = b"(" * depth + place.group() + b")" * depth
        return text[: place.start()] + deep + text[place.end() :]

    _mutate(entries, random, (name,), in_json if name.endswith(".json") else in_text)


_MUTATIONS: tuple[Callable[[Entries, Random], None], ...] = (
    *(of_program,) * 6, *(of_code,) * 6, *(of_manifest,) * 6, *(of_names,) * 2, *(of_files,) * 2, *(of_sizes,) * 3,
    *(of_weights,) * 2, *(of_texts,) * 2, of_depth,
)  # fmt: skip


def outside() -> dict[str, Any]:
    """Files beside the bundle that a mutated one may try to read."""
    return {"outside.txt": b"INJECTED()\n", "outside.safetensors": b"\x02\0\0\0\0\0\0\0{}"}
