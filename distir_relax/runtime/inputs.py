"""Inputs and outputs of a run: validation, slicing per rank, `.npz` output."""

from __future__ import annotations

import difflib
import hashlib
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distir_relax.bundle import Manifest, Tensor, local_intervals
from distir_relax.errors import RunError
from distir_relax.runtime.arrays import as_torch, dtype_name, torch_dtype

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.arrays import Array


def check_inputs(tensors: Sequence[Tensor], inputs: Mapping[str, Array]) -> None:
    """Raise RunError unless `inputs` are global arrays with the dtypes and shapes of `tensors`.

    numpy has no bfloat16: such an input is passed as float32, and cast.
    """
    expected = {tensor.name: tensor for tensor in tensors}
    signature = ", ".join(f"{t.name}: {t.dtype} {t.shape}" for t in tensors) or "nothing"
    for name, tensor in expected.items():
        if name not in inputs:
            raise RunError(
                f"the input is missing; found {', '.join(map(repr, inputs)) or 'none'}", f"input {name!r}",
                f"the program takes {signature}")  # fmt: skip
        value = inputs[name]
        if not hasattr(value, "dtype"):
            raise RunError(f"expected an array, {tensor.dtype} {tensor.shape}, found {value!r}", f"input {name!r}")
        dtype = str(value.dtype).removeprefix("torch.")
        accepted = (tensor.dtype, "float32") if tensor.dtype == "bfloat16" else (tensor.dtype,)
        if dtype not in accepted or tuple(value.shape) != tensor.shape:
            raise RunError(
                f"expected {tensor.dtype} {tensor.shape}, found {dtype} {tuple(value.shape)}",
                f"input {name!r}",
                _cast(name, accepted[-1]) if dtype not in accepted else _other_shape(tensor, value),
            )
    for name in inputs:
        if name not in expected:
            near = difflib.get_close_matches(name, expected, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"the program takes {signature}"
            raise RunError("the program has no such input", f"input {name!r}", hint)


def local_inputs(manifest: Manifest, inputs: Mapping[str, Array], rank: int, device: str) -> list[torch.Tensor]:
    """Return the shards of the inputs on `rank`, contiguous, on `device`, in the manifest's order."""
    tensors = [tensor for tensor in manifest.inputs if tensor.is_on(rank)]
    return [_local(tensor, manifest, inputs[tensor.name], rank).to(device) for tensor in tensors]


def digest_of(inputs: Mapping[str, Array]) -> str:
    """Return the SHA-256 of named arrays: their names, dtypes, shapes and bytes."""
    import numpy as np

    digest = hashlib.sha256()
    for name, value in sorted(inputs.items()):
        digest.update(repr((name, str(value.dtype), value.shape)).encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def check_writable(path: str | Path) -> None:
    """Raise RunError unless a file can be created at `path`."""
    target = Path(path)
    if target.is_dir():
        raise RunError("expected a file's name, found a folder", str(target))
    if not target.parent.is_dir():
        raise RunError("there is no such folder to write in", str(target.parent))
    if not os.access(target.parent, os.W_OK):
        raise RunError("no permission to write in this folder", str(target.parent))


def write_npz(path: str | Path, arrays: Mapping[str, torch.Tensor]) -> None:
    """Write named arrays to an `.npz` file atomically; bfloat16 is written as float32.

    Raises RunError when the file cannot be written.
    """
    import numpy as np
    import torch

    plain = {name: (x.float() if x.dtype == torch.bfloat16 else x).cpu().numpy() for name, x in arrays.items()}
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **plain)  # type: ignore[arg-type]


class atomic_file:
    """Context manager: fill a temporary file, which is renamed to `path` when the block succeeds.

    Raises RunError when it cannot be written; the temporary file is then removed.
    """

    def __init__(self, path: str | Path) -> None:
        self._target = Path(path)

    def __enter__(self) -> Path:
        self._temporary = self._target.with_name(f".{self._target.name}.{secrets.token_hex(6)}")
        try:
            # Created under the umask, unlike a file of `tempfile`: reading the umask means setting it, for all threads.
            os.close(os.open(self._temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except OSError as wrong:
            raise RunError(f"cannot be written: {wrong.strerror}", str(self._target)) from None
        return self._temporary

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is None:
                self._temporary.replace(self._target)
                return
        except OSError as wrong:
            error = wrong
        self._temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise RunError(f"cannot be written: {error.strerror}", str(self._target)) from None


def _cast(name: str, dtype: str) -> str:
    return f"cast it: {name}.astype({dtype!r}) of numpy, {name}.to(torch.{dtype}) of torch"


def _other_shape(tensor: Tensor, value: Array) -> str:
    """Describe a shape mismatch: a program accepts only the shapes of the example that it was compiled with."""
    shape = tuple(value.shape)
    if len(shape) != len(tensor.shape):
        return f"give an array of {len(tensor.shape)} dims, or compile the model again with an example of {shape}"
    return f"pad or cut it to {tensor.shape}, or compile the model again with an example of {shape}"


def _local(tensor: Tensor, manifest: Manifest, value: Array, rank: int) -> torch.Tensor:
    import torch

    part = as_torch(value)
    for dim, pieces in enumerate(local_intervals(tensor, manifest.mesh, rank)):
        if pieces == [(0, tensor.shape[dim])]:
            continue
        if len(pieces) == 1:
            part = part.narrow(dim, pieces[0][0], pieces[0][1] - pieces[0][0])
        elif pieces:
            part = torch.cat([part.narrow(dim, start, stop - start) for start, stop in pieces], dim)
        else:
            part = part.narrow(dim, 0, 0)
    dtype = torch_dtype(tensor.dtype)
    return (part if dtype_name(part.dtype) == tensor.dtype else part.to(dtype)).contiguous()
