"""Import and call of a user's function in a Python file, with tracebacks limited to the user's frames."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from distir_relax.errors import DistIRError, ImportModelError

_RENAMED = "_user_file_"
_IMPORTED: dict[Path, tuple[tuple[int, int], ModuleType]] = {}
"""Imported files, each with its modification time and size."""


def find_function(target: str) -> Callable[..., Any]:
    """Return the function that ``FILE.py:FUNCTION`` names.

    Raises `ImportModelError` when the target is not of that form, the file or the function is missing, or importing
    the file raises.
    """
    file, _, name = target.rpartition(":")
    if not file or not name.isidentifier():
        raise ImportModelError("expected FILE.py:FUNCTION or FILE.onnx", target, "for example: examples/mlp.py:build")
    return _find(import_file(Path(file)), file, name)


def qualified_name(kind: type) -> str:
    """Return the name of a class with its module's, which for a class of a user's file is the file's stem."""
    return f"{kind.__module__.removeprefix(_RENAMED)}.{kind.__qualname__}"


def call_function(
    function: Callable[..., Any], target: str, offered: Mapping[str, Any], required: Sequence[str] = ()
) -> Any:
    """Call a user's function with those of the `offered` arguments that are not None and that it has parameters for.

    Raises `ImportModelError` when the function does not accept a `required` argument that is not None, when it needs
    others, and when it raises.
    """
    parameters = inspect.signature(function).parameters
    file = target.rpartition(":")[0]
    arguments = {name: value for name, value in offered.items() if value is not None and name in parameters}
    for name in required:
        if offered.get(name) is not None and name not in parameters:
            raise ImportModelError(
                f"--{name.replace('_', '-')} {offered[name]} was given, but the function has no parameter {name}",
                target,
                f"write def {function.__name__}({name}=...): ...",
            )
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in arguments
    ]
    if missing:
        hint = f"give --{missing[0].replace('_', '-')}" if missing[0] in offered else "give them default values"
        raise ImportModelError(f"the function needs {', '.join(missing)}", target, hint)
    return users_code(lambda: function(**arguments), file, "was called")


def import_file(file: Path) -> ModuleType:
    """Import a user's file as if run as a script; an unchanged file is not imported again.

    Raises `ImportModelError` when it is missing or raises.
    """
    if not file.is_file():
        raise ImportModelError("there is no such file", str(file))
    resolved = file.resolve()
    stamp = (resolved.stat().st_mtime_ns, resolved.stat().st_size)
    if resolved in _IMPORTED and _IMPORTED[resolved][0] == stamp:
        return _IMPORTED[resolved][1]
    name = _module_name(file)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportModelError("expected a Python file (.py)", str(file))
    module = importlib.util.module_from_spec(spec)
    # As for a script: modules in the same folder can be imported, and classes know their module.
    if str(resolved.parent) not in sys.path:
        sys.path.insert(_after_standard_library(), str(resolved.parent))
    sys.modules[name] = module
    loader = spec.loader
    users_code(lambda: loader.exec_module(module), str(file), "was imported")
    _IMPORTED[resolved] = stamp, module
    return module


def _module_name(file: Path) -> str:
    """Return the file's stem, or a unique name if a module of that name is installed or loaded (``json.py``)."""
    loaded = sys.modules.get(file.stem)
    if loaded is not None:
        conflicts = getattr(loaded, "__file__", None) != str(file)
    else:
        conflicts = file.stem in sys.stdlib_module_names or importlib.util.find_spec(file.stem) is not None
    return f"{_RENAMED}{file.stem}" if conflicts else file.stem


def _after_standard_library() -> int:
    """Return the position in ``sys.path`` for a user's folder: its files must not shadow standard modules."""
    standard = sysconfig.get_path("stdlib")
    return max(
        (n for n, entry in enumerate(sys.path, 1) if entry.startswith(standard) and "-packages" not in entry), default=0
    )


def _find(module: ModuleType, file: str, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if callable(function):
        return function  # type: ignore[no-any-return]
    own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    near = difflib.get_close_matches(name, own, 3) or own[:6]
    problem = "is not a function" if function is not None else "does not exist"
    raise ImportModelError(f"the function {name!r} {problem}", file, f"the file has: {', '.join(near)}" if near else "")


def users_code(action: Callable[[], Any], file: str, moment: str) -> Any:
    """Run the user's code of a file; `moment` ("was called") is for the error.

    Raises `ImportModelError` for its exceptions, with the user's own frames only.
    """
    try:
        return action()
    except DistIRError:
        raise
    except SyntaxError as wrong:
        raise ImportModelError(f"not a Python program: {wrong.msg}", f"{wrong.filename}:{wrong.lineno}") from None
    except (Exception, SystemExit) as wrong:
        frames = [frame for frame in traceback.extract_tb(wrong.__traceback__) if _is_users(frame.filename)]
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else file
        lines = "".join(traceback.format_list(frames)).rstrip()
        message = f"raised {type(wrong).__name__} when it {moment}: {wrong}"
        raise ImportModelError(f"{message}\n{lines}" if lines else message, place) from None


def _is_users(filename: str) -> bool:
    ours = str(Path(__file__).parent.parent)
    outside = ("site-packages", "dist-packages", f"{sys.base_prefix}/lib", "<frozen")
    return not filename.startswith(ours) and not any(part in filename for part in outside)
