"""Communication that a dry run simulates, since the other ranks do not exist.

with all_gather_object.simulated_by(mine):      inside, calls of all_gather_object are calls of `mine`
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar

import torch.distributed as dist

P = ParamSpec("P")
R = TypeVar("R")


class Simulatable(Generic[P, R]):
    """A function that communicates, and that `simulated_by` replaces for a while, for all who call it."""

    def __init__(self, function: Callable[P, R]):
        functools.update_wrapper(self, function)
        self.function, self.simulations = function, list[Callable[P, R]]()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        function = self.simulations[-1] if self.simulations else self.function
        return function(*args, **kwargs)

    @contextlib.contextmanager
    def simulated_by(self, simulation: Callable[P, R]) -> Iterator[None]:
        """Call `simulation` in place of the function, inside the context."""
        self.simulations.append(simulation)
        try:
            yield
        finally:
            self.simulations.pop()


@Simulatable
def all_gather_object(object_list: list[Any], obj: Any, group: dist.ProcessGroup | None = None) -> None:
    """Gather a Python object from each rank of a group into object_list, as dist.all_gather_object. Collective."""
    dist.all_gather_object(object_list, obj, group)
