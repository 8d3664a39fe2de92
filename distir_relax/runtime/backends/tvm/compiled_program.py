"""Compiled rank programs, and their form on disk: bytecode, and the machine code of kernels.

Files load without TVM's Python modules, whose import takes a second.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from distir_relax.runtime.backends.tvm.machine_code import MachineCode, load_library

_CHECKSUM_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Compiled:
    """A program's `main`: bytecode, and its kernels, or none.

    `preparation` is the text of a Python module with ``prepare(comm, weights)``, if there is anything to prepare.
    `arguments` are the names of what `main` takes, inputs and weights, in order, and `packed` those of the packed
    weights that it calls, by number. The first `outputs` results are the program's. `steps` describes each step number;
    `calls` names the communicator's methods; `sizes` names those in the shape that is the last argument of `main`, if
    there are any.
    """

    bytecode: bytes
    kernels: MachineCode | None
    preparation: str
    arguments: tuple[str, ...]
    packed: tuple[str, ...]
    outputs: int
    steps: dict[int, str | list[str]]
    calls: frozenset[str]
    sizes: tuple[str, ...] = ()

    @cached_property
    def executable(self) -> Any:
        """The executable, which ranks of a process share."""
        import tvm_ffi

        load_library()
        executable = tvm_ffi.get_global_func("ffi.Module.load_from_bytes.relax.VMExecutable")(self.bytecode)
        if self.kernels is not None:
            executable.import_module(self.kernels.load(keep=False))
        return executable

    def to_bytes(self) -> bytes:
        """Return the content of a file: a checksum, and compressed JSON."""
        kernels = None if self.kernels is None else (self.kernels.suffix, _encoded(self.kernels.content))
        fields = {
            **asdict(self), "bytecode": _encoded(self.bytecode), "kernels": kernels, "calls": sorted(self.calls)
        }  # fmt: skip
        content = zlib.compress(json.dumps(fields).encode(), 1)
        return hashlib.sha256(content).digest() + content

    @classmethod
    def from_bytes(cls, content: bytes) -> Compiled:
        """Return the program of a file. Raises ValueError if it was damaged."""
        checksum, content = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
        if hashlib.sha256(content).digest() != checksum:
            raise ValueError("not a compiled program, or a part of one")
        fields = json.loads(zlib.decompress(content))
        kernels = fields["kernels"]
        return cls(
            bytecode=base64.b64decode(fields["bytecode"]),
            kernels=None if kernels is None else MachineCode(kernels[0], base64.b64decode(kernels[1])),
            preparation=fields["preparation"],
            arguments=tuple(fields["arguments"]),
            packed=tuple(fields["packed"]),
            outputs=fields["outputs"],
            steps={int(step): what for step, what in fields["steps"].items()},
            calls=frozenset(fields["calls"]),
            sizes=tuple(fields["sizes"]),
        )


def _encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()
