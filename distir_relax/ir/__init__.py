"""What a program is: types, ops, functions, their text form, and the rules they obey."""

from distir_relax.ir.inline import (
    Inline,
    Instance,
    called_first,
    inline,
    on_devices,
    verify_no_recursion,
    written_out,
)
from distir_relax.ir.kinds import Kinds, held_size, kinds_of, local_type, mesh_kinds
from distir_relax.ir.location import inside, place, within
from distir_relax.ir.parser import parse
from distir_relax.ir.passes import Pass, name_of, print_pass
from distir_relax.ir.printer import print_attribute, print_function, print_module, print_op
from distir_relax.ir.program import (
    CALL,
    STAGES,
    WAIT,
    Attribute,
    Function,
    Input,
    Module,
    Op,
    Output,
    Value,
    fresh_name,
)
from distir_relax.ir.records import Gather, Reason, Record, parse_records, print_records
from distir_relax.ir.tidy import without_unused_outputs
from distir_relax.ir.types import (
    DTensorType,
    PerRank,
    PlacedType,
    Size,
    TensorType,
    Type,
    Untyped,
    at_rank,
    per_rank,
    print_devices,
)
from distir_relax.ir.uses import count_uses, live_ops, makers
from distir_relax.ir.verify import verify, verify_placements

__all__ = [
    "CALL",
    "STAGES",
    "WAIT",
    "Attribute",
    "DTensorType",
    "Function",
    "Gather",
    "Inline",
    "Input",
    "Instance",
    "Kinds",
    "Module",
    "Op",
    "Output",
    "Pass",
    "PerRank",
    "PlacedType",
    "Reason",
    "Record",
    "Size",
    "TensorType",
    "Type",
    "Untyped",
    "Value",
    "at_rank",
    "called_first",
    "count_uses",
    "fresh_name",
    "held_size",
    "inline",
    "inside",
    "kinds_of",
    "live_ops",
    "local_type",
    "makers",
    "mesh_kinds",
    "name_of",
    "on_devices",
    "parse",
    "parse_records",
    "per_rank",
    "place",
    "print_attribute",
    "print_devices",
    "print_function",
    "print_module",
    "print_op",
    "print_pass",
    "print_records",
    "verify",
    "verify_no_recursion",
    "verify_placements",
    "within",
    "without_unused_outputs",
    "written_out",
]
