"""PURE: options that do not exist, told with the nearest one that does, as Python 3.13 and later do by themselves."""

import functools
import inspect
from collections.abc import Callable, Set
from difflib import get_close_matches
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


def suggests_options(function: Callable[P, R]) -> Callable[P, R]:
    """Have a function, or a coroutine function, raise ``TypeError`` with a suggestion for an option that it does not have."""
    names = frozenset(inspect.signature(function).parameters) - {"self"}
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def begin(*arguments: Any, **options: Any) -> Any:
            _check(function.__qualname__, options.keys(), names)
            return await function(*arguments, **options)

        return cast(Callable[P, R], begin)

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        _check(function.__qualname__, options.keys(), names)
        return function(*arguments, **options)

    return call


def _check(function: str, options: Set[str], names: frozenset[str]) -> None:
    for wrong in sorted(options - names):
        near = get_close_matches(wrong, sorted(names), 1)
        hint = f". Did you mean {near[0]!r}?" if near else f"; its options are {', '.join(sorted(names))}"
        raise TypeError(f"{function}() got an unexpected keyword argument {wrong!r}{hint}")
