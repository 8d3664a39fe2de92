"""Ops that lay tensors out, and ops in which devices take part together.

Global and sharded stages
    ``annotate_sharding(x) {placements}``   the user's mark on a value; the value itself is unchanged
    ``redistribute(x) {placements}``        the same global tensor in another layout

Distributed and ranked stages, along a mesh axis of n devices (`sizes` lists a size for each index along it)::

    all_reduce       [a]   [b]     =>  [a+b]  [a+b]
    all_gather       [A]   [B]     =>  [A,B]  [A,B]
    reduce_scatter   [a,b] [c,d]   =>  [a+c]  [b+d]
    all_to_all       [A,B] [C,D]   =>  [A;C]  [B;D]
    resplit          [A,B,C] [D]   =>  [A]    [B,C,D]  between two cuts of one dim: pieces[i][j] go from i to j
    shard            [A,B] [A,B]   =>  [A]    [B]       no communication
    shard_start                    =>  0      len(A)    the position of the first element
    slices           [A,B,C]       =>  [A,C]            several stretches of one dim, in the order given
    pad_tail         [A]           =>  [A,0]            local: fills a short shard up
    trim_tail        [A,0]         =>  [A]              local: takes the filling off again

Between devices (each device of the operand's set sends to the one at the same place in the result's set)::

    send             [A]  .        =>  .    [A]         on its rank, `send` to a `peer`, or `recv` from one
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distir_relax.ir import TensorType
from distir_relax.ops.registry import Attrs, Cost, Types, define, operands
from distir_relax.ops.rule import Rule, parse_rule


def _same(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (types[0],)


def _identity_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    return parse_rule("... -> ...", [types[0].shape], [results[0].shape])


def no_rule(types: Types, attrs: Attrs, results: Types) -> Rule:
    """For ops that stand in distributed programs only: raises NotImplementedError."""
    raise NotImplementedError("ops of the distributed stage are split already")


def _resized(t: TensorType, dim: int, size: int) -> TensorType:
    return TensorType((*t.shape[:dim], size, *t.shape[dim + 1 :]), t.dtype)


_FREE: dict[str, Any] = {"flops": lambda types, attrs, results: 0.0}

for _name, _role in (("annotate_sharding", "annotation"), ("redistribute", "redistribution")):
    define(_name, infer=_same, rule=_identity_rule, torch="{0}", linear=(operands(0),), role=_role, **_FREE)

define(
    "all_reduce",
    infer=_same,
    rule=no_rule,
    torch="comm.all_reduce({0}, {axis}, {op}, step={step})",
    together=lambda parts, attrs: [_reduced(parts, attrs["op"]).clone() for _ in parts],
    on_communicator=True,
    communicates=True,
    cost=Cost(collective="all_reduce"),
)
define(
    "all_gather",
    infer=lambda types, attrs: (_resized(types[0], attrs["dim"], sum(attrs["sizes"])),),
    rule=no_rule,
    torch="comm.all_gather({0}, {axis}, {dim}, {sizes}, step={step})",
    together=lambda parts, attrs: [_joined(parts, attrs["dim"]) for _ in parts],
    on_communicator=True,
    communicates=True,
    cost=Cost(collective="all_gather"),
    **_FREE,
)


def _mine(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    if types[0].shape[attrs["dim"]] != sum(attrs["sizes"]):
        raise ValueError(f"sizes {attrs['sizes']} do not add up to dim {attrs['dim']} of {types[0].shape}")
    return (_resized(types[0], attrs["dim"], attrs["size"]),)


define(
    "reduce_scatter",
    infer=_mine,
    rule=no_rule,
    torch="comm.reduce_scatter({0}, {axis}, {dim}, {sizes}, {op}, step={step})",
    together=lambda parts, attrs: list(_reduced(parts, attrs["op"]).split(attrs["sizes"], attrs["dim"])),
    on_communicator=True,
    communicates=True,
    cost=Cost(collective="reduce_scatter"),
)
define(
    "shard",
    infer=_mine,
    rule=no_rule,
    torch="comm.shard({0}, {axis}, {dim}, {sizes})",
    together=lambda parts, attrs: [x.split(attrs["sizes"], attrs["dim"])[i] for i, x in enumerate(parts)],
    on_communicator=True,
    cost=Cost(view=True),
    **_FREE,
)
define(
    "all_to_all",
    infer=lambda types, attrs: (
        _resized(
            _resized(types[0], attrs["split_dim"], attrs["size"]), attrs["concat_dim"], sum(attrs["concat_sizes"])
        ),
    ),
    rule=no_rule,
    torch="comm.all_to_all({0}, {axis}, {split_dim}, {split_sizes}, {concat_dim}, {concat_sizes}, step={step})",
    together=lambda parts, attrs: [
        _joined([x.split(attrs["split_sizes"], attrs["split_dim"])[i] for x in parts], attrs["concat_dim"])
        for i in range(len(parts))
    ],
    on_communicator=True,
    communicates=True,
    cost=Cost(collective="all_to_all", pieces=lambda attrs, i: attrs["split_sizes"]),
    **_FREE,
)
define(
    "resplit",
    infer=lambda types, attrs: (_resized(types[0], attrs["dim"], attrs["size"]),),
    rule=no_rule,
    torch="comm.resplit({0}, {axis}, {dim}, {pieces}, step={step})",
    together=lambda parts, attrs: [
        _joined([x.split(row, attrs["dim"])[i] for x, row in zip(parts, attrs["pieces"], strict=True)], attrs["dim"])
        for i in range(len(parts))
    ],
    on_communicator=True,
    communicates=True,
    cost=Cost(collective="all_to_all", pieces=lambda attrs, i: attrs["pieces"][i]),
    **_FREE,
)
define(
    "shard_start",
    infer=lambda types, attrs: (TensorType((), attrs["dtype"]),),
    rule=no_rule,
    torch="comm.shard_start({axis}, {sizes}, {dtype})",
    together=lambda parts, attrs: _starts(attrs),
    on_communicator=True,
    **_FREE,
)


def _infer_send(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    # A rank that has sent holds nothing of the result; an op has a result all the same.
    return (TensorType((0,), types[0].dtype) if "peer" in attrs else types[0],)


define(
    "send",
    infer=_infer_send,
    rule=no_rule,
    torch="comm.send({0}, {peer}, step={step})",
    role="transfer",
    on_communicator=True,
    communicates=True,
    cost=Cost(collective="send"),
    **_FREE,
)
define(
    "recv",
    infer=lambda types, attrs: (TensorType(attrs["shape"], attrs["dtype"]),),
    rule=no_rule,
    torch="comm.recv({shape}, {dtype}, {peer}, step={step})",
    on_communicator=True,
    communicates=True,
    cost=Cost(collective="send"),
    **_FREE,
)


def _infer_slices(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (_resized(types[0], attrs["dim"], sum(b - a for a, b in attrs["intervals"])),)


def _stretches(attrs: Attrs, form: str) -> list[str]:
    return [form.format(a=a, b=b, dim=attrs["dim"]) for a, b in attrs["intervals"]]


define(
    "slices",
    infer=_infer_slices,
    rule=no_rule,
    torch=lambda attrs: (
        "torch.cat(["
        + ", ".join(_stretches(attrs, "{{{{0}}}}[{p}{{a}}:{{b}}]".format(p=":, " * attrs["dim"])))
        + "], {dim})"
    ),
    relax=lambda attrs: (
        "R.concat([" + ", ".join(_stretches(attrs, "R.strided_slice({{0}}, ({dim},), ({a},), ({b},))")) + "], {dim})"
    ),
    **_FREE,
)


def _tail(attrs: Attrs, have: str) -> int:
    return int(attrs["blocks"] * attrs[have])


def _torch_pad(attrs: Attrs) -> str:
    rank, dim, blocks, size = attrs["rank"], attrs["dim"], attrs["blocks"], attrs["size"]
    widths = (0, 0) * (rank - 1 - dim) + (0, attrs["padded"] - size)
    inner = "{0}" if blocks == 1 else f"{{0}}.unflatten({dim}, ({blocks}, {size}))"
    padded = f"F.pad({inner}, {widths}, value={{value}})"
    return padded if blocks == 1 else f"{padded}.flatten({dim}, {dim + 1})"


def _torch_trim(attrs: Attrs) -> str:
    dim, blocks = attrs["dim"], attrs["blocks"]
    if blocks == 1:
        return f"{{0}}[{':, ' * dim}:{attrs['size']}]"
    narrowed = f"{{0}}.unflatten({dim}, ({blocks}, {attrs['padded']}))[{':, ' * (dim + 1)}:{attrs['size']}]"
    return f"{narrowed}.flatten({dim}, {dim + 1})"


def _relax_tail(attrs: Attrs, pad: bool) -> str:
    shape, dim, blocks = tuple(attrs["shape"]), attrs["dim"], attrs["blocks"]
    have, want = (attrs["size"], attrs["padded"]) if pad else (attrs["padded"], attrs["size"])
    if pad and (blocks == 1 or have == 0):
        # R.reshape takes a dim of 0 for "as it was", so a shard without elements is padded as it is.
        widths = [0, 0] * dim + [0, blocks * (want - have)] + [0, 0] * (len(shape) - dim - 1)
        return f'R.nn.pad({{0}}, {widths!r}, "constant", {{value}})'
    opened = f"R.reshape({{0}}, {(*shape[:dim], blocks, have, *shape[dim + 1 :])!r})"
    if pad:
        widths = [0, 0] * (dim + 1) + [0, want - have] + [0, 0] * (len(shape) - dim - 1)
        changed = f'R.nn.pad({opened}, {widths!r}, "constant", {{value}})'
    else:
        changed = f"R.strided_slice({opened}, ({dim + 1},), (0,), ({want},))"
    return f"R.reshape({changed}, {(*shape[:dim], blocks * want, *shape[dim + 1 :])!r})"


define(
    "pad_tail",
    infer=lambda types, attrs: (_resized(types[0], attrs["dim"], _tail(attrs, "padded")),),
    rule=no_rule,
    torch=_torch_pad,
    relax=lambda attrs: _relax_tail(attrs, pad=True),
    trivial=True,
    **_FREE,
)
define(
    "trim_tail",
    infer=lambda types, attrs: (_resized(types[0], attrs["dim"], _tail(attrs, "size")),),
    rule=no_rule,
    torch=_torch_trim,
    relax=lambda attrs: _relax_tail(attrs, pad=False),
    trivial=True,
    **_FREE,
)


def _reduced(parts: Sequence[Any], op: str) -> Any:
    import torch

    stacked = torch.stack(list(parts))
    if op == "sum":
        return stacked.sum(0, dtype=stacked.dtype)
    return stacked.mean(0) if op == "mean" else stacked.amax(0) if op == "max" else stacked.amin(0)


def _joined(parts: Sequence[Any], dim: int) -> Any:
    import torch

    return torch.cat(list(parts), dim)


def _starts(attrs: Attrs) -> list[Any]:
    import torch

    dtype = getattr(torch, attrs["dtype"])
    return [torch.tensor(sum(attrs["sizes"][:i]), dtype=dtype) for i in range(len(attrs["sizes"]))]
