"""Check of exercise 06.1: x · weightᵀ by columns and by rows, from an N-th of the multiplications on each rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course_kit.checks.tensor_parallel.cases import CLOSE, all_cases, in_case
from course_kit.checks.tensor_parallel.diary import Diary
from course_kit.labs.tensor_parallel.models import in_groups, relative_error
from course_kit.ranks import shared
from course_lib.collectives.traffic import Traffic, count_traffic
from course_lib.tensor_parallel import by_hand

WAYS = {"columns": [{"all_gather"}], "rows": [{"all_reduce"}, {"reduce_scatter", "all_gather"}]}


def matmul_trial(
    group: dist.ProcessGroup, how: str, dtype: torch.dtype
) -> tuple[float, set[torch.dtype], int, Traffic]:
    """Return the error, the dtypes of the result and of the matmuls, the multiplications, the traffic by collective."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(rows, 16, generator=generator).to(dtype) for rows in (6, 24))
    copies = x.clone(), weight.clone()
    with in_case(f"{how}, {dtype}"), count_traffic() as traffic, Diary() as diary:
        got = by_hand.split_matmul(x, weight, how, group)
    assert torch.equal(x, copies[0]) and torch.equal(weight, copies[1]), "leave x and weight as they are"
    return relative_error(got, x @ weight.t()), {got.dtype, *diary.dtypes}, diary.total("matmul"), traffic


def check() -> None:
    """Judge split_matmul on 2 and 4 ranks, in float32 and BF16."""
    ranks = shared(4)
    with ranks.within(20):
        for n, dtype in ((2, torch.float32), (4, torch.bfloat16)):
            trials = ranks(in_groups, n, all_cases, matmul_trial, [(how, dtype) for how in WAYS])
            for rank, result in enumerate(trials):
                for (how, ways), (error, dtypes, multiplied, traffic) in zip(WAYS.items(), result, strict=True):
                    where = f"{how}, {n} ranks, rank {rank}, {dtype}"
                    assert error < CLOSE[dtype], f"{where}: not the full x times the transpose of weight"
                    assert dtypes == {dtype}, (
                        f"{where}: the result and the matmuls are in {dtypes}: keep the dtype of x"
                    )
                    assert multiplied == 6 * 16 * 24 // n, (
                        f"{where}: {multiplied} multiplications; a rank's share of them is {6 * 16 * 24 // n}"
                    )
                    bytes_sent = {record.collective for record in traffic.records}
                    wanted = " or ".join(map(" and ".join, ways))
                    assert bytes_sent in ways, (
                        f"{where}: you send by {' and '.join(bytes_sent) or 'nothing'}; send by {wanted}"
                    )
                    enough = (1 + (how == "rows")) * 6 * 24 * dtype.itemsize * (n - 1) // n
                    assert traffic.bytes == enough, f"{where}: {traffic.bytes} bytes sent, {enough} are enough"
