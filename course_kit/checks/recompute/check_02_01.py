"""Check of exercise 02.1: `detached`, nested arguments without their history."""

from __future__ import annotations

import torch

from course_lib.recompute import by_hand


def check() -> None:
    """Assert the nesting, which tensors require a gradient, shared memory, and the originals' history."""
    leaf, fixed = torch.ones(3, requires_grad=True), torch.arange(3)
    source = (leaf * 2, [fixed, {"angle": torch.ones(2), "inner": leaf * 3}], 7)
    copy = by_hand.detached(source)
    assert isinstance(copy, tuple) and len(copy) == 3, "keep the structure: the argument is a tuple of three"
    assert isinstance(copy[1], list) and isinstance(copy[1][1], dict), "go into lists and dictionaries as well"
    assert copy[2] == 7, "what is no tensor stays as it is"
    assert copy[0].is_leaf and copy[0].grad_fn is None, "the tensor still has a history: detach it"
    assert copy[0].requires_grad, "a tensor that required a gradient must require one again"
    inner = copy[1][1]["inner"]
    assert inner.is_leaf and inner.requires_grad, "detach the tensors in lists and dictionaries as well"
    assert not copy[1][0].requires_grad, "integers require no gradient"
    assert not copy[1][1]["angle"].requires_grad, "a tensor that required no gradient must not require one now"
    assert copy[0].data_ptr() == source[0].data_ptr(), "share the memory: detach() copies nothing, clone() does"
    assert by_hand.detached([]) == [] and by_hand.detached({"a": (1, None)}) == {"a": (1, None)}, (
        "arguments may hold no tensor: they come back as they are"
    )
    assert source[0].grad_fn is not None, "the original must keep its history: detach(), not detach_()"
