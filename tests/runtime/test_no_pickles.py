"""Nothing that another rank, host or client sends is unpickled: a pickle runs what its sender likes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import distir_relax

PACKAGE = Path(distir_relax.__file__).parent
FILES = sorted(
    path
    for folder in ("runtime", "serving", "calibration", "bundle", "support")
    for path in (PACKAGE / folder).rglob("*.py")
)
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
OBJECTS_OF_MPI = {
    "allgather", "allreduce", "alltoall", "bcast", "bsend", "exscan", "gather", "ibsend", "improbe", "irecv", "isend",
    "issend", "mprobe", "recv", "reduce", "scan", "scatter", "send", "sendrecv", "ssend",
}  # fmt: skip
"""Methods of mpi4py's communicators that pickle; those by buffers have a capital letter."""


def faults(text: str) -> Iterator[str]:
    tree = ast.parse(text)
    imported = {
        alias.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    imported |= {(node.module or "").partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    yield from sorted(imported & PICKLES)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.endswith(("_object", "_object_list")):
            yield node.attr  # of torch.distributed
        if "mpi4py" in imported and isinstance(node, ast.Attribute) and node.attr in OBJECTS_OF_MPI:
            yield node.attr
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and getattr(node.value, "value", True):
            yield "allow_pickle"
        if isinstance(node, ast.keyword) and node.arg == "weights_only" and not getattr(node.value, "value", False):
            yield "weights_only"


def test_no_file_that_talks_to_others_unpickles() -> None:
    found = {str(path.relative_to(PACKAGE)): [*faults(path.read_text(encoding="utf-8"))] for path in FILES}
    assert len(found) > 100
    assert any("mpi4py" in path.read_text(encoding="utf-8") for path in FILES)
    assert {name: what for name, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "from marshal import loads", "dist.all_gather_object(found, 1)",
        "np.load(p, allow_pickle=True)", "torch.load(p, weights_only=False)",
        "from mpi4py import MPI\nMPI.COMM_WORLD.bcast(1)",
    ],
)  # fmt: skip
def test_what_unpickles_is_found(text: str) -> None:
    assert [*faults(text)]
