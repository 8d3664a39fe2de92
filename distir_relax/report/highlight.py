"""Syntax highlighting of program text on a terminal."""

from __future__ import annotations

import sys


def print_program(text: str) -> None:
    """Print `text` to stdout, highlighted if that is a terminal."""
    if not text.endswith("\n"):
        text += "\n"
    if not sys.stdout.isatty():
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            # `distir show ... | head` closes the pipe early; Python must not flush into it again at exit.
            sys.stderr.close()
        return
    from rich.console import Console
    from rich.highlighter import RegexHighlighter
    from rich.theme import Theme

    class Program(RegexHighlighter):
        base_style = "ir."
        highlights = [  # noqa: RUF012
            r"(?P<number>(?<![\w%.])-?\d+(\.\d+)?)",
            r"(?P<type>\b(f16|f32|f64|bf16|i8|i16|i32|i64|u8|bool|float\d+|bfloat16|int\d+|R\.(DTensor|Tensor))\b)",
            r"= (?P<op>[A-Za-z_][\w.]*)",
            r"(?P<devices>@ \{[^}]*\})",
            r"(?P<keyword>\b(module|func|def|return|call|mesh|stage|class|import|from)\b)",
            r"(?P<function>@[A-Za-z_]\w*)",
            r"(?P<name>%[\w.]+)",
            r"(?P<string>\"[^\"]*\")",
            r"(?P<comment>(#|//).*)",
        ]

    theme = Theme({
        "ir.number": "cyan", "ir.type": "green", "ir.op": "bold blue", "ir.devices": "magenta", "ir.keyword": "bold",
        "ir.function": "yellow", "ir.name": "bright_white", "ir.string": "green", "ir.comment": "dim",
    })  # fmt: skip
    Console(theme=theme).print(Program()(text), end="", soft_wrap=True)
