"""Module attributes that a model's forward replaces, which a program cannot represent.

`self.count += 1` affects the next call of the model; a program would always have the example's value. Buffers are state
(`distir_relax.frontends.torch.functionalize`). Plain attributes that each call replaces by tensors of one shape, such
as the states of recurrent layers, become buffers during import.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from distir_relax.errors import ImportModelError
from distir_relax.support.torch_compat import private, tree_leaves

if TYPE_CHECKING:
    import torch

_HINT = "keep persistent state in a buffer (self.register_buffer), or take it as an argument and return the new value"

_DEPTH = 6
"""The depth to which plain objects are searched for tensors."""

# torch's recurrent layers collect their parameters again, and those of an export differ.
_COLLECTED = ("_flat_weights", "_flat_weight_refs")


class AttributesReplaced(ImportModelError):
    """A call of a model replaces attributes of its modules; `replaced` has their names, old and new values."""

    def __init__(self, replaced: list[tuple[str, Any, Any]]) -> None:
        name, old, new = next((r for r in replaced if not _becomes_state(*r[1:])), replaced[0])
        super().__init__(
            f"the model replaces its attribute {name!r} while it runs: it was {_brief(old)}, then {_brief(new)}",
            hint=_HINT,
        )
        self.replaced = replaced

    @property
    def is_state(self) -> bool:
        """Whether all are replaced by tensors of the same shape; the initial value may be None."""
        return all(_becomes_state(old, new) for _, old, new in self.replaced)


@contextmanager
def state_buffers(
    model: torch.nn.Module, error: AttributesReplaced, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Inside the context, replaced attributes of `model` are buffers, whose new values a program returns.

    An attribute that is initially None starts with zeros. Raises `error` if the model computes other results from zeros
    than from None.
    """
    import torch

    has_none = any(old is None for _, old, _ in error.replaced)
    before = call_results(model, args, kwargs) if has_none else []
    originals: list[tuple[torch.nn.Module, str, Any]] = []
    hooks: list[Any] = []
    try:
        for path, old, new in error.replaced:
            owner, _, name = path.rpartition(".")
            module = model.get_submodule(owner)
            originals.append((module, name, vars(module).pop(name)))
            data = torch.zeros(new.shape, dtype=new.dtype) if old is None else old.detach()
            module.register_buffer(name, data, persistent=False)
        hooks = _write_back_hooks(model, [(module, name) for module, name, _ in originals])
        after = call_results(model, args, kwargs) if has_none else []
        if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
            raise error
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, name, value in originals:
            module._buffers.pop(name, None)
            module._non_persistent_buffers_set.discard(name)
            vars(module)[name] = value


def _write_back_hooks(model: torch.nn.Module, buffers: Sequence[tuple[torch.nn.Module, str]]) -> list[Any]:
    """Register hooks that copy new values of buffers into the old tensors at the end of a call of `model`.

    `torch.export` captures writes, but loses some tensors that replace a buffer.
    """
    calls: list[list[Any]] = []

    def end(model: torch.nn.Module, args: Any, result: Any) -> None:
        for (module, name), old in zip(buffers, calls.pop(), strict=True):
            new = module._buffers[name]
            if new is not old:
                old.copy_(new)
                module._buffers[name] = old

    return [
        model.register_forward_pre_hook(lambda m, args: calls.append([m._buffers[n] for m, n in buffers])),
        model.register_forward_hook(end),
    ]


def call_results(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Call `model`, and return its result tensors; the model is left unchanged. Empty on the meta device."""
    import torch

    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        return []
    with torch.no_grad(), preserve_attributes(model), torch.random.fork_rng(devices=()):
        leaves = tree_leaves(model(*args, **kwargs))
    return [x.detach().clone() for x in leaves if isinstance(x, torch.Tensor)]


def _becomes_state(old: Any, new: Any) -> bool:
    import torch

    if not isinstance(new, torch.Tensor):
        return False
    is_same_type = isinstance(old, torch.Tensor) and (old.shape, old.dtype) == (new.shape, new.dtype)
    return old is None or (is_same_type and not isinstance(old, torch.nn.Parameter))


@contextmanager
def restored_parameters(model: torch.nn.Module) -> Iterator[None]:
    """Restore the parameters that the model changes within the context; each is copied before the first write to it.

    A copy of all would take as much memory as the model.
    """
    import torch

    plain = (torch.nn.Parameter, torch.Tensor)
    parameters = [p for p in model.parameters() if type(p) in plain and not p.is_meta]
    unwritten: dict[int, list[torch.Tensor]] = {}
    for own in parameters:
        unwritten.setdefault(own.untyped_storage().data_ptr(), []).append(own.detach())
    saved: list[tuple[torch.Tensor, torch.Tensor]] = []
    mode = private("torch.utils._python_dispatch.TorchDispatchMode")

    class Saves(mode):  # type: ignore[misc,valid-type]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._schema.is_mutable:
                for x in tree_leaves((args, kwargs)):
                    place = x.untyped_storage().data_ptr() if type(x) in plain and not x.is_meta else -1
                    saved.extend((parameter, parameter.clone()) for parameter in unwritten.pop(place, ()))
            return func(*args, **(kwargs or {}))

    try:
        with Saves():
            yield
    finally:
        with torch.no_grad():
            for parameter, before in saved:
                parameter.copy_(before)


class ModuleSnapshot:
    """Snapshot of the attributes and buffer data of a model's modules."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._attributes = {
            path: (module, {name: _copy_containers(value) for name, value in vars(module).items()})
            for path, module in model.named_modules()
        }
        tensors = [*model.buffers(), *(tensor for _, tensor in object_tensors(model))]
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore(self) -> None:
        """Restore the attributes of all modules, and the data of buffers and of tensors in plain objects."""
        for module, attributes in self._attributes.values():
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            for name, value in attributes.items():
                _restore(vars(module), name, value)
        self.restore_data()

    def restore_data(self) -> None:
        """Restore the data of buffers, and of tensors in plain objects."""
        for tensor, data in self._tensors:
            if tensor.shape == data.shape and not tensor.is_meta:
                tensor.detach().copy_(data)

    def replaced(self) -> list[tuple[str, Any, Any]]:
        """Return replaced attributes: names, old and new values."""
        return [
            (f"{path}.{name}" if path else name, value, vars(module)[name])
            for path, (module, attributes) in self._attributes.items()
            for name, value in attributes.items()
            if name in vars(module) and _is_user_attribute(name) and not _same(value, vars(module)[name])
        ]

    def added(self) -> list[str]:
        """Return the names of new attributes."""
        return [
            f"{path}.{name}" if path else name
            for path, (module, attributes) in self._attributes.items()
            for name in vars(module)
            if name not in attributes
        ]


def object_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in plain objects, lists and dicts of modules, such as a cache, each once, with their paths."""
    visited: set[int] = set()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if _is_user_attribute(name):
                yield from _tensors_in(value, f"{path}.{name}" if path else name, visited, 0)


def _tensors_in(value: Any, path: str, visited: set[int], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    # Python modules, such as `torch` itself, belong to no model.
    if id(value) in visited or depth > _DEPTH or isinstance(value, (torch.nn.Module, type, ModuleType)):
        return
    visited.add(id(value))
    if isinstance(value, torch.Tensor):
        # Ops cannot write to a tensor whose elements share memory.
        is_strided = value.layout is torch.strided
        if is_strided and not any(stride == 0 and n > 1 for n, stride in zip(value.shape, value.stride(), strict=True)):
            yield path, value
        return
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    elif hasattr(value, "__dict__"):
        parts = vars(value).items()
    for key, item in parts:
        yield from _tensors_in(item, f"{path}.{key}", visited, depth + 1)


@contextmanager
def preserve_attributes(model: torch.nn.Module) -> Iterator[None]:
    """Restore the attributes of `model`'s modules when the context ends."""
    snapshot = ModuleSnapshot(model)
    try:
        yield
    finally:
        snapshot.restore()


@contextmanager
def reject_replaced_attributes(model: torch.nn.Module) -> Iterator[None]:
    """Inside the context, a call of `model` that replaces attributes of its modules raises `AttributesReplaced`."""
    calls: list[ModuleSnapshot] = []

    def end(module: torch.nn.Module, args: Any, result: Any) -> None:
        if replaced := calls.pop().replaced():
            raise AttributesReplaced(replaced)

    # torch.export restores attributes itself when it ends, so check at the end of the call.
    hooks = [
        model.register_forward_pre_hook(lambda module, args: calls.append(ModuleSnapshot(model))),
        model.register_forward_hook(end),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def stateful_call_error(added: list[str]) -> ImportModelError:
    """Return the error for a model whose second call differs from its first, which sets these attributes."""
    return ImportModelError(
        f"the model's second call gives other results than its first, which sets {', '.join(map(repr, added[:4]))}",
        hint=_HINT,
    )


def _is_user_attribute(name: str) -> bool:
    """Return whether an attribute was defined by the model's author, not by torch."""
    return name == "training" or (name not in _attributes_of_torch() and name not in _COLLECTED)


@cache
def _attributes_of_torch() -> frozenset[str]:
    """Return the names of the attributes that torch itself defines."""
    import torch

    return frozenset(vars(torch.nn.Module()))


def _copy_containers(value: Any) -> Any:
    if type(value) is dict:
        return {key: _copy_containers(item) for key, item in value.items()}
    return type(value)(map(_copy_containers, value)) if type(value) in (list, tuple) else value


def _restore(attributes: dict[str, Any], name: str, value: Any) -> None:
    """Restore a value; an existing container is refilled, as other objects may reference it."""
    current = attributes.get(name)
    if type(value) is dict and type(current) is dict:
        current.clear()
        current.update(value)
    elif type(value) is list and type(current) is list:
        current[:] = value
    else:
        attributes[name] = value


def _same(a: Any, b: Any) -> bool:
    import torch

    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, torch.Tensor):
        return False
    if type(a) in (list, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if type(a) is dict:
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    try:
        return bool(a == b) or (a != a and b != b)
    except Exception:  # whatever a comparison in the model's code raises
        return False


def _brief(value: Any) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        return f"a tensor of {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__}"
