"""`distir compile`: call the user's function and compile what it returns, or compile an ONNX file."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from distir_relax.errors import DistIRError, ImportModelError, PlacementError


@dataclass(frozen=True)
class CompileOptions:
    """What `distir compile` is asked. `mesh` is text such as `2x3`, `axes` such as `dp,tp`, both for `shardings`."""

    target: str
    output: Path
    tail: str | None = None
    backends: tuple[str, ...] = ("torch", "tvm")
    shardings: tuple[str, ...] = ()
    mesh: str | None = None
    axes: str | None = None
    ranks: int | None = None
    name: str | None = None
    input_shapes: tuple[str, ...] = ()


def compile_target(options: CompileOptions) -> Path:
    """Compile and write the bundle; its path.

    Raises ImportModelError when the file or the function is missing, raises, or returns something else, and whatever
    compiling and writing raise.
    """
    import distir_relax

    shardings = dict(map(_sharding, options.shardings))
    if options.target.endswith(".onnx"):
        return _compile_onnx(shardings, options)
    file, _, function_name = options.target.rpartition(":")
    if not file or not function_name.isidentifier():
        raise ImportModelError(
            "expected FILE.py:FUNCTION or FILE.onnx", options.target, "for example: examples/mlp.py:build"
        )
    if options.input_shapes:
        raise ImportModelError(
            "--input-shape is for ONNX files", options.target, "the function's example has the shapes"
        )
    module = _load(Path(file))
    function = _find(module, file, function_name)
    made = _call(function, file, options)
    if isinstance(made, distir_relax.Plan):
        given = {"--shard": shardings, "--mesh": options.mesh, "--axes": options.axes}
        unused = [flag for flag, value in given.items() if value]
        taken = inspect.signature(function).parameters
        unused += [f"--{name}" for name in ("tail", "name") if getattr(options, name) is not None and name not in taken]
        if unused:
            raise ImportModelError(
                f"the function returns a finished Plan, to which {', '.join(unused)} cannot be applied", options.target,
                "return (model, example_inputs) instead, or take the option as a parameter")  # fmt: skip
        plan = made
    else:
        plan = _compile(made, shardings, options)
    plan.save(options.output, backends=options.backends)
    return options.output


def _compile(made: Any, shardings: dict[str, str], options: CompileOptions) -> Any:
    import distir_relax

    if isinstance(made, tuple) and len(made) in (2, 3):
        model, example_inputs = made[0], made[1]
        kwargs = made[2] if len(made) == 3 else None
    else:
        raise ImportModelError(
            f"expected a Plan or a tuple (model, example_inputs), found {type(made).__name__}", options.target,
            "end the function with: return model, (x,)")  # fmt: skip
    if not isinstance(example_inputs, tuple | list):
        example_inputs = (example_inputs,)
    given: dict[str, Any] = {"example_inputs": tuple(example_inputs)}
    if kwargs:
        given["example_kwargs"] = dict(kwargs)
    return distir_relax.compile(model, **given, **_common(shardings, options))


def _compile_onnx(shardings: dict[str, str], options: CompileOptions) -> Path:
    import distir_relax

    if options.ranks is not None:
        raise ImportModelError(
            f"--ranks {options.ranks} is for functions", options.target, f"give --mesh {options.ranks} and --shard"
        )
    shapes = dict(map(_input_shape, options.input_shapes))
    plan = distir_relax.compile(options.target, input_shapes=shapes, **_common(shardings, options))
    return plan.save(options.output, backends=options.backends)


def _common(shardings: dict[str, str], options: CompileOptions) -> dict[str, Any]:
    """The arguments of `compile` that any model takes, where they were given."""
    import distir_relax

    given: dict[str, Any] = {}
    if shardings:
        given["shardings"] = shardings
    if options.mesh is not None or options.axes is not None:
        given["mesh"] = distir_relax.DeviceMesh(*_mesh(options.mesh, options.axes))
    if options.tail is not None:
        given["tail"] = options.tail
    if options.name is not None:
        given["name"] = options.name
    return given


def _input_shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, equals, shape = text.rpartition("=")
    sizes = shape.split(",") if shape else []
    if not name or not equals or not all(size.strip().isdecimal() for size in sizes):
        raise ImportModelError(
            "expected NAME=SIZES", f"--input-shape {text}", "for example: --input-shape x=1,3,224,224"
        )
    return name, tuple(map(int, sizes))


def _call(function: Callable[..., Any], file: str, options: CompileOptions) -> Any:
    parameters = inspect.signature(function).parameters
    offered = {"ranks": options.ranks, "tail": options.tail, "name": options.name}
    arguments = {name: value for name, value in offered.items() if value is not None and name in parameters}
    if options.ranks is not None and "ranks" not in parameters:
        raise ImportModelError(
            f"--ranks {options.ranks} was given, but the function has no parameter ranks", options.target,
            f"write def {function.__name__}(ranks=2): ...")  # fmt: skip
    needed = [
        name for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in arguments
    ]  # fmt: skip
    if needed:
        hint = f"give --{needed[0]}" if needed[0] in offered else "give them default values"
        raise ImportModelError(f"the function needs {', '.join(needed)}", options.target, hint)
    return _users_code(lambda: function(**arguments), file, "was called")


def _load(file: Path) -> ModuleType:
    if not file.is_file():
        raise ImportModelError("there is no such file", str(file))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ImportModelError("expected a Python file (.py)", str(file))
    module = importlib.util.module_from_spec(spec)
    # As for a script: the file's neighbours can be imported, and its classes know their module.
    sys.path.insert(0, str(file.resolve().parent))
    sys.modules[file.stem] = module
    loader = spec.loader
    _users_code(lambda: loader.exec_module(module), str(file), "was imported")
    return module


def _find(module: ModuleType, file: str, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if callable(function):
        return function  # type: ignore[no-any-return]
    own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    near = difflib.get_close_matches(name, own, 3) or own[:6]
    problem = "is not a function" if function is not None else "does not exist"
    raise ImportModelError(f"the function {name!r} {problem}", file, f"the file has: {', '.join(near)}" if near else "")


def _users_code(action: Callable[[], Any], file: str, moment: str) -> Any:
    """Run the user's code; what it raises is told with the user's own frames only."""
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
    ours = str(Path(__file__).parent)
    outside = ("site-packages", "dist-packages", f"{sys.base_prefix}/lib", "<frozen")
    return not filename.startswith(ours) and not any(part in filename for part in outside)


def _sharding(text: str) -> tuple[str, str]:
    pattern, equals, placement = text.partition("=")
    if not pattern or not equals or not placement:
        raise PlacementError(
            "expected PATTERN=PLACEMENT", f"--shard {text}", "for example: --shard 'layer.*.weight=S[0]'"
        )
    return pattern, placement


def _mesh(shape_text: str | None, axes_text: str | None) -> tuple[tuple[int, ...], tuple[str, ...]]:
    sizes = (shape_text or "").lower().split("x")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise PlacementError(
            f"expected sizes such as 2 or 2x3, found {shape_text!r}", "--mesh", "--axes names the axes of --mesh"
        )
    shape = tuple(map(int, sizes))
    default = ("tp",) if len(shape) == 1 else tuple(f"axis{i}" for i in range(len(shape)))
    axes = tuple(axes_text.split(",")) if axes_text else default
    if len(axes) != len(shape) or len(set(axes)) != len(axes) or not all(axes):
        raise PlacementError(f"expected {len(shape)} distinct names, found {axes_text!r}", "--axes")
    return shape, axes
