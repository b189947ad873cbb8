"""course_kit.ranks.transfers: a hang's report names what was started and never waited for, by line. CPU, gloo."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from course_kit.ranks import RankError, Ranks, transfers


def left_by(name: str) -> list:
    """What is left over from one transfer, which ends before this does."""
    n, rank = dist.get_world_size(), dist.get_rank()
    x, all_x = torch.ones(4), [torch.empty(4) for _ in range(n)]

    def in_a_ring():
        ring = [dist.P2POp(dist.isend, x, (rank + 1) % n), dist.P2POp(dist.irecv, all_x[0], (rank - 1) % n)]
        for work in dist.batch_isend_irecv(ring):
            work.wait()

    transfers.forget()
    {
        "all_reduce": lambda: dist.all_reduce(x),
        "broadcast": lambda: dist.broadcast(x, 0),
        "all_gather": lambda: dist.all_gather(all_x, x),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(4 * n), torch.ones(4 * n)),
        "reduce": lambda: dist.reduce(x, 0),
        "scatter": lambda: dist.scatter(x, all_x if rank == 0 else None),
        "gather": lambda: dist.gather(x, all_x if rank == 0 else None),
        "objects": lambda: dist.all_gather_object([None] * n, "small"),
        "barrier": lambda: dist.barrier(),
        "send and recv": lambda: dist.send(x, 1) if rank == 0 else dist.recv(x, 0) if rank == 1 else None,
        "batch_isend_irecv": in_a_ring,
        "work.wait": lambda: dist.all_reduce(x, async_op=True).wait(),
        "a future": lambda: dist.all_reduce(x, async_op=True).get_future().wait(),
        "functional": lambda: functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD)),
        "nobody waits": lambda: [dist.all_reduce(x, async_op=True) for _ in range(2)] and dist.barrier(),
    }[name]()
    return transfers.unfinished()


WAITED = "all_reduce broadcast all_gather all_to_all_single reduce scatter gather objects barrier".split()
WAITED += ["send and recv", "batch_isend_irecv", "work.wait", "a future", "functional"]


@pytest.mark.parametrize("name", WAITED)
def test_a_transfer_that_was_waited_for_is_not_listed(ranks, name):
    assert ranks(left_by, name) == [[]] * len(ranks)


def test_a_transfer_that_nobody_waits_for_is_listed_once_per_line(ranks):
    for found in ranks(left_by, "nobody waits"):
        ((function, file, _, count),) = found
        assert (function, file, count) == ("all_reduce", __file__, 2)


def forgets_one() -> None:
    x = torch.zeros(4)
    if dist.get_rank() == 0:
        work = dist.isend(x, 1)  # never waited for
        dist.barrier()
        del work
    elif dist.get_rank() == 1:
        dist.irecv(x, 0).wait()
        dist.recv(x, 0)


def test_a_hang_report_names_them_with_their_lines():
    with Ranks(2, "gloo", timeout_s=3) as two, pytest.raises(RankError) as caught:
        two(forgets_one)
    report, heading = str(caught.value), "Started, and not waited for until then:\n"
    assert "rank 1: in recv, " in report and heading in report
    (line,) = report.partition(heading)[2].splitlines()
    assert line.startswith("  rank 0: isend, started in ") and line.endswith(
        "work = dist.isend(x, 1)  # never waited for"
    )
