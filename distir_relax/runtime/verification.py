"""Whether the programs of a bundle are what its text says, and fit each other."""

from __future__ import annotations

from distir_relax.bundle import STAGE_FILES, Bundle
from distir_relax.errors import BundleError, DistIRError


def verify_programs(bundle: Bundle) -> None:
    """Raise BundleError unless the ranks' programs fit each other, as `ir.verify` says, and are those of the text.

    Each torch program is compared with what is written for the text of the ranked stage, so that nothing can run that
    was not verified. A bundle made by hand, without that text, is taken as it is.
    """
    file = STAGE_FILES["ranked"]
    if file not in bundle.texts:
        return
    from distir_relax.ir import parse, verify
    from distir_relax.ops import check

    where = str(bundle.path / file if bundle.path else file)
    try:
        ranked = parse(bundle.texts[file], where)
        verify(ranked, check)
    except DistIRError as wrong:
        raise BundleError(f"the programs of the ranks do not fit each other: {wrong}", where) from None
    # A bundle for another backend has no torch programs: nothing is written only to be compared with nothing.
    given = {program.name: program.torch for program in bundle.manifest.programs if program.torch is not None}
    if not given:
        return
    from distir_relax.lowering.emit.torch import to_torch

    written = to_torch(ranked, bundle.manifest.name)
    for name, path in given.items():
        if bundle.programs[path] != written.get(name):
            raise BundleError(
                f"the program {path} is not what {file} says",
                str(bundle.path or bundle.manifest.name),
                "compile the model again; programs are for reading, not for editing",
            )
