"""Recomputation in models other than the course's: modules of any kind in an nn.ModuleList."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn


def check_blocks(model: nn.Module) -> None:
    """Raise TypeError for a model whose blocks have no `attention.core`, unlike the course's models, and
    ValueError for blocks that torch.compile has wrapped.
    """
    blocks = getattr(model, "blocks", [None])
    if not all(hasattr(getattr(block, "attention", None), "core") for block in blocks):
        ways = 'apply_recompute(model.layers, "full") works on an nn.ModuleList of any model'
        raise TypeError(f"apply_recompute takes a model with the course's blocks, not {type(model).__name__}; {ways}")
    check_compiled(blocks)


def check_compiled(modules: Iterable[nn.Module]) -> None:
    """Raise ValueError for a module that torch.compile has wrapped: its own `forward` is the compiled one."""
    if any(hasattr(module, "_orig_mod") for module in modules):
        raise ValueError("apply_recompute comes before torch.compile: call it first, then compile the blocks")


def recompute_modules(modules: nn.ModuleList, mode: str, policy: Callable | None, wrap: Callable) -> nn.ModuleList:
    """Apply `apply_recompute` to modules of any kind. wrap(forward, policy) returns what replaces their `forward`.

    Raises ValueError for mode selective without a policy, and for compiled modules.
    """
    if mode == "selective" and policy is None:
        raise ValueError("mode selective of a ModuleList needs a policy, such as keep_matmuls")
    check_compiled(modules)
    for module in modules:
        module.__dict__.pop("forward", None)
        if mode != "none":
            module.forward = wrap(module.forward, policy)
    return modules
