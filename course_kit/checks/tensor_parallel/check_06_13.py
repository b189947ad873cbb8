"""Check of exercise 06.13: numbers drawn inside and outside of local_rng, again, and after an error."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from course_kit.checks.tensor_parallel.cases import counted
from course_kit.labs.tensor_parallel.models import in_groups
from course_kit.ranks import shared
from course_kit.typed import grad_of
from course_lib.collectives.traffic import count_traffic
from course_lib.tensor_parallel import regions

HASH = hash
INSIDE = "inside", "inside, later", "inside, at once after that"


def drawn(group: dist.ProcessGroup | None, second: torch.Generator) -> dict[str, torch.Tensor]:
    """Numbers of two generators: three times inside, and before, between and after."""

    def draw() -> torch.Tensor:
        return torch.cat([torch.rand(500), torch.rand(500, generator=second)])

    numbers = {"before": draw()}
    with regions.local_rng(group):
        numbers[INSIDE[0]] = draw()
    numbers["between"] = draw()
    with regions.local_rng(group):
        numbers[INSIDE[1]] = draw()
    with regions.local_rng(group):
        numbers[INSIDE[2]] = draw()
    numbers["after"] = draw()
    return numbers


def is_salted(value) -> bool:
    """Return whether hash(value) differs in each new process."""
    return isinstance(value, (str, bytes, memoryview)) or isinstance(value, tuple) and any(map(is_salted, value))


def hash_after_restart(value) -> int:
    """hash(value), as it might be once the kernel and its ranks have been started again."""
    return HASH(value) ^ is_salted(value)


def in_group(group: dist.ProcessGroup) -> torch.Tensor:
    """On a rank: the numbers that it draws inside a region of this group."""
    torch.manual_seed(13)
    with regions.local_rng(group):
        return torch.rand(500)


def randomness_trial(group: dist.ProcessGroup) -> tuple[dict, int]:
    """Return the draws of two generators, the second as a GPU's; again, from the same seeds and with the default group,
    which has the same ranks; once more with other salts of hash(); whether the draws agree after an error and in a
    checkpoint's replay; and the number of collectives.
    """
    second = torch.Generator()
    result: dict[str, Any] = {}
    of_a_gpu: dict[str, Any] = {
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "default_generators": (second,),
    }

    def seed() -> None:
        torch.manual_seed(13)
        second.manual_seed(14)

    with mock.patch.multiple("torch.cuda", **of_a_gpu), count_traffic() as traffic:
        for name, of in (("first", group), ("again", None)):
            seed()
            result[name] = drawn(of, second)
        seed()
        with mock.patch.object(regions, "hash", hash_after_restart, create=True):
            result["restarted"] = drawn(group, second)
        seed()
        torch.cat([torch.rand(500), torch.rand(500, generator=second)])
        with contextlib.suppress(ZeroDivisionError), regions.local_rng(group):
            torch.rand(7)
            raise ZeroDivisionError
        after_error = torch.cat([torch.rand(500), torch.rand(500, generator=second)])
        result["error"] = torch.equal(after_error, result["first"]["between"])
    dropped = nn.Dropout(0.5)

    def core(x: torch.Tensor) -> torch.Tensor:
        with regions.local_rng(group):
            return dropped(x)

    x = torch.ones(400, requires_grad=True)
    out = torch.utils.checkpoint.checkpoint(core, x, use_reentrant=False)
    out.sum().backward()
    result["replay"] = torch.equal(out.detach(), grad_of(x))
    return result, traffic.calls


def alike(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the part of their numbers that two draws have in common, in order."""
    return (a == b).float().mean().item()


def check() -> None:
    """Judge local_rng on 4 ranks."""
    ranks = shared(4)
    with ranks.within(20):
        answers = ranks(in_groups, 4, randomness_trial)
        of_pairs = ranks(in_groups, 2, in_group)
    for rank, (result, calls) in enumerate(answers):
        first = result["first"]
        assert calls == 0, f"rank {rank}: {counted(calls, 'collective')}: none is needed"
        for name in ("before", "between", "after"):
            assert alike(first[name], answers[0][0]["first"][name]) == 1, f"ranks 0 and {rank} draw differently {name}"
        for name in INSIDE:
            for other in range(rank):
                same = alike(first[name], answers[other][0]["first"][name])
                assert same < 0.01, f"ranks {other} and {rank} draw {same:.0%} the same numbers {name}"
        drawn_so_far = list(first.items())
        for i, (name, numbers) in enumerate(drawn_so_far):
            for other, numbers_before in drawn_so_far[:i]:
                assert alike(numbers, numbers_before) < 0.01, f"rank {rank} draws the same numbers {other} and {name}"
            assert alike(numbers, result["again"][name]) == 1, f"rank {rank}: from the same seed, other numbers {name}"
            assert alike(numbers, result["restarted"][name]) == 1, (
                f"rank {rank}: hash() of bytes differs after a restart, as do the numbers drawn {name}: "
                "zlib.crc32 is the same one always"
            )
        assert result["error"], f"rank {rank}: after an error inside, it does not go on as the others do"
        assert alike(of_pairs[rank], of_pairs[rank % 2]) == 1, (
            f"rank {rank}: in groups of 2 it is rank {rank % 2} of its group: take group.rank(), not the one among all"
        )
        assert result["replay"], f"rank {rank}: a checkpoint that runs the region again draws other numbers"
