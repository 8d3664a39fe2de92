"""Grouped products with a stack of weights of 8 or 4 bits, one for each group (`grouped`, `quantized`).

The tensors of the weights have a leading dim of groups. They stand in the place of the matrices: the operands before
and after them are those of ``grouped_matmul`` and ``routed_matmul``.
"""

from __future__ import annotations

from distir_relax.ir import TensorType
from distir_relax.ops.contraction.grouped import PRODUCT_COST, Check, check_bounds, check_ids, split_rows
from distir_relax.ops.contraction.quantized import infer_product, parse_product, weight_text
from distir_relax.ops.table import Attrs, Code, Packed, Routing, Rule, Semantics, Split, Trait, Types, define, operands
from distir_relax.ops.table.entry import Infer, RuleOf


def _of_one_group(types: Types) -> list[TensorType]:
    """Return the operand types of the product with the weight of one group."""
    x, *weight = types[:-2]
    return [x, *(TensorType(t.shape[1:], t.dtype) for t in weight)]


def _infer(check: Check) -> Infer:
    def infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        x, *weight = types[:-2]
        if len(x.shape) != 2 or len({t.shape[:1] for t in weight}) != 1 or not weight[0].shape:
            raise ValueError("expected rows, and a weight for each group")
        check(x.shape[0], weight[0].shape[0], *types[-2:])
        return infer_product(_of_one_group(types), attrs)

    return infer


def _rule(of_last: str) -> RuleOf:
    def rule(types: Types, attrs: Attrs, results: Types) -> Rule:
        weight = weight_text(_of_one_group(types)[1:], "n", "group")
        return parse_product(f"row (g [i]), {weight}, {of_last}, group -> row n", types, results)

    return rule


define(
    "quantized_grouped_matmul",
    Semantics(infer=_infer(check_bounds), torch="quantized.grouped_product({*})", linear=(operands(0),)),
    Split(_rule("group"), expand={"row": split_rows("quantized_grouped_matmul")}, positional=frozenset({"row"})),
    cost=PRODUCT_COST,
    code=Code(relax="quantized.grouped_product({*})"),
    kernels=[Packed("pack_quantized_experts({weights}, dtype=torch.{dtype}, is_sorted=True)", others=2)],
    traits={Trait.ZERO_IF_EMPTY},
)
define(
    "quantized_routed_matmul",
    Semantics(
        infer=_infer(check_ids),
        torch="quantized.routed_product({*})",
        linear=(operands(0),),
        attributes={"count": "the number of groups on all devices"},
    ),
    Split(_rule("row"), routing=Routing.WITHIN),
    cost=PRODUCT_COST,
    code=Code(relax="quantized.routed_product({*})"),
    kernels=[Packed("pack_quantized_experts({weights}, dtype=torch.{dtype}, is_sorted=False)", others=2)],
    traits={Trait.ZERO_IF_EMPTY},
)
