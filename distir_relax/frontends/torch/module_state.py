"""The attributes of a model's modules, which its forward may replace: a program has no place for them.

`self.count += 1` is seen by the next call of the model; a program would have the example's value for ever. Buffers are
state (`distir_relax.frontends.torch.functionalize`). Plain attributes that each call replaces by tensors of one shape,
such as the states of recurrent layers, become buffers while the model is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distir_relax.errors import ImportModelError
from distir_relax.support.torch_compat import tree_leaves

if TYPE_CHECKING:
    import torch

_HINT = (
    "keep what lasts from call to call in a buffer (self.register_buffer), or take it as an argument and return what "
    "becomes of it"
)

_DEPTH = 6
"""The depth to which plain objects are searched for tensors."""

# A recurrent layer of torch collects its parameters anew, and those of an export are others.
_COLLECTED = ("_flat_weights", "_flat_weight_refs")


class AttributesReplaced(ImportModelError):
    """A call of a model replaces attributes of its modules: `replaced` are their names, old and new values."""

    def __init__(self, replaced: list[tuple[str, Any, Any]]) -> None:
        name, old, new = next((r for r in replaced if not _becomes_state(*r[1:])), replaced[0])
        super().__init__(
            f"the model replaces its attribute {name!r} while it runs: it was {_brief(old)}, then {_brief(new)}",
            hint=_HINT,
        )
        self.replaced = replaced

    @property
    def is_state(self) -> bool:
        """Whether all are replaced by tensors of the same shape; at first there may be none."""
        return all(_becomes_state(old, new) for _, old, new in self.replaced)


@contextmanager
def state_buffers(
    model: torch.nn.Module, refused: AttributesReplaced, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """While it is open, replaced attributes of `model` are buffers, whose new values a program returns.

    An attribute that is None at first begins with zeros. Raises `refused` where the model computes something else
    from zeros than without the tensor.
    """
    import torch

    missing = any(old is None for _, old, _ in refused.replaced)
    before = results_of(model, args, kwargs) if missing else []
    held: list[tuple[torch.nn.Module, str, Any]] = []
    hooks: list[Any] = []
    try:
        for path, old, new in refused.replaced:
            owner, _, name = path.rpartition(".")
            module = model.get_submodule(owner)
            held.append((module, name, vars(module).pop(name)))
            data = torch.zeros(new.shape, dtype=new.dtype) if old is None else old.detach()
            module.register_buffer(name, data, persistent=False)
        hooks = _writing_back(model, [(module, name) for module, name, _ in held])
        after = results_of(model, args, kwargs) if missing else []
        if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
            raise refused
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, name, value in held:
            module._buffers.pop(name, None)
            module._non_persistent_buffers_set.discard(name)
            vars(module)[name] = value


def _writing_back(model: torch.nn.Module, buffers: Sequence[tuple[torch.nn.Module, str]]) -> list[Any]:
    """Hooks by which a call of `model` ends with new values of buffers written where the old ones were.

    `torch.export` follows writes; of tensors that take a buffer's place it loses some.
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


def results_of(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call of `model` returns; the model is left unchanged. Empty without data."""
    import torch

    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        return []
    with torch.no_grad(), kept(model), torch.random.fork_rng(devices=()):
        found = tree_leaves(model(*args, **kwargs))
    return [x.detach().clone() for x in found if isinstance(x, torch.Tensor)]


def _becomes_state(old: Any, new: Any) -> bool:
    import torch

    if not isinstance(new, torch.Tensor):
        return False
    alike = isinstance(old, torch.Tensor) and (old.shape, old.dtype) == (new.shape, new.dtype)
    return old is None or (alike and not isinstance(old, torch.nn.Parameter))


class Attributes:
    """What the modules of a model hold, at the moment it is made."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._held = {
            path: (module, {name: _copied(value) for name, value in vars(module).items()})
            for path, module in model.named_modules()
        }
        tensors = [*model.buffers(), *(tensor for _, tensor in object_tensors(model))]
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore(self) -> None:
        """Restore the attributes of all modules, and the data of buffers and of tensors in plain objects."""
        for module, held in self._held.values():
            for name in vars(module).keys() - held.keys():
                del vars(module)[name]
            for name, value in held.items():
                _restore(vars(module), name, value)
        self.restore_data()

    def restore_data(self) -> None:
        """Let buffers, and tensors in plain objects, have the data that they had."""
        for tensor, data in self._tensors:
            if tensor.shape == data.shape and not tensor.is_meta:
                tensor.detach().copy_(data)

    def replaced(self) -> list[tuple[str, Any, Any]]:
        """The attributes that hold other things now: their names, what they held and what they hold."""
        return [
            (f"{path}.{name}" if path else name, value, vars(module)[name])
            for path, (module, held) in self._held.items()
            for name, value in held.items()
            if name in vars(module) and _is_own(name) and not _same(value, vars(module)[name])
        ]

    def added(self) -> list[str]:
        """The names of the attributes that there were none of."""
        return [
            f"{path}.{name}" if path else name
            for path, (module, held) in self._held.items()
            for name in vars(module)
            if name not in held
        ]


def object_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that modules hold in plain objects, lists and dicts, such as a cache, each once, with their paths."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if _is_own(name):
                yield from _tensors_in(value, f"{path}.{name}" if path else name, seen, 0)


def _tensors_in(value: Any, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    if id(value) in seen or depth > _DEPTH or isinstance(value, (torch.nn.Module, type)):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        # No op writes to a tensor whose elements share memory.
        plain = value.layout is torch.strided
        if plain and not any(stride == 0 and n > 1 for n, stride in zip(value.shape, value.stride(), strict=True)):
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
        yield from _tensors_in(item, f"{path}.{key}", seen, depth + 1)


@contextmanager
def kept(model: torch.nn.Module) -> Iterator[None]:
    """While it is open, calls of `model` may do what they like; afterwards its modules hold what they did before."""
    before = Attributes(model)
    try:
        yield
    finally:
        before.restore()


@contextmanager
def refusing_replaced(model: torch.nn.Module) -> Iterator[None]:
    """While it is open, a call of `model` that replaces attributes of its modules raises `AttributesReplaced`."""
    calls: list[Attributes] = []

    def end(module: torch.nn.Module, args: Any, result: Any) -> None:
        if replaced := calls.pop().replaced():
            raise AttributesReplaced(replaced)

    # torch.export itself puts attributes back when it is done: what happened is seen at the end of the call.
    hooks = [
        model.register_forward_pre_hook(lambda module, args: calls.append(Attributes(model))),
        model.register_forward_hook(end),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def depends_on(added: list[str]) -> ImportModelError:
    """The error for a model whose second call differs from its first, which has set these attributes."""
    return ImportModelError(
        f"the model's second call gives other results than its first, which sets {', '.join(map(repr, added[:4]))}",
        hint=_HINT,
    )


def _is_own(name: str) -> bool:
    """Whether an attribute is one that the model's author made, not torch."""
    import torch

    return name == "training" or (name not in vars(torch.nn.Module()) and name not in _COLLECTED)


def _copied(value: Any) -> Any:
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value


def _restore(holder: dict[str, Any], name: str, value: Any) -> None:
    """Put a value back; a container that is there still is filled again, as others may hold it too."""
    now = holder.get(name)
    if type(value) is dict and type(now) is dict:
        now.clear()
        now.update(value)
    elif type(value) is list and type(now) is list:
        now[:] = value
    else:
        holder[name] = value


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
