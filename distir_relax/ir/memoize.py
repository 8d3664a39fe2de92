"""Memoize an analysis for the most recent modules: consecutive passes query the same one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import wraps
from operator import is_
from threading import Lock
from typing import Concatenate, ParamSpec, TypeVar

from distir_relax.ir.program import Function, Module

_T = TypeVar("_T")
_P = ParamSpec("_P")


def memoize(
    size: int,
) -> Callable[[Callable[Concatenate[Module, _P], _T]], Callable[Concatenate[Module, _P], _T]]:
    """Return a decorator that caches a function's results for the last `size` modules; results must not be modified.

    A result may depend only on the module's functions and on comparable arguments. Functions are compared by identity,
    so a lookup is cheap.
    """

    def decorate(function: Callable[Concatenate[Module, _P], _T]) -> Callable[Concatenate[Module, _P], _T]:
        cache: deque[tuple[tuple[Function, ...], object, _T]] = deque(maxlen=size)
        lock = Lock()  # models are compiled from several threads; two may compute one result, which is harmless

        @wraps(function)
        def wrapper(module: Module, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
            functions, arguments = module.functions, (args, kwargs)
            with lock:
                entries = tuple(cache)
            for key, options, cached in entries:
                if len(key) == len(functions) and all(map(is_, key, functions)) and options == arguments:
                    return cached
            result = function(module, *args, **kwargs)
            with lock:
                cache.append((functions, arguments, result))
            return result

        return wrapper

    return decorate
