"""Mutations of valid files, drawn from a seeded generator: of bytes, of words, and of what the bytes stand for."""

from __future__ import annotations

import io
import json
import re
import struct
import zipfile
from collections.abc import Callable, Sequence
from copy import deepcopy
from random import Random
from typing import Any

Mutation = Callable[[bytes, Random], bytes]

ODD_NUMBERS = (
    "-1", "0", "1", "2", "3", "7", "127", "-9", "1.5", "1e400", "-0", "inf", "nan", "65536", "2147483648",
    "1099511627776", "9223372036854775807", "9223372036854775808", "-9223372036854775808", "1" + "0" * 400,
)  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3, 10**6, 2**31, 2**63, 10**400, 1.5, 1e300, "", "x", "..", "\0", "\ud800",
    "/dev/zero", [], {}, [[]], [0, 1], [[0, 9]], {"a": 1}, [-1], "float64", "int8", "S[0]",
)  # fmt: skip
_WORD = re.compile(rb"\s+|[A-Za-z_][\w.]*|-?[0-9]+(?:\.[0-9]+)?|[%@][\w.]+|.", re.DOTALL)
NUMBER = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")


def of_bytes(content: bytes, random: Random) -> bytes:
    """Flipped, cut, doubled, moved or put together of two places."""
    found = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        size = len(found)
        at, length = random.randrange(size + 1), random.choice((1, 1, 2, 4, 8, 32, size // 4))
        match random.randrange(7):
            case 0 if size:
                found[at % size] ^= 1 << random.randrange(8)
            case 1 if size:
                found[at % size] = random.choice((0, 1, 0x7F, 0x80, 0xFF, 0x22, 0x5B, 0x7B))
            case 2:
                del found[at:]
            case 3:
                del found[at : at + length]
            case 4:
                found[at:at] = found[at : at + length]
            case 5:
                other = random.randrange(size + 1)
                found[at : at + length] = found[other : other + length]
            case _:
                found[at:at] = random.randbytes(min(length, 16))
    return bytes(found)


def of_numbers(content: bytes, random: Random) -> bytes:
    """One or two numbers in a text are odd ones."""
    for _ in range(random.choice((1, 1, 2))):
        places = list(NUMBER.finditer(content))
        if places:
            place = random.choice(places)
            odd = random.choice(ODD_NUMBERS).encode()
            content = content[: place.start()] + odd + content[place.end() :]
    return content


def of_words(content: bytes, random: Random) -> bytes:
    """Words of a text are left out, doubled, exchanged, or replaced by others of it."""
    words = _WORD.findall(content)
    for _ in range(random.choice((1, 1, 2, 3))):
        if not words:
            break
        at, other = random.randrange(len(words)), random.randrange(len(words))
        match random.randrange(5):
            case 0:
                del words[at]
            case 1:
                words[at:at] = words[at : at + random.choice((1, 3, 12))]
            case 2:
                words[at], words[other] = words[other], words[at]
            case 3:
                words[at] = words[other]
            case _:
                words[at] = random.choice(ODD_NUMBERS).encode()
    return b"".join(words)


def of_lines(content: bytes, random: Random) -> bytes:
    """Lines of a text are left out, doubled or exchanged."""
    lines = content.splitlines(keepends=True)
    at, other = random.randrange(len(lines) or 1), random.randrange(len(lines) or 1)
    if lines:
        match random.randrange(3):
            case 0:
                del lines[at]
            case 1:
                lines[other:other] = [lines[at]]
            case _:
                lines[at], lines[other] = lines[other], lines[at]
    return b"".join(lines)


ODD_ATTRIBUTES = (
    "0", "1", "2", "3", "-1", "7", "127", "1.5", "inf", "nan", '"x"', '"sum"', '"float64"', '"tp"', '"S[0]"', "()",
    "(0,)", "(1, 0)", "(0, 0)", "(-1,)", "(2, 3)", "((0, 1), (1, 1))", "None", "True", "[1|2]", "(1099511627776,)",
    '"{0}"', '("a",)',
)  # fmt: skip
_TYPED = re.compile(r"(%[\w.]+): \w+\[[^\]]*\]( @ \{[^}]*\})(?=[^\n]* = )")
_ATTRIBUTE = re.compile(r'(?<=\w)=(?:\((?:[^()]|\([^()]*\))*\)|\[[^\]]*\]|"[^"]*"|[-\w.]+),?')
_OP = re.compile(r"(?<= = )[\w.]+(?=\()")
_USED = re.compile(r"(?<=[(, ])%[\w.]+(?=[,)])")


ODD_SIZES = (
    "batch", "length", "other", "0*batch", "-batch", "batch - 9", "batch // 2", "(batch + 1) // 2", "batch // 0",
    "length // (0 - batch)", "batch // length", "batch*length", "7*batch // 5040", "min(batch, length)", "max(batch)",
    "min()", "abs(batch)", "batch.real", "batch**batch", "batch << 9", "batch % 2", "batch or 1", "lambda: 0",
    "(batch + length + 1)" + 30 * "*(batch + length + 1)", 40 * "(" + "batch" + 40 * "*3 // 2)",
    12 * "max(min(" + "batch" + 12 * ", length*2), batch // 3)", 180 * "(" + "batch" + 180 * ")", 5000 * "-" + "batch",
    "9" * 30 + "*batch", "batch // " + "9" * 30, " + ".join(f"(batch + {i}) // 5040" for i in range(14)),
)  # fmt: skip
_SIZED = re.compile(r"\b(?:batch|length)\b")
_BOUNDS = re.compile(r"\b[0-9]+\.\.[0-9]*(?: typically [0-9]+)?")
ODD_BOUNDS = (
    "5..3",
    "0..0",
    "0..",
    "1..1",
    "7..7 typically 8",
    "1..9" + "9" * 80,
    "..",
    "1",
    "-1..4",
    "1..4\n  size batch = 1..9",
)


def of_sizes(content: bytes, random: Random) -> bytes:
    """Symbols in a text are other expressions, and their bounds odd ones."""
    text = content.decode()
    for _ in range(random.choice((1, 1, 2))):
        pattern, odd = (_BOUNDS, ODD_BOUNDS) if random.random() < 0.2 else (_SIZED, ODD_SIZES)
        if places := list(pattern.finditer(text)):
            place = random.choice(places)
            text = text[: place.start()] + random.choice(odd) + text[place.end() :]
    return text.encode()


def of_program(content: bytes, random: Random) -> bytes:
    """Ops, operands and attributes of program text are others; what the types of its results are may be left open."""
    from distir_relax.ops import entries

    text = content.decode()
    if random.random() < 0.6:
        text = _TYPED.sub(r"\1\2", text)
    for _ in range(random.choice((1, 1, 2))):
        kind = random.randrange(6)
        places = list((_ATTRIBUTE, _ATTRIBUTE, _OP, _USED, _USED, _ATTRIBUTE)[kind].finditer(text))
        if not places:
            continue
        place = random.choice(places)
        found = place.group()
        comma = "," * found.endswith(",")
        match kind:
            case 0 | 1:
                found = f"={random.choice(ODD_ATTRIBUTES)}{comma}"
            case 2:
                found = random.choice(entries()).name
            case 3:
                found = random.choice(places).group()
            case 4:
                found = random.choice(("", f"{found}, {found}"))
            case _:
                found = f"{found.rstrip(',')}, odd={random.choice(ODD_ATTRIBUTES)}{comma}"
        text = text[: place.start()] + found + text[place.end() :]
    return text.encode()


def of_json(content: bytes, random: Random) -> bytes:
    """Values anywhere in a JSON document are odd ones, of another kind, left out or doubled."""
    value = json.loads(content)
    for _ in range(random.choice((1, 1, 1, 2))):
        places = list(json_places(value))
        if not places:
            return json.dumps(random.choice(ODD_VALUES)).encode("utf-8", "surrogatepass")
        inside, key = random.choice(places)
        match random.randrange(5):
            case 0:
                del inside[key]
            case 1 if isinstance(inside, list):
                inside.insert(random.randrange(len(inside) + 1), inside[key])
            case 2:
                other, place = random.choice(places)
                inside[key] = json.loads(json.dumps(other.get(place) if isinstance(other, dict) else None))
            case 3 if isinstance(inside[key], int):
                inside[key] += random.choice((-1, 1))
            case _:
                # A copy: the next mutation may be one of its items.
                inside[key] = deepcopy(random.choice(ODD_VALUES))
    return json.dumps(value).encode("utf-8", "surrogatepass")


def json_places(value: Any) -> list[tuple[Any, Any]]:
    """The places in a JSON document, each as its container and its key or index there."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += [(value, key), *json_places(inner)]
    return found


def of_archive(content: bytes, random: Random) -> bytes:
    """A member of a zip archive is mutated, with the checksum that it then has."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w") as new:
        members = old.infolist()
        chosen = random.randrange(len(members))
        for number, member in enumerate(members):
            data = old.read(member)
            if number == chosen:
                data = of_bytes(data, random) if random.random() < 0.3 else _npy(data, random)
            method = random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
            new.writestr(member.filename if random.random() < 0.98 else "x.npy", data, method)
    return made.getvalue()


def _npy(data: bytes, random: Random) -> bytes:
    """A `.npy` file whose header is mutated, with the length that it then has."""
    header = random.choice((of_bytes, of_numbers, of_words))(data[10:128], random)[:65535]
    return data[:8] + struct.pack("<H", len(header)) + header + data[128:]


def of_safetensors(content: bytes, random: Random) -> bytes:
    """The header of a safetensors file is mutated, with the length that it then has."""
    (length,) = struct.unpack("<Q", content[:8])
    header = random.choice((of_json, of_numbers, of_bytes))(content[8 : 8 + length], random)
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def of_onnx(content: bytes, random: Random) -> bytes:
    """Fields anywhere in an ONNX model are odd ones, left out, doubled or exchanged."""
    import onnx

    model = onnx.ModelProto.FromString(content)
    for _ in range(random.choice((1, 1, 2, 3))):
        message, field = random.choice(_fields(model))
        value = getattr(message, field.name)
        if field.is_repeated:
            _mutate_items(value, field, random)
        elif field.message_type is not None or random.random() < 0.3:
            message.ClearField(field.name)
        else:
            _set(message, field, random)
    return bytes(model.SerializeToString())


def _fields(message: Any) -> list[tuple[Any, Any]]:
    found = []
    for field, value in message.ListFields():
        found.append((message, field))
        if field.message_type is not None:
            for inner in value if field.is_repeated else [value]:
                found += _fields(inner)
    return found


def _mutate_items(value: Any, field: Any, random: Random) -> None:
    at, other = random.randrange(len(value)), random.randrange(len(value))
    if field.message_type is not None:
        match random.randrange(3):
            case 0:
                del value[at]
            case 1:
                value.append(value[at])
            case _:
                value[at].CopyFrom(value[other])
        return
    match random.randrange(4):
        case 0:
            del value[at]
        case 1:
            value.append(value[at])
        case 2:
            value[at], value[other] = value[other], value[at]
        case _:
            value[at] = _odd(field, value[at], random)


def _set(message: Any, field: Any, random: Random) -> None:
    setattr(message, field.name, _odd(field, getattr(message, field.name), random))


def _odd(field: Any, value: Any, random: Random) -> Any:
    if field.type == field.TYPE_ENUM:
        return random.choice(list(field.enum_type.values_by_number))
    if isinstance(value, str):
        return random.choice(("", "x", value + "x", "w", "shape"))
    if isinstance(value, bytes):
        return of_bytes(value, random)
    if isinstance(value, float):
        return random.choice((0.0, -1.5, float("nan"), float("inf"), 1e38))
    wide = field.type in (field.TYPE_INT64, field.TYPE_UINT64)
    return random.choice((value + 1, max(0, value - 1), 0, 1, 2, 3, 17, 10**6, 2**62 if wide else 2**31 - 1, 99))


def mutated(contents: Sequence[bytes], mutations: Sequence[Mutation], seed: int) -> bytes:
    """One mutated file of a seed: one of some valid files, by one of some mutations."""
    random = Random(seed)
    return random.choice(mutations)(random.choice(contents), random)
