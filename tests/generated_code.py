"""A strict grammar for modules that are generated from a bundle: text of a bundle stands in them as data alone."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import torch

import distir_relax
from distir_relax.layout import DTYPES

MODULES = re.compile(r"distir_relax\.kernels(\.\w+)*")
CONSTANTS = {"SIZES", "STEPS", "CALLS", "SIZED", "MASKS"}
BUILTINS = {"abs", "bool", "float", "int", "len", "list", "max", "min", "range", "slice", "sum", "tuple", "zip"}
STATEMENTS = (ast.Assign, ast.AugAssign, ast.Delete, ast.Expr, ast.FunctionDef, ast.For, ast.If, ast.Return, ast.With)
EXPRESSIONS = (
    ast.Attribute, ast.BinOp, ast.BoolOp, ast.Call, ast.Compare, ast.Constant, ast.Dict, ast.GeneratorExp, ast.IfExp,
    ast.Lambda, ast.List, ast.ListComp, ast.Name, ast.NamedExpr, ast.Slice, ast.Starred, ast.Subscript, ast.Tuple,
    ast.UnaryOp,
)  # fmt: skip
PARTS = (
    ast.Module, ast.Load, ast.Store, ast.Del, ast.arguments, ast.arg, ast.keyword, ast.comprehension, ast.operator,
    ast.unaryop, ast.boolop, ast.cmpop, ast.withitem,
)  # fmt: skip


def problem_of(text: str) -> str:
    """Return the first place of a generated module that the grammar does not allow; nothing if there is none.

    Its imports are torch and this package's kernels, and its constants are literals. Its functions read names that they
    define, those imports and a few builtins, and attributes that are methods of tensors or that a template of the op
    table or a generator has.
    """
    tree = ast.parse(text)
    names = set(BUILTINS) | {"torch", "F"}
    for statement in tree.body:
        match statement:
            case ast.Import(names=[ast.alias(name="torch", asname=None)]):
                pass
            case ast.Import(names=[ast.alias(name="torch.nn.functional", asname="F")]):
                pass
            case ast.ImportFrom(module=str(module), level=0) if MODULES.fullmatch(module):
                names |= {alias.name for alias in statement.names if alias.asname is None}
            case ast.Expr(value=ast.Constant()) if statement is tree.body[0]:
                pass
            case ast.Assign(targets=[ast.Name(id=name)]) if name in CONSTANTS:
                try:
                    ast.literal_eval(statement.value)
                except ValueError:
                    return f"line {statement.lineno}: {name} is not a literal"
            case ast.FunctionDef():
                names.add(statement.name)
            case _:
                return f"line {statement.lineno}: {ast.unparse(statement)[:80]}"
    return next(filter(None, (_function(f, names) for f in tree.body if isinstance(f, ast.FunctionDef))), "")


def _function(function: ast.FunctionDef, names: set[str]) -> str:
    nodes = list(ast.walk(function))
    own = {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    own |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    for node in nodes:
        is_known = isinstance(node, (*STATEMENTS, *EXPRESSIONS, *PARTS))
        match node:
            case ast.Name(id=name):
                is_known = name in own or name in names
            case ast.Attribute(attr=name):
                is_known = name in attributes()
            case ast.FunctionDef():
                is_known = not node.decorator_list and not node.args.defaults and node.returns is None
            case ast.Call(func=function_of):
                # A packed weight is called by its key.
                is_known = isinstance(function_of, (ast.Name, ast.Attribute, ast.Subscript))
        if not is_known:
            return f"line {getattr(node, 'lineno', function.lineno)}: {ast.unparse(node)[:80]}"
    return ""


@cache
def attributes() -> frozenset[str]:
    """The attributes in templates of ops and in generators: those of their strings, without docstrings, and methods."""
    root = Path(distir_relax.__file__).parent
    found: set[tuple[str, str]] = set()
    for folder in ("ops", "lowering/emit"):
        for file in (root / folder).rglob("*.py"):
            tree = ast.parse(file.read_text())
            documented = {
                id(node.body[0].value)
                for node in ast.walk(tree)
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
                and node.body
                and isinstance(node.body[0], ast.Expr)
            }
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
                    # Some templates are made of a function's name.
                    found |= set(re.findall(r"\.([A-Za-z]\w*)|^([A-Za-z]\w*)$", node.value))
    methods = {name for name in dir(torch.Tensor) if not name.startswith("_")}
    return frozenset(DTYPES).union(methods, *found)
