"""`PrimFunc`s from their text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def parse_prim_func(signature: str, body: str, **variables: Any) -> Any:
    """Parse a private function with this signature, ``name(x: T.Buffer(...))``, and this indented body.

    `T` is TVM's script, and `variables` are further names in it.
    """
    from tvm.script import from_source, tirx

    # The call of the decorator itself, which would only return it, examines the source files of all modules: 0.2 s.
    script = SimpleNamespace(prim_func=lambda **options: tirx.prim_func)
    text = f"@script.prim_func(private=True, s_tir=True)\ndef {signature}:\n{body}"
    return from_source(text, extra_vars={"T": tirx, "script": script, **variables})
