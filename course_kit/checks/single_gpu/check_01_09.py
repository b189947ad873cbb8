"""Check of exercise 01.9: `category`, the purpose of an allocation."""

from __future__ import annotations

from course_lib.single_gpu import profile
from course_lib.single_gpu.profile import Allocation


def check() -> None:
    """Assert the category of allocations with an owner, of both kinds of activations, and of temporary ones."""
    cases = {
        "parameters": Allocation(4, 0.0, owner="parameters", saved=True),
        "gradients": Allocation(4, 0.0, owner="gradients", in_backward=True),
        "optimizer states": Allocation(4, 0.0, owner="optimizer states", outlived_forward=True),
        "activations": Allocation(4, 0.0, saved=True),
        "temporary": Allocation(4, 0.0, in_backward=True, saved=True),
    }
    for name, case in cases.items():
        assert profile.category(case) == name, f"{case} belongs to the {name}, you say {profile.category(case)!r}"
    assert profile.category(Allocation(4, 0.0, outlived_forward=True)) == "activations", (
        "the loss is not saved, but alive when backward begins: an activation"
    )
    assert profile.category(Allocation(4, 0.0, in_backward=True, outlived_forward=True)) == "temporary", (
        "what a backward made is no activation, even if the next backward still finds it alive"
    )
    assert profile.category(Allocation(4, 0.0)) == "temporary", "made and gone within one phase: temporary"
