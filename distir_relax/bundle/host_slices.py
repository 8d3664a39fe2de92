"""The files of a bundle that the ranks of a host need: its texts, and slices of its weights."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence

from distir_relax.bundle.bundle import Bundle, shared_weights
from distir_relax.bundle.file_slices import SUFFIX
from distir_relax.bundle.manifest import Tensor, local_intervals
from distir_relax.bundle.read import check_weights
from distir_relax.bundle.weight_files import StoredWeights
from distir_relax.bundle.weights import SharedWeights
from distir_relax.bundle.weights_file import FileWeights
from distir_relax.errors import BundleError
from distir_relax.support.file_slices import HostFile, Slice


def host_files(bundle: Bundle, ranks: Collection[int]) -> list[HostFile]:
    """Return the files that some `ranks` of a bundle need. Its weights are hashed.

    Raises BundleError for a bundle that was not read from a folder, or with other weights than its own, and for damaged
    weights.
    """
    folder = bundle.path
    if folder is None:
        raise BundleError("expected a saved bundle", bundle.manifest.name)
    check_weights(bundle)
    slices: dict[FileWeights, dict[Slice, None]] = {}
    checksums: dict[FileWeights, str] = {}
    for part, stored, tensors in _parts(bundle, bundle.manifest.weights):
        for file, checksum in stored.files:
            slices.setdefault(file, {file.header(): None})
            checksums[file] = checksum
        for tensor in tensors:
            for rank in ranks:
                if tensor.is_on(rank):
                    file, found = stored.slices(tensor.name, local_intervals(tensor, part.manifest.mesh, rank))
                    slices[file].update(dict.fromkeys(found))
    files = []
    for file, of_file in slices.items():
        path, held = os.path.relpath(file.path, folder), [one for one in of_file if one.bytes]
        text = file.copied(held, checksums[file]).text().encode()
        files += [HostFile(path, file.size, file.path, slices=held), HostFile(path + SUFFIX, len(text), text=text)]
    taken = {file.path for file in files}
    for other in sorted(folder.rglob("*")):
        name = str(other.relative_to(folder))
        if other.is_file() and name not in taken:
            files.append(HostFile.whole(name, other))
    return files


def _parts(bundle: Bundle, weights: Sequence[Tensor]) -> Iterator[tuple[Bundle, StoredWeights, Sequence[Tensor]]]:
    """Iterate over a bundle, its encoder and its evaluation, with where `weights` of each are."""
    own = bundle.weights.own if isinstance(bundle.weights, SharedWeights) else bundle.weights
    if isinstance(own, StoredWeights):
        yield bundle, own, weights
    if (encoder := bundle.encoder) is not None:
        yield from _parts(encoder, encoder.manifest.weights)
    if (evaluation := bundle.evaluation) is not None:
        shared = shared_weights(evaluation.manifest, bundle.manifest)
        yield from _parts(evaluation, [tensor for tensor in evaluation.manifest.weights if tensor.name not in shared])
