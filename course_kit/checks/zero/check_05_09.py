"""Check of exercise 05.9: a unit's values are gathered, freed, and gathered again for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from course_kit.checks.watchers import SizesFit
from course_kit.checks.zero.comparing import noted_waits, results_of
from course_kit.labs.zero import storage_bytes
from course_kit.typed import override
from course_lib.collectives.traffic import Traffic, count_traffic
from course_lib.zero.sharded_parameters import Encoding, GatheredBuffer
from course_lib.zero.shards import FlatLayout


def as_bytes(shard: torch.Tensor) -> torch.Tensor:
    """Encode a shard as the bytes of its BF16 values, as an FP8 encoding would."""
    return shard.bfloat16().view(torch.uint8)


def from_bytes(payloads: torch.Tensor, out: torch.Tensor) -> None:
    """Decode what as_bytes has encoded."""
    out.copy_(payloads.view(torch.bfloat16))


def as_bf16(shard: torch.Tensor) -> torch.Tensor:
    """Encode a shard as its BF16 values, in that dtype."""
    return shard.bfloat16()


def from_bf16(payloads: torch.Tensor, out: torch.Tensor) -> None:
    """Decode what as_bf16 has encoded."""
    out.copy_(payloads)


HALF, ROUNDED = Encoding(as_bytes, from_bytes), Encoding(as_bf16, from_bf16)
CASES = (
    (4, torch.float32, None),
    (3, torch.bfloat16, None),
    (4, torch.float32, HALF),
    (2, torch.float32, ROUNDED),
)  # ranks, dtype, encoding


class UnderWay:
    """A work that notes how many bytes there are to write to when it is waited for."""

    def __init__(self, size: Callable[[], int]):
        self.size = size
        self.waited: list = []

    def wait(self) -> None:
        """Note the size."""
        self.waited.append(self.size())


def gather_trial(group: dist.ProcessGroup, dtype: torch.dtype, encoding: Encoding | None) -> tuple[dict, Traffic, int]:
    """Gather and free a unit as in a step. Return its memory, waits, values and gradients, the traffic, and the
    elements that other ranks have.
    """
    world = dist.get_world_size(group)
    full = torch.arange(30.0).view(5, 6) / 8
    layout = FlatLayout([full], group)
    shard = layout.shard_of([full])
    buffer = GatheredBuffer(layout, shard, dtype, encoding)
    weight = nn.Parameter(layout.views(buffer.values.data)[0])

    def size() -> int:
        return weight.untyped_storage().nbytes()

    def retained() -> int:
        tensors = [weight, *(t for t in vars(buffer).values() if torch.is_tensor(t)), shard]
        return storage_bytes(tensors) - shard.nbytes

    buffer.free()
    left = [retained()]
    result: dict[str, Any] = {"expected": full.to(dtype), "left": left}
    with SizesFit(), count_traffic() as traffic, noted_waits() as waits:
        buffer.gather()
        result["waits in gather"], result["size"], result["enough"] = len(waits), size(), buffer.nbytes
        buffer.gather()
        result["work"], result["gathered"] = buffer.work is not None, buffer.gathered
        assert encoding is None or buffer.payloads is not None, "wait() wants to decode self.payloads: gather those"
        buffer.wait()
        result["values"] = weight.detach().clone() if size() else torch.empty(0)
        x = torch.ones(2, 5, dtype=dtype, requires_grad=True)
        out = (x @ weight).square().sum() if size() else x.sum()
        buffer.free()
        left.append(retained())
        buffer.gather()
        buffer.wait()
        result["size again"] = size()
        if size():
            out.backward()
        buffer.free()
        buffer.gather()
        buffer.wait()
        under_way = UnderWay(size)  # as if it were not over yet
        override(buffer, work=under_way)
        buffer.payloads = None if encoding is None else encoding.encode(shard).repeat(world)
        buffer.free()
        result["waited"], result["unfinished"] = under_way.waited, buffer.work is not None
        left.append(retained())
    reference = torch.ones(2, 5, dtype=dtype, requires_grad=True)
    (reference @ cast(torch.Tensor, result["expected"])).square().sum().backward()
    result["gradient"], result["reference"] = x.grad if x.grad is not None else torch.empty(0), reference.grad
    return result, traffic, layout.shard_numel * (world - 1)


def check() -> None:
    """Assert memory, waits, values, gradients and bytes sent, in float32, in BF16 and with an encoding."""
    from course_kit.ranks import shared

    cases = [(n, gather_trial, *kind) for n, *kind in CASES]
    with shared(4).within(20):
        for (n, dtype, encoding), outcome in zip(CASES, results_of(cases[:1], cases[1:]), strict=True):
            for rank, (result, traffic, others) in enumerate(outcome):
                where = f"{n} ranks, {dtype}{', with an encoding' * (encoding is not None)}, rank {rank}"
                left = max(result["left"])
                assert left == 0, (
                    f"{where}: after free() there are still {left} bytes, beside the shard: resize the storage"
                )
                assert result["size"] > 0, (
                    f"{where}: gather() has claimed no memory for self.values and what are views of it"
                )
                assert result["size"] == result["enough"], (
                    f"{where}: gather() claims {result['size']} bytes; self.nbytes is {result['enough']}"
                )
                assert result["waits in gather"] == 0, f"{where}: gather() waits: it only starts"
                assert result["work"], f"{where}: self.work is the all-gather under way: wait() needs it"
                assert result["gathered"] is True, f"{where}: set self.gathered"
                assert result["size again"] > 0, (
                    f"{where}: gathered, freed, gathered again: no memory. free() unsets self.gathered"
                )
                assert torch.equal(result["values"], result["expected"]), (
                    f"{where}: the gathered values differ from the shards'"
                )
                assert torch.equal(result["gradient"], result["reference"]), (
                    f"{where}: backward has not found the right weights"
                )
                assert result["waited"] and min(result["waited"]) > 0 and not result["unfinished"], (
                    f"{where}: free() first waits for an all-gather that is under way: it must not write where no "
                    "memory is"
                )
                bytes_sent = [record.collective for record in traffic.records]
                assert bytes_sent == 3 * ["all_gather"], (
                    f"{where}: three all-gathers; you: {', '.join(bytes_sent) or 'none'}. "
                    "If gathered already, do nothing"
                )
                width = 2 if encoding or dtype == torch.bfloat16 else 4
                assert traffic.bytes == 3 * width * others, (
                    f"{where}: {traffic.bytes} bytes sent, not {3 * width * others}: {width} per element should travel"
                )
