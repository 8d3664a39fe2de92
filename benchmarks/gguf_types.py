"""GGUF files whose matrices have another type: ``python benchmarks/gguf_types.py SOURCE.gguf TARGET.gguf Q8_0``.

It needs the package `gguf`. Vectors are float32, as llama.cpp expects; all other fields are copied.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(source: Path, target: Path, kind: str) -> None:
    """Write a file with matrices of the type `kind`, such as F32, BF16, Q8_0 or Q4_0."""
    import gguf
    from gguf import quants

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kinds = field.types
        is_list = kinds[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(name, field.contents(), kinds[0], kinds[-1] if is_list else None)
    wanted = gguf.GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        of_tensor = wanted if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quants.quantize(values, of_tensor), raw_dtype=of_tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
