"""Parser of program text: `parse(print_module(m)) == m`. The grammar is at the end of ``docs/ir.md``.

Types of values may be omitted; such values are `Untyped` until `interpret.type_propagation.infer_types` infers them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NoReturn, TypeGuard

from distir_relax.errors import DistIRError, ParseError, PlacementError
from distir_relax.ir.program import (
    CALL,
    EXECUTION,
    GRADIENT_ROLE,
    NEXT_ROLE,
    PLACEMENTS,
    ROLES,
    STAGES,
    TASK,
    Attribute,
    Function,
    Input,
    Module,
    Op,
    Output,
    Value,
)
from distir_relax.ir.types import (
    EACH,
    PACKED,
    DTensorType,
    PerRank,
    PlacedType,
    Size,
    TensorType,
    Type,
    Untyped,
)
from distir_relax.layout import (
    DTYPES,
    DeviceMesh,
    Guard,
    Placement,
    Relation,
    Symbol,
    is_symbolic,
    parse_placements,
    parse_size,
)
from distir_relax.support import parse_json_string


def parse(text: str, source: str = "<text>", places: bool = False) -> Module:
    """Parse a module. With `places`, ops and inputs without a location get that of their line: ``SOURCE:12``.

    Raises `ParseError` with the line, the expectation and the text found; `PlacementError`, also with the line, for
    an invalid mesh or placement.
    """
    parser = _Parser(_tokenize(text, source), source, places)
    try:
        return parser.module()
    except PlacementError as error:
        raise PlacementError(error.message, parser.place(), error.hint) from None


MAX_DEPTH = 64
"""Maximum nesting depth of tuples."""
MAX_DEVICES = 1 << 20
"""Maximum number of devices of a mesh or set, and of sizes in a list by device."""
_RELATIONS: dict[str, tuple[Relation, bool]] = {
    **{"<": ("<", True), "<=": ("<=", True), "==": ("==", True)},
    **{">=": ("<", False), ">": ("<=", False), "!=": ("==", False)},
}
"""The relation of a guard by its text, and whether it holds."""
_LEAST_NUMBER, _MOST_NUMBER = -(2**63), 2**63 - 1

_LONG_DTYPE = {short: long for long, (short, _) in DTYPES.items()}
_TOKEN = re.compile(
    r"""[ \t\r]*(?:(?P<newline>\n)|(?P<comment>\#[^\r\n]*)
    |(?P<string>"(?:[^"\\]|\\.)*")
    |(?P<number>-?(?:inf\b|nan\b|[0-9]+\.(?!\.)[0-9]*(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+|[0-9]+))
    |(?P<value>%[\w.]+)|(?P<at>@[A-Za-z_][\w.]*)|(?P<word>[A-Za-z_][\w.]*)
    |(?P<dots>\.\.)|(?P<operator>//|[*+-])|(?P<relation>[<>=!]=|[<>])|(?P<mark>[()\[\]{}:,=|@])|\Z)""",
    re.VERBOSE,
)


_INTEGER = re.compile("-?[0-9]{1,20}")


@dataclass(slots=True)
class _Token:
    kind: str
    text: str
    line: int


def _is_size(item: Attribute) -> TypeGuard[int]:
    return is_symbolic(item) or (type(item) is int and item >= 0)


def _tokenize(text: str, source: str) -> list[_Token]:
    tokens: list[_Token] = []
    line, position = 1, 0
    for match in _TOKEN.finditer(text):
        if match.start() != position:
            break
        position = match.end()
        kind = match.lastgroup or ""
        if kind == "newline":
            line += 1
        elif kind:
            tokens.append(_Token(kind, match[kind], line))
    if position < len(text):
        raise ParseError(f"cannot read {text[position : position + 20]!r}", where=f"{source}:{line}")
    tokens.append(_Token("end", "the end of the text", line))
    return tokens


@dataclass(slots=True)
class _Parser:
    tokens: list[_Token]
    source: str
    places: bool = False
    position: int = 0
    values: dict[str, Value] = field(default_factory=dict)
    symbols: dict[str, Symbol] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)
    """Types by their text, whose sizes may be by device."""

    def module(self) -> Module:
        self.expect("module")
        stage = self.take("at", "the stage, such as @global").text[1:]
        if stage not in STAGES:
            self.fail(f"one of the stages {', '.join(STAGES)}", stage)
        self.expect("{")
        meshes: list[DeviceMesh] = []
        ranks: tuple[str, ...] = ()
        functions: list[Function] = []
        guards: list[Guard] = []
        while not self.accept("}"):
            if self.accept("mesh"):
                meshes.append(self.mesh())
            elif self.accept("size"):
                self.symbol()
            elif self.accept("guard"):
                guards.append(self.guard())
            elif self.accept("ranks"):
                self.expect("=")
                self.expect("(")
                names = []
                while not self.accept(")"):
                    names.append(self.take("at", "a function's name").text[1:])
                    self.accept(",")
                ranks = tuple(names)
            else:
                functions.append(self.function())
        if self.peek().kind != "end":
            self.fail("nothing after the module", self.next().text)
        return Module(stage, tuple(functions), tuple(meshes), ranks, tuple(guards))

    def symbol(self) -> None:
        name = self.take("word", "the name of a size").text
        if name in self.symbols:
            self.fail("another name of a size", name)
        self.expect("=")
        low = self.number(0)
        if self.next().kind != "dots":
            self.fail("bounds such as 1..64", self.tokens[self.position - 1].text)
        high = self.number(0) if self.peek().kind == "number" else None
        typical = self.number(0) if self.accept("typically") else -1
        try:
            self.symbols[name] = Symbol(name, low, high, typical)
        except DistIRError as error:
            raise ParseError(error.message, where=self.place()) from None

    def guard(self) -> Guard:
        """Parse a comparison such as ``length >= 2``; its location follows."""
        first = self.expression(self.guard_end(), _LEAST_NUMBER)
        relation = self.next()
        if relation.text not in _RELATIONS:
            self.fail(f"one of {', '.join(_RELATIONS)}", relation.text)
        second = self.expression(self.guard_end(), _LEAST_NUMBER)
        kind, holds = _RELATIONS[relation.text]
        return Guard(first, kind, second, holds, self.remark())

    def guard_end(self) -> int:
        """Return the position after one side of a guard: that of its relation, or of the end of its line."""
        position = self.position
        line = self.peek().line
        while (token := self.tokens[position]).line == line and token.kind not in ("relation", "comment", "end"):
            position += 1
        return position

    def mesh(self) -> DeviceMesh:
        for mark in ("[", None, "]", "=", "device_mesh", "("):
            if mark is None:
                self.number(0)
            else:
                self.expect(mark)
        shape = self.shape("the shape of a mesh such as (2, 3)")
        self.expect(",")
        axes = self.attribute()
        names = [name for name in axes if isinstance(name, str)] if isinstance(axes, tuple) else []
        if not isinstance(axes, tuple) or len(names) != len(axes) or not all(names):
            self.fail('the names of a mesh\'s axes such as ("dp", "tp")', str(axes))
        self.expect(")")
        if math.prod(shape) > MAX_DEVICES:
            self.fail(f"a mesh of at most {MAX_DEVICES:,} devices", str(shape))
        return DeviceMesh(shape, tuple(names))

    def shape(self, what: str) -> tuple[int, ...]:
        value = self.attribute()
        sizes = [n for n in value if _is_size(n)] if isinstance(value, tuple) else []
        if not isinstance(value, tuple) or len(sizes) != len(value):
            self.fail(what, str(value))
        return tuple(sizes)

    def string(self, what: str) -> str:
        return parse_json_string(self.take("string", what).text, ParseError, self.place())

    def function(self) -> Function:
        self.expect("func")
        name = self.take("at", "the function's name").text[1:]
        self.values = {}
        self.expect("(")
        inputs: list[Input] = []
        while not self.accept(")"):
            role, here = self.take("word", "an input's role").text, self.place()
            if role not in ROLES:
                self.fail(f"one of the roles {', '.join(ROLES)}", role)
            value, layout = self.definition(), self.layout()
            self.accept(",")
            inputs.append(Input(value, role, self.remark() or here * self.places, layout))
        self.expect("{")
        ops: list[Op] = []
        while self.peek().text != "return":
            ops.append(self.op())
        self.expect("return")
        outputs: list[Output] = []
        while not self.accept("}"):
            label = self.string("an output's name")
            self.expect(":")
            outputs.append(Output(label, self.use(), self.layout(), *self.output_role()))
            self.accept(",")
        return Function(name, tuple(inputs), tuple(ops), tuple(outputs))

    def op(self) -> Op:
        results: list[tuple[str, Type]] = []
        self.peek()
        here = f"{self.source}:{self.tokens[self.position].line}"
        while not self.accept("="):
            results.append(self.typed_name())
            self.accept(",")
        name = self.take("word", "an op's name").text
        callee = self.take("at", "a function's name such as @layer").text[1:] if name == CALL else ""
        self.expect("(")
        operands: list[Value] = []
        while not self.accept(")"):
            operands.append(self.use())
            self.accept(",")
        attrs: dict[str, Attribute] = {}
        if callee:
            attrs = {"callee": callee, **({"devices": self.devices()} if self.accept("on") else {})}
        if self.accept("{"):
            while not self.accept("}"):
                key = self.take("word", "an attribute's name").text
                if callee and key not in (*TASK, *EXECUTION):
                    self.fail(f"a call's {', '.join((*TASK, *EXECUTION))}", key)
                self.expect("=")
                value = self.attribute()
                attrs[key] = self.placements(value) if key == PLACEMENTS and isinstance(value, str) else value
                self.accept(",")
        defined = tuple(self.define(*result) for result in results)
        return Op(name, tuple(operands), defined, attrs, self.remark() or here * self.places)

    def placements(self, text: str) -> tuple[Placement, ...]:
        """Read placements for each mesh axis."""
        try:
            return parse_placements(text, tuple(self.symbols.values()))
        except PlacementError as error:
            raise PlacementError(error.message, self.place(), error.hint) from None

    def definition(self) -> Value:
        return self.define(*self.typed_name())

    def typed_name(self) -> tuple[str, Type]:
        name = self.take("value", "a value such as %x").text[1:]
        if self.accept(":"):
            return name, self.type()
        return name, Untyped(self.devices() if self.accept("@") else ())

    def output_role(self) -> tuple[str, str]:
        for role in (GRADIENT_ROLE, NEXT_ROLE):
            if self.accept(role):
                self.expect("of")
                return role, self.string("an input's name")
        return "", ""

    def layout(self) -> DTensorType | None:
        if not self.accept("as"):
            return None
        self.expect("R.DTensor")
        self.expect("(")
        return self.dtensor()

    def define(self, name: str, kind: Type) -> Value:
        if name in self.values:
            self.fail("each value to be defined once", f"%{name} again")
        self.values[name] = Value(name, kind)
        return self.values[name]

    def use(self) -> Value:
        name = self.take("value", "a value such as %x").text[1:]
        if name not in self.values:
            self.fail("a value defined above", f"%{name}")
        return self.values[name]

    def type(self) -> Type:
        head = self.take("word", "a type such as f32[4,8]").text
        if head == "R.DTensor":
            self.expect("(")
            return self.dtensor()
        if head not in _LONG_DTYPE:
            self.fail(f"a dtype, one of {', '.join(_LONG_DTYPE)}", head)
        self.expect("[")
        end = self.position
        while self.tokens[end].text != "]" and self.tokens[end].kind != "end":
            end += 1
        if self.tokens[end].kind == "end":
            self.fail("']'", self.tokens[end].text)
        text = head + " ".join(token.text for token in self.tokens[self.position : end])
        if text in self.types:
            kind = self.types[text]
            self.position = end + 1
        else:
            sizes: list[Size] = []
            while not self.accept("]"):
                sizes.append(self.size(0))
                self.accept(",")
            kind = self.types[text] = TensorType(tuple(sizes), _LONG_DTYPE[head])  # type: ignore[arg-type]
        if not self.accept("@"):
            if any(isinstance(n, PerRank) for n in kind.shape):
                self.fail("devices, such as @ {0,1}, after sizes by device", "none")
            return replace(kind, form=form) if (form := self.form()) else kind
        return PlacedType(kind.shape, kind.dtype, self.devices(), self.form())

    def form(self) -> str:
        """Read the form of a tensor, if it has one."""
        return next((word for word in (PACKED, EACH) if self.accept(word)), "")

    def dtensor(self) -> DTensorType:
        shape = self.shape("a shape such as (4, 8)")
        self.expect(",")
        dtype = self.string("a dtype")
        if dtype not in DTYPES:
            self.fail(f"a dtype, one of {', '.join(DTYPES)}", dtype)
        self.expect(",")
        mesh = re.fullmatch(r"mesh\[([0-9]{1,6})\]", self.string('a mesh such as "mesh[0]"'))
        if mesh is None:
            self.fail('a mesh such as "mesh[0]"', self.tokens[self.position - 1].text)
        self.expect(",")
        placements = self.placements(self.string("placements"))
        self.expect(")")
        assert mesh is not None
        return DTensorType(shape, dtype, placements, int(mesh[1]))

    def devices(self) -> tuple[int, ...]:
        self.expect("{")
        devices: list[int] = []
        while not self.accept("}"):
            devices.append(self.number(0))
            if self.accept(".."):
                devices += range(devices[-1] + 1, min(self.number(0), MAX_DEVICES) + 1)
            if len(devices) > MAX_DEVICES or devices[-1] >= MAX_DEVICES:
                self.fail(f"devices below {MAX_DEVICES:,}, in a set", str(devices[-1]))
            self.accept(",")
        return tuple(devices)

    def size(self, least: int = _LEAST_NUMBER) -> Size:
        values: list[int] = []
        while True:
            value, count = self.size_and_count(least)
            if len(values) + count > MAX_DEVICES:
                self.fail(f"at most {MAX_DEVICES:,} sizes by device", f"{value}*{count}")
            values += [value] * count
            if not self.accept("|"):
                return values[0] if len(values) == 1 else PerRank(tuple(values))

    def size_and_count(self, least: int) -> tuple[int, int]:
        """Parse a size, and the number of devices that have it: ``4``, ``4*8``, ``(n // 2)*8``."""
        end = self.expression_end()
        has_count = (
            end - self.position > 2 and self.tokens[end - 2].text == "*" and self.tokens[end - 1].kind == "number"
        )
        value = self.expression(end - 2 if has_count else end, least)
        return value, (self.number(1) if has_count and self.accept("*") else 1)

    def expression_end(self) -> int:
        """Return the position after the size that begins here: that of the next separator outside of parentheses."""
        self.peek()
        position, depth = self.position, 0
        while (token := self.tokens[position]).kind not in ("end", "comment", "string"):
            if depth == 0 and token.text in (",", "|", "]", ")", "}"):
                break
            depth += (token.text == "(") - (token.text == ")")
            position += 1
        return position

    def expression(self, end: int, least: int) -> int:
        """Parse the size of the tokens before position `end`."""
        if end - self.position <= 1 and self.peek().kind != "word":
            return self.number(least)
        text = " ".join(token.text for token in self.tokens[self.position : end])
        self.position = end
        try:
            return parse_size(text, self.symbols)
        except DistIRError as error:
            raise ParseError(error.message, where=self.place(), hint=error.hint) from None

    def attribute(self, depth: int = 0) -> Attribute:
        if self.symbols and self.is_expression():
            return self.expression(self.expression_end(), _LEAST_NUMBER)
        token = self.next()
        if token.kind == "string":
            return parse_json_string(token.text, ParseError, self.place())
        if token.kind == "number":
            if not _INTEGER.fullmatch(token.text):
                return float(token.text)
            return self.in_range(token, _LEAST_NUMBER)
        if token.text in ("inf", "nan"):
            return float(token.text)
        if token.text in ("True", "False", "None"):
            return {"True": True, "False": False, "None": None}[token.text]
        if token.text == "[":
            size = self.size()
            self.expect("]")
            return size
        if token.text != "(":
            self.fail("an attribute", token.text)
        if depth == MAX_DEPTH:
            self.fail(f"tuples nested at most {MAX_DEPTH} deep", "(")
        items: list[Attribute] = []
        while not self.accept(")"):
            items.append(self.attribute(depth + 1))
            self.accept(",")
        return tuple(items)

    def is_expression(self) -> bool:
        """Whether a symbolic size begins here: names, numbers and operators, and not a tuple."""
        first = self.peek()
        if first.kind not in ("word", "number", "operator") and first.text != "(":
            return False
        end = self.expression_end()
        tokens = self.tokens[self.position : end]
        if first.text == "(":
            depths = list(accumulate((t.text == "(") - (t.text == ")") for t in tokens))
            # The empty tuple ends here: no expression contains it.
            if 0 not in depths or depths.index(0) == len(tokens) - 1:
                return False
            # Commas after the first parentheses are those of a function: ``(n + 1) // 2 - min(n, 3)``.
            first_group = zip(tokens, depths[: depths.index(0)], strict=False)
            return not any(token.text == "," and depth == 1 for token, depth in first_group)
        return first.text in self.symbols or len(tokens) > 1

    def remark(self) -> str:
        here = self.tokens[self.position]
        if here.kind == "comment" and here.line == self.tokens[self.position - 1].line:
            text = here.text[1:].split(" ; ")[0].strip()
            self.position += 1
            return text
        return ""

    def number(self, least: int) -> int:
        """Parse an integer of at least `least`."""
        return self.in_range(self.take("number", "a whole number"), least)

    def in_range(self, token: _Token, least: int) -> int:
        if not _INTEGER.fullmatch(token.text) or not least <= int(token.text) <= _MOST_NUMBER:
            bound = f" of at least {least}" if least > _LEAST_NUMBER else " that an int64 holds"
            self.fail(f"a whole number{bound}", token.text[:40])
        return int(token.text)

    def peek(self) -> _Token:
        while self.tokens[self.position].kind == "comment":
            self.position += 1
        return self.tokens[self.position]

    def next(self) -> _Token:
        token = self.peek()
        if token.kind != "end":
            self.position += 1
        return token

    def accept(self, text: str) -> bool:
        position = self.position
        while self.tokens[position].kind == "comment":
            position += 1
        if self.tokens[position].text != text:
            return False
        self.position = position + 1
        return True

    def expect(self, text: str) -> None:
        token = self.next()
        if token.text != text:
            self.fail(repr(text), token.text)

    def take(self, kind: str, what: str) -> _Token:
        token = self.next()
        if token.kind != kind:
            self.fail(what, token.text)
        return token

    def fail(self, expected: str, actual: str) -> NoReturn:
        raise ParseError(f"expected {expected}, found {actual[:60]!r}", where=self.place())

    def place(self) -> str:
        """The line of the token just read."""
        return f"{self.source}:{self.tokens[max(self.position - 1, 0)].line}"
