"""The attributes of a model's modules, which its forward may replace: a program has no place for them.

`self.count += 1` is seen by the next call of the model; a program would have the example's value for ever. Buffers are
state, and stay (`distir_relax.frontends.torch.functional`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distir_relax.errors import ImportModelError

if TYPE_CHECKING:
    import torch

_HINT = (
    "keep what lasts from call to call in a buffer (self.register_buffer), or take it as an argument and return what "
    "becomes of it"
)

# A recurrent layer of torch collects its parameters anew, and those of an export are others.
_COLLECTED = ("_flat_weights", "_flat_weight_refs")


class Attributes:
    """What the modules of a model hold, at the moment it is made."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._held = {
            path: (module, {name: _copied(value) for name, value in vars(module).items()})
            for path, module in model.named_modules()
        }
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    def restore(self) -> None:
        """Let the modules hold what they held, buffers with their data."""
        for module, held in self._held.values():
            for name in vars(module).keys() - held.keys():
                del vars(module)[name]
            for name, value in held.items():
                _restore(vars(module), name, value)
        self.restore_data()

    def restore_data(self) -> None:
        """Let the buffers have the data that they had."""
        for buffer, data in self._buffers:
            if buffer.shape == data.shape:
                buffer.detach().copy_(data)

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
    """While it is open, a call of `model` that replaces attributes of its modules raises `ImportModelError`."""
    calls: list[Attributes] = []

    def end(module: torch.nn.Module, args: Any, result: Any) -> None:
        for name, old, new in calls.pop().replaced():
            raise ImportModelError(
                f"the model replaces its attribute {name!r} while it runs: it was {_brief(old)}, then {_brief(new)}",
                hint=_HINT,
            )

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
