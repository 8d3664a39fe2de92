"""Names of the leaves of a model's arguments and results, and conversion to and from a flat dict of tensors.

A leaf is named after its path: argument ``x`` is ``x``, the second item of argument ``pair`` is ``pair_1``, the item
``"mask"`` of a dict ``options`` is ``options.mask``. A single result tensor is ``output``; items of a tuple are
``output_0``, ``output_1``, …; items of a dict or a record have the names of its fields.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distir_relax.errors import RunError
from distir_relax.frontends.fixed_inputs import NONE_FIXED, FixedInputs
from distir_relax.frontends.torch.arguments import as_tensor
from distir_relax.support.torch_compat import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    import torch


class CallSignature:
    """The leaves of an example call by name: tensors, and fixed values of other arguments.

    `forward` is the model's function; `args` and `kwargs` are the example, in which the arguments `fixed` have their
    values: a call may omit these.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        fixed: FixedInputs = NONE_FIXED,
    ) -> None:
        self._signature = inspect.signature(forward)
        self._fixed = fixed
        self._example = self._signature.bind(*args, **kwargs).arguments
        self.leaves = self._leaves_of(self._example)
        self._defaults = self._default_leaves(args, kwargs)

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the tensors of a call by input name.

        Arguments may be passed by position or by name, and tensors as numpy arrays; omitted arguments have their
        defaults. Raises `RunError` for a missing or surplus argument, and for a non-tensor argument that differs from
        the example, whose value is compiled into the program.
        """
        import torch

        try:
            args, kwargs = self._with_fixed(args, kwargs)
            leaves = {**self._default_leaves(args, kwargs), **self._named_leaves(args, kwargs)}
        except TypeError as error:
            raise RunError(f"the arguments do not match the model's forward: {error}") from None
        tensors: dict[str, torch.Tensor] = {}
        for name, example in self.leaves.items():
            if name in self._fixed.values:
                continue
            if isinstance(example, torch.Tensor):
                if not hasattr(leaves.get(name), "__array__"):
                    actual = f"found {leaves[name]!r}" if name in leaves else "found none"
                    raise RunError(
                        f"expected a tensor of torch or numpy for the input {name!r}, {actual}",
                        hint=f"the model was compiled with {', '.join(self.leaves)}",
                    )
                tensors[name] = as_tensor(leaves[name])
            elif name not in leaves or not _equal(leaves[name], example):
                actual = repr(leaves[name]) if name in leaves else "none"
                raise RunError(
                    f"the argument {name!r} was {example!r} when the model was compiled, found {actual}",
                    hint="compile the model again with this argument in the example",
                )
        for name in leaves.keys() - self.leaves.keys():
            if name not in self._defaults or not _equal(leaves[name], self._defaults[name]):
                default = f", and was {self._defaults[name]!r} by default" if name in self._defaults else ""
                raise RunError(
                    f"the argument {name!r} was not given when the model was compiled{default}; found {leaves[name]!r}",
                    hint="compile the model again with this argument in the example",
                )
        return tensors

    def _with_fixed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return a call with the example's values of fixed arguments. Raises `RunError` if it passes other values."""
        if not self._fixed.values:
            return args, kwargs
        for name, value in self._signature.bind_partial(*args, **kwargs).arguments.items():
            if name in self._fixed.values:
                self._fixed.check(name, value)
        values = {name: value for name, value in self._example.items() if name in self._fixed.values}
        return self._fixed.bind(self._signature, args, kwargs, values)

    def positional(self, count: int) -> list[str]:
        """Return the names of the first `count` positional arguments."""
        names: list[str] = []
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                names += [f"{name}_{i}" for i in range(count - len(names))]
            elif parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                names.append(name)
        return names[:count]

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by parameter name, without defaults."""
        return dict(self._signature.bind(*args, **kwargs).arguments)

    def leaf_names(self, arguments: Mapping[str, Any]) -> dict[str, list[str]]:
        """Return the names of the leaves of each of these arguments, in the order of their pytree."""
        return {name: list(self._leaves_of({name: value})) for name, value in arguments.items()}

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of the positional arguments, in order."""
        kinds = inspect.Parameter
        by_position = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        return tuple(name for name, p in self._signature.parameters.items() if p.kind in by_position)

    @property
    def constants(self) -> dict[str, Any]:
        """The values of non-tensor arguments: the example's, and the defaults of omitted ones."""
        import torch

        leaves = {**self._defaults, **self.leaves, **self._leaves_of(self._fixed.values)}
        return {name: value for name, value in leaves.items() if not isinstance(value, torch.Tensor)}

    def _named_leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return self._leaves_of(self._signature.bind(*args, **kwargs).arguments)

    def _leaves_of(self, bound: Mapping[str, Any]) -> dict[str, Any]:
        leaves: dict[str, Any] = {}
        for name, value in bound.items():
            variadic = self._signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            for key, item in value.items() if variadic else ((name, value),):
                flat, spec = tree_flatten(item)
                leaves.update(zip(leaf_names(spec, key), flat, strict=True))
        return leaves

    def _default_leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the leaves of omitted arguments that have defaults."""
        bound = self._signature.bind(*args, **kwargs).arguments
        omitted = [p for p in self._signature.parameters.values() if p.name not in bound]
        return self._leaves_of({p.name: p.default for p in omitted if p.default is not p.empty})


class ResultStructure:
    """The structure of a model's results.

    `spec` is its pytree; `fixed` holds the non-tensor leaves (numbers, None) by leaf name.
    """

    def __init__(self, spec: Any, fixed: Mapping[str, Any]) -> None:
        self._spec = spec
        self._fixed = dict(fixed)
        self.names = result_names(spec)

    def rebuild(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Restore the structure of the model's result from tensors by output name."""
        return tree_unflatten([self._fixed[n] if n in self._fixed else tensors[n] for n in self.names], self._spec)


def result_names(spec: Any) -> list[str]:
    """Return the names of the leaves of a result with pytree `spec`."""
    return leaf_names(spec, "output", root=True)


def leaf_names(spec: Any, name: str, root: bool = False) -> list[str]:
    """Return the names of the leaves of `spec`, in order, prefixed by `name`; fields of a `root` have no prefix."""
    if spec.is_leaf():
        return [name]
    children = spec.children()
    keys: Sequence[str | int] = spec.context if isinstance(spec.context, (list, tuple)) else ()
    if len(keys) != len(children) or not all(isinstance(key, str) for key in keys):
        keys = range(len(children))
    names: list[str] = []
    for key, child in zip(keys, children, strict=True):
        child_name = f"{name}_{key}" if isinstance(key, int) else key if root else f"{name}.{key}"
        names += leaf_names(child, child_name)
    return names


def _equal(a: Any, b: Any) -> bool:
    """Return whether two non-tensor arguments are equal; NaN equals NaN."""
    import torch

    if type(a) is not type(b) or isinstance(a, torch.Tensor):
        return a is b
    return a is b or bool(a == b) or (isinstance(a, float) and a != a and b != b)
