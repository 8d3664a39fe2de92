"""Names for the leaves of a model's arguments and results, and the way to and from a flat dict of tensors.

A leaf is named after its path: argument ``x`` is ``x``, the second item of argument ``pair`` is ``pair_1``, the
item ``"mask"`` of a dict ``options`` is ``options.mask``. A model that returns one tensor returns ``output``; a tuple
gives ``output_0``, ``output_1``, …; a dict or a record gives the names of its fields.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distir_relax.errors import RunError
from distir_relax.frontends.torch.arguments import as_tensor
from distir_relax.support.torch_compat import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    import torch


class CallSignature:
    """The arguments of an example call, by name: which leaves are tensors, and the fixed value of the others.

    `forward` is the model's function; `args` and `kwargs` are the example.
    """

    def __init__(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._signature = inspect.signature(forward)
        self.leaves = self._named_leaves(args, kwargs)
        self._defaults = self._default_leaves(args, kwargs)

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors of a call by input name.

        Arguments may be given by position or by name, and arrays of numpy for tensors. Raises `RunError` for a missing
        or surplus argument, and for an argument that is no tensor and differs from the example, whose value the program
        has built in; one that is left out has its default.
        """
        import torch

        try:
            given = {**self._default_leaves(args, kwargs), **self._named_leaves(args, kwargs)}
        except TypeError as error:
            raise RunError(f"these arguments do not fit the model's forward: {error}") from None
        tensors: dict[str, torch.Tensor] = {}
        for name, example in self.leaves.items():
            if isinstance(example, torch.Tensor):
                if not hasattr(given.get(name), "__array__"):
                    found = f"found {given[name]!r}" if name in given else "found none"
                    raise RunError(
                        f"expected a tensor of torch or numpy for the input {name!r}, {found}",
                        hint=f"the model was compiled with {', '.join(self.leaves)}",
                    )
                tensors[name] = as_tensor(given[name])
            elif name not in given or not _equal(given[name], example):
                found = repr(given[name]) if name in given else "none"
                raise RunError(
                    f"the argument {name!r} was {example!r} when the model was compiled, found {found}",
                    hint="compile the model again with this argument in the example",
                )
        for name in given.keys() - self.leaves.keys():
            if name not in self._defaults or not _equal(given[name], self._defaults[name]):
                default = f", and was {self._defaults[name]!r} by default" if name in self._defaults else ""
                raise RunError(
                    f"the argument {name!r} was not given when the model was compiled{default}; found {given[name]!r}",
                    hint="compile the model again with this argument in the example",
                )
        return tensors

    def positional(self, count: int) -> list[str]:
        """The names of the first `count` arguments given by position."""
        names: list[str] = []
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                names += [f"{name}_{i}" for i in range(count - len(names))]
            elif parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                names.append(name)
        return names[:count]

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of the arguments that may be given by position, in order."""
        inspected = inspect.Parameter
        by_position = (inspected.POSITIONAL_ONLY, inspected.POSITIONAL_OR_KEYWORD)
        return tuple(name for name, p in self._signature.parameters.items() if p.kind in by_position)

    @property
    def constants(self) -> dict[str, Any]:
        """The values of the arguments that are no tensors: the example's, and the defaults of the others."""
        import torch

        given = {**self._defaults, **self.leaves}
        return {name: value for name, value in given.items() if not isinstance(value, torch.Tensor)}

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
        """The leaves of the arguments that a call leaves out, and that have a value all the same."""
        bound = self._signature.bind(*args, **kwargs).arguments
        left_out = [p for p in self._signature.parameters.values() if p.name not in bound]
        return self._leaves_of({p.name: p.default for p in left_out if p.default is not p.empty})


class ResultStructure:
    """The structure of a model's results.

    `spec` is its pytree; `fixed` holds, by leaf name, the leaves that are no tensors (numbers, None).
    """

    def __init__(self, spec: Any, fixed: Mapping[str, Any]) -> None:
        self._spec = spec
        self._fixed = dict(fixed)
        self.names = result_names(spec)

    def rebuild(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Tensors by output name, in the structure that the model returns."""
        return tree_unflatten([self._fixed[n] if n in self._fixed else tensors[n] for n in self.names], self._spec)


def result_names(spec: Any) -> list[str]:
    """The names of the leaves of a result with pytree `spec`."""
    return leaf_names(spec, "output", root=True)


def leaf_names(spec: Any, name: str, root: bool = False) -> list[str]:
    """The names of the leaves of `spec`, in order, below `name`; the fields of a `root` go by their own names."""
    if spec.is_leaf():
        return [name]
    children = spec.children()
    keys: Sequence[str | int] = spec.context if isinstance(spec.context, (list, tuple)) else ()
    if len(keys) != len(children) or not all(isinstance(key, str) for key in keys):
        keys = range(len(children))
    found: list[str] = []
    for key, child in zip(keys, children, strict=True):
        below = f"{name}_{key}" if isinstance(key, int) else key if root else f"{name}.{key}"
        found += leaf_names(child, below)
    return found


def _equal(a: Any, b: Any) -> bool:
    """Whether two arguments that are no tensors are one and the same; a NaN is."""
    import torch

    if type(a) is not type(b) or isinstance(a, torch.Tensor):
        return a is b
    return a is b or bool(a == b) or (isinstance(a, float) and a != a and b != b)
