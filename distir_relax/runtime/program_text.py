"""Torch modules of ranks' programs, generated from the text of the ranked stage when they are loaded.

A bundle is data: its torch modules are for reading, and are executed only if the user trusts them (`--trust-code`).
"""

from __future__ import annotations

import sys
from hashlib import sha256

from distir_relax.bundle import Bundle, Program
from distir_relax.runtime.verification import read_stage


def torch_text(bundle: Bundle, program: Program) -> str:
    """Return the text of a program's torch module. The ranked stage is verified (`verify_programs`).

    A bundle in memory may have modules of its own, which this process has made. Raises BundleError for a bundle without
    the text of the ranked stage.
    """
    if program.torch is not None and (bundle.path is None or bundle.trusted):
        return bundle.programs[program.torch]
    from distir_relax.ir import gc_disabled
    from distir_relax.layout import assuming
    from distir_relax.lowering.emit.torch import to_torch_program

    ranked = read_stage(bundle, "ranked", verified=True)
    with gc_disabled(), assuming(ranked.guards):
        return to_torch_program(ranked, program.name, bundle.manifest.name)


def report_trusted(bundle: Bundle) -> None:
    """Print that a bundle's own torch modules run, and which of them were edited; nothing if they do not."""
    if bundle.trusted:
        texts, checksums = bundle.programs, bundle.manifest.checksums
        edited = sorted(name for name, text in texts.items() if sha256(text.encode()).hexdigest() != checksums[name])
        sys.stderr.write(f"running the bundle's own Python programs; edited: {', '.join(edited) or 'none'}\n")
        sys.stderr.flush()
