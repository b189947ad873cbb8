"""Check of exercise 05.4: the norm of a gradient whose shards are on many ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course_kit.checks.tensor_parallel.memory import AtOnce
from course_kit.typed import world
from course_lib.collectives.traffic import Traffic, count_traffic
from course_lib.zero import shards


def norm_trial(
    group: dist.ProcessGroup, half: dist.ProcessGroup, dtype: torch.dtype
) -> tuple[torch.Tensor, list[int], Traffic, float]:
    """Return the norm of 4 tensors, two sharded over the group, one over half of it, one replicated; which of them have
    changed; what was sent; and the expected norm.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    full = [torch.arange(1.0, 13), torch.full((36,), 0.37), torch.tensor([7.0]), torch.arange(6.0)]
    full = [tensor.to(dtype) for tensor in full]
    parts: list[tuple[torch.Tensor, dist.ProcessGroup | None]] = [
        (tensor.tensor_split(world)[rank], group) for tensor in full[:2]
    ]
    parts += [(full[2] if rank in (0, 2) else full[2][:0], half), (full[3], None)]
    before = [part.clone() for part, _ in parts]
    with count_traffic() as traffic:
        norm = shards.global_norm(parts)
    changed = [i for i, (part, _) in enumerate(parts) if not torch.equal(part, before[i])]
    return norm, changed, traffic, torch.cat(full).float().norm().item()


def norms_on_ranks(*dtypes: torch.dtype) -> list[tuple]:
    """Return the results of norm_trial on this rank, for each dtype."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return [norm_trial(world(), halves[dist.get_rank() // 2], dtype) for dtype in dtypes]


def check() -> None:
    """Assert the norm in float32 and BF16, that nothing changes, what is sent, and that no value is read."""
    from course_kit.ranks import shared

    ranks, dtypes = shared(4), (torch.float32, torch.bfloat16)
    with ranks.within(20):
        outcomes = zip(*ranks(norms_on_ranks, *dtypes), strict=True)
    for dtype, result in zip(dtypes, outcomes, strict=True):
        for rank, (norm, changed, traffic, expected) in enumerate(result):
            where = f"{dtype}, rank {rank}"
            assert not changed, f"{where}: gradient {changed[0]} has changed"
            assert torch.is_tensor(norm) and norm.dtype == torch.float32 and norm.dim() == 0, (
                f"{where}: return a float32 scalar, not {norm!r}"
            )
            assert abs(norm.item() / expected - 1) < 1e-5, (
                f"{where}: the norm is {expected:.4f}, not {norm:.4f}. Squares add up over the ranks of a "
                "tensor's group, norms do not; an unsharded tensor (None) counts once; float32 throughout"
            )
            assert traffic.calls == 2, f"{where}: {traffic.calls} collectives; one for each of two groups is enough"
            assert traffic.bytes <= 10, f"{where}: {traffic.bytes} bytes sent: send one float32 element per group"
    many = [(torch.full((1000,), 0.5, dtype=torch.bfloat16), None)] * 9
    with AtOnce(2 * 9000) as large:
        norm = shards.global_norm([*many])
    assert abs(norm.item() - 0.5 * 9000**0.5) < 1e-3, f"no group at all: the norm is {0.5 * 9000**0.5:.4f}, not {norm}"
    assert not large.most, "it makes a tensor as large as all gradients together: add up the square of each one's norm"
    try:
        shards.global_norm([(torch.ones(3, device="meta"), None)])
    except RuntimeError as error:  # tensors on the meta device have no values to read
        raise AssertionError(f"it reads a value on the host, for which a GPU would have to wait: {error}") from None
