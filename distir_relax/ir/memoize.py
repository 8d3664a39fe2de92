"""What was found of the programs that were asked for last: passes that follow each other ask the same of one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import wraps
from operator import is_
from threading import Lock
from typing import Concatenate, ParamSpec, TypeVar

from distir_relax.ir.program import Function, Module

_Found = TypeVar("_Found")
_Also = ParamSpec("_Also")


def lately(
    most: int,
) -> Callable[[Callable[Concatenate[Module, _Also], _Found]], Callable[Concatenate[Module, _Also], _Found]]:
    """A decorator: what a function found of the last `most` programs is given again, and not to be changed.

    It has to depend on nothing but the functions of a module, and on arguments that can be compared. Programs are known
    by their functions being the same objects: so asking costs nothing.
    """

    def around(find: Callable[Concatenate[Module, _Also], _Found]) -> Callable[Concatenate[Module, _Also], _Found]:
        last: deque[tuple[tuple[Function, ...], object, _Found]] = deque(maxlen=most)
        exclusive = Lock()  # models are compiled from several threads; two may compute one result, which is harmless

        @wraps(find)
        def found(module: Module, /, *args: _Also.args, **kwargs: _Also.kwargs) -> _Found:
            mine, also = module.functions, (args, kwargs)
            with exclusive:
                entries = tuple(last)
            for functions, others, known in entries:
                if len(functions) == len(mine) and all(map(is_, functions, mine)) and others == also:
                    return known
            result = find(module, *args, **kwargs)
            with exclusive:
                last.append((mine, also, result))
            return result

        return found

    return around
