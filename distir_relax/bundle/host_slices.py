"""The files of a bundle that the ranks of a host need: its texts, and slices of its weights."""

from __future__ import annotations

import os
from collections.abc import Collection

from distir_relax.bundle.bundle import Bundle
from distir_relax.bundle.file_slices import SUFFIX
from distir_relax.bundle.manifest import local_intervals
from distir_relax.bundle.read import check_weights, stored_parts
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
    for part, stored, tensors in stored_parts(bundle):
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
