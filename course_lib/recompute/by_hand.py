"""Full recomputation as an autograd function: `recompute(function, *arguments)` keeps only the arguments.

Backward runs the function again, on detached arguments, with the random numbers and the autocast of forward, and goes
back through the small graph that this makes. PyTorch's reentrant checkpoint works the same way; `modes` uses its newer
one, which stops early and asks a policy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten


# exercise 02.1
def detached(arguments):
    """Return the same nested structure with each tensor detached: same memory, same requires_grad, no history.

    Other values and the original tensors do not change.
    """

    def cut(value):
        return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value

    return tree_map(cut, arguments)


# exercise 02.2
class Recompute(torch.autograd.Function):
    """`Recompute.apply(function, spec, *leaves)` is function(*arguments), without keeping what function computes."""

    @staticmethod
    def forward(ctx, function, spec, *leaves):
        ctx.function, ctx.spec, ctx.state = function, spec, random_state(leaves)
        ctx.indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        ctx.others = [None if i in ctx.indices else leaf for i, leaf in enumerate(leaves)]
        ctx.save_for_backward(*(leaves[i] for i in ctx.indices))
        return function(*tree_unflatten(leaves, spec))  # autograd is off in here: no graph, nothing kept

    @staticmethod
    def backward(ctx, *gradients):
        leaves = list(ctx.others)
        for index, tensor in zip(ctx.indices, ctx.saved_tensors, strict=True):
            leaves[index] = tensor
        # leaves: the arguments of forward again, flat. Detach them, run ctx.function, go back through its graph.
        leaves = detached(leaves)
        with replayed(ctx.state), torch.enable_grad():
            outputs = tree_flatten(ctx.function(*tree_unflatten(leaves, ctx.spec)))[0]
        pairs = [(out, gradient) for out, gradient in zip(outputs, gradients, strict=True) if out.requires_grad]
        torch.autograd.backward(*zip(*pairs, strict=True))
        return None, None, *(leaf.grad if isinstance(leaf, torch.Tensor) else None for leaf in leaves)


def recompute(function: Callable, *arguments):
    """Return function(*arguments), of which only the arguments are kept for backward; they may be nested."""
    leaves, spec = tree_flatten(arguments)
    return Recompute.apply(function, spec, *leaves)


def autocast_now(device_type: str) -> dict:
    """Return the arguments of a torch.autocast as it is now."""
    on = torch.is_autocast_enabled(device_type)
    return {"device_type": device_type, "enabled": on, "dtype": torch.get_autocast_dtype(device_type)}


# exercise 02.3
def random_state(tensors: Iterable[object]) -> tuple[torch.Tensor, dict, dict]:
    """Return the state that a forward on `tensors` uses: (CPU generator's state, {GPU: its state}, autocast).

    The GPUs are the devices of the CUDA tensors among `tensors`; `autocast` is what `autocast_now` returns.
    """
    gpus = {t.device for t in tensors if isinstance(t, torch.Tensor) and t.device.type == "cuda"}
    autocast = autocast_now("cuda" if gpus else "cpu")
    return torch.get_rng_state(), {gpu: torch.cuda.get_rng_state(gpu) for gpu in gpus}, autocast


# exercise 02.3
@contextlib.contextmanager
def replayed(state: tuple[torch.Tensor, dict, dict]) -> Iterator[None]:
    """Inside, generators and autocast are as `random_state` found them; afterwards as they were before the `with`.

    They are put back after an error, too.
    """
    cpu_state, gpu_states, autocast = state
    with torch.random.fork_rng(devices=list(gpu_states)), torch.autocast(**autocast):
        torch.set_rng_state(cpu_state)
        for gpu, gpu_state in gpu_states.items():
            torch.cuda.set_rng_state(gpu_state, gpu)
        yield
