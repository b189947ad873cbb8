"""Check of exercise 04.10: `find_diverged_params` names the tensors that differ between ranks, and sends 16 bytes for
each tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from course_kit.checks.data_parallel.comparing import in_group
from course_kit.checks.data_parallel.watched import Largest
from course_lib.collectives.traffic import Traffic
from course_lib.data_parallel import replicas

NAN = float("nan")


def put(position: int, value: float) -> Callable[[torch.Tensor], None]:
    """Return a function that puts a value in a place."""
    return lambda values: values.__setitem__(position, value)


def swap(i: int, j: int) -> Callable[[torch.Tensor], None]:
    """Return a function that exchanges two elements."""
    return lambda values: values.__setitem__([i, j], values[[j, i]])


CHANGES = {  # of values -3, -2, -1, 0, 1, 2, 3, -3 and so on; rank (number of the change) % 4 makes it
    "neighbors_exchanged": swap(0, 1),
    "exchanged_1000_apart": swap(3, 1003),
    "exchanged_between_chunks": swap(1, 2**20 + 1),
    "last_of_three_chunks": put(2**21 + 5, 1.0),
    "last_bit_of_float32": put(4, 1 + 2**-23),
    "last_bit_of_float64": put(4, 1 + 2**-52),
    "transposed": put(5, 6.0),
    "small_beside_large": put(1, -2 + 2**-6),
    "one_more": put(2, 0),
    "beside_a_nan_of_all": put(1, 5),
    "nan_for_0": put(3, NAN),
    "minus_0_for_0": put(3, -0.0),
    "buffer": put(3, 0.5),
    "buffer_not_saved": put(1, True),
}
DTYPES = {"last_bit_of_float32": torch.float32, "last_bit_of_float64": torch.float64}  # of the others: bfloat16


def altered_trial(group: dist.ProcessGroup | None) -> tuple[list[str], Traffic, int, bool, int]:
    """Return the names found, the traffic, the bytes of the largest tensor made, whether the module is as before, and
    its number of tensors. One rank has altered each tensor, which is named after the change.
    """
    module = nn.Module()
    for number, (name, change) in enumerate({**CHANGES, "same": None, "nan_of_all": None}.items()):
        numel = 2**21 + 8 if "chunks" in name else 2000
        values = torch.zeros(numel, dtype=DTYPES.get(name, torch.bfloat16))
        values[:2000] = torch.arange(2000) % 7 - 3
        values[0] = {"small_beside_large": 2**20, "beside_a_nan_of_all": NAN, "nan_of_all": NAN}.get(name, -3)
        values = values > 0 if name == "buffer_not_saved" else values
        if change and dist.get_rank() == number % 4:
            change(values)
        if "buffer" in name:
            module.register_buffer(name, values, persistent="not_saved" not in name)
        else:
            rows = values.view(4, -1)
            module.register_parameter(name, nn.Parameter(rows.t() if name == "transposed" else rows))
    module.register_buffer("count", torch.tensor(7))
    tensors = [*module.parameters(), *module.buffers()]
    before, watched = [tensor.detach().clone() for tensor in tensors], Largest()
    with watched as traffic:
        result = replicas.find_diverged_params(module, group)
    same = all(torch.equal(b.nan_to_num(), t.nan_to_num()) for b, t in zip(before, tensors, strict=True))
    return result, traffic, watched.largest, same, len(tensors)


def check() -> None:
    """Assert the names on 3 and on 4 ranks, the bytes sent and the size of copies."""
    from course_kit.ranks import shared

    with shared(4).within(20):
        for n in (3, 4):
            expected = {name for number, name in enumerate(CHANGES) if number % 4 >= 4 - n}
            for rank, (result, traffic, largest, same, tensors) in enumerate(in_group(n, altered_trial), start=4 - n):
                assert isinstance(result, list), "return a list of names"
                assert {record.group for record in traffic.records} <= {tuple(range(4 - n, 4))}, (
                    "communicate within `group` alone"
                )
                missed, wrong = sorted(expected - set(result)), sorted(set(result) - expected)
                assert not missed, (
                    f"rank {rank} does not find {missed}. Has each bit a weight of its own, in each dtype and chunk?"
                )
                assert not wrong, f"rank {rank} finds {wrong}, which are the same on all ranks of the group"
                assert len(result) == len(expected), f"rank {rank} names a tensor twice: {result}"
                received = (
                    traffic.bytes / (2 * (n - 1) / n) if traffic.select("all_reduce").calls else traffic.bytes / (n - 1)
                )
                assert received <= 16 * tensors, (
                    f"rank {rank} shares {received:,.0f} bytes; 16 for each of {tensors} tensors are enough"
                )
                assert largest <= 8 * 2**20, f"you make a tensor of {largest:,} bytes: go in chunks of 2**20 elements"
                assert same, "the check must not change the model"
