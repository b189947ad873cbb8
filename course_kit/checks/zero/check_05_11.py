"""Check of exercise 05.11: the events when a unit's backward begins, in a log and in two steps of stage 3."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from course_kit.checks.watchers import late_results
from course_kit.checks.zero.comparing import ONE_LAYER, one_process, results_of
from course_kit.labs.zero import batch_of, farthest, storage_bytes
from course_kit.typed import transformer_blocks
from course_lib.collectives.traffic import count_traffic
from course_lib.single_gpu.model import ModelConfig, Transformer, init_parameter, loss
from course_lib.zero import full_state_dict, fully_shard
from course_lib.zero.full_sharding import FullyShard
from course_lib.zero.sharded_parameters import FSDPUnit
from course_lib.zero.shards import clip_grad_norm_

UNTIED = ModelConfig(3, 48, 4, 2, 100, 97)
# Ranks, micro-batches, model. Tied: the embedding, also the head, is the root's.
CASES = (3, 1, UNTIED), (4, 2, UNTIED), (2, 2, ONE_LAYER)


class Noting(FSDPUnit):
    """A unit that notes the calls of its methods."""

    def __init__(self, name: int | str, log: list[str]):
        super().__init__([nn.Identity()], [])
        self.name, self.log = name, log

    def gather(self) -> None:
        """Note it."""
        self.log.append(f"gather {self.name}")

    def wait(self) -> None:
        """Note it."""
        self.log.append(f"wait {self.name}")

    def free(self) -> None:
        """Note it."""
        self.log.append(f"free {self.name}")

    def launch(self) -> None:
        """Note it."""
        self.log.append(f"reduce {self.name}")


def backward_log(order: list[int], executed: tuple[int, ...] = (0, 1, 2)) -> tuple[list[str], list]:
    """Return the events of units 0, 1, 2 when their backwards begin in this order, and the units in self.unreduced.

    ran: the units of the last forward, in order.
    """
    log: list[str] = []
    units: list[Any] = [Noting(number, log) for number in range(3)]
    sharded = FullyShard(nn.Module(), cast(Any, None), units, cast(Any, Noting("root", log)), None)
    sharded.forward_order = [units[number] for number in executed]
    for number in order:
        try:
            sharded.pre_backward(units[number])
        except (ValueError, IndexError) as error:
            where = f"the backward of unit {number} begins, self.forward_order has units {list(executed)}"
            raise AssertionError(f"{where}: {type(error).__name__}, {error}; a unit may be missing there") from None
    in_order = [units[number] for number in executed]
    assert sharded.forward_order == in_order, "leave self.forward_order as it is: only the next forward changes it"
    unreduced: Iterable[Any] = sharded.unreduced
    return log, [unit.name for unit in unreduced]


def check_log() -> None:
    """Assert the order of gathers, waits and sends, without any rank."""
    log, still_open = backward_log([2, 2, 1, 1, 0])
    for unit in (2, 1, 0):
        assert f"gather {unit}" in log and f"wait {unit}" in log, f"unit {unit} is not gathered and waited for: {log}"
        assert log.index(f"gather {unit}") < log.index(f"wait {unit}"), (
            f"unit {unit} is waited for before it is gathered: {log}"
        )
        assert log.count(f"wait {unit}") == 1, (
            f"the hook fires twice for units 2 and 1; the second time nothing happens. You: {log}"
        )
    assert still_open == [0], (
        f"self.unreduced has units {still_open} at the end: only the one whose backward has begun last"
    )
    for unit in (2, 1):
        assert f"reduce {unit}" in log, f"unit {unit}'s gradients are not sent when the next backward begins: {log}"
        assert log.index(f"wait {unit}") < log.index(f"free {unit}"), (
            f"unit {unit} is sent when its own backward begins: {log}"
        )
        assert log.index(f"reduce {unit}") < log.index(f"wait {unit - 1}"), f"send what is ready before you wait: {log}"
        assert log.index(f"gather {unit - 1}") < log.index(f"wait {unit}"), (
            f"no prefetch: unit {unit - 1} should be in flight when unit {unit} computes: {log}"
        )
    assert log.index("free 2") < log.index("gather 0"), f"unit 2's memory is free before unit 0 claims its own: {log}"
    assert log.count("gather 2") == 1, f"unit 2 is gathered once; nothing precedes unit 0 in self.forward_order: {log}"
    log, _ = backward_log([2, 1], executed=(0, 1))
    assert log[:2] == ["gather 2", "wait 2"], (
        f"unit 2 is not in self.forward_order, so there is nothing to prefetch: {log}"
    )


def stage_3_trial(
    group: dist.ProcessGroup,
    micro_batches: int,
    config: ModelConfig = UNTIED,
    steps: int = 2,
    max_norm: float = 0.4,
) -> tuple:
    """Return full weights, norms, the last step's traffic, the most units unsharded at a time, the bytes kept,
    and the transfers that are never waited for, of this rank. Results of transfers are late.
    """
    with torch.device("meta"):
        model = Transformer(config)
    sharded = fully_shard(model, group, init=lambda name, tensor: init_parameter(name, tensor, config))
    optimizer, norms, full = torch.optim.SGD(sharded.parameters(), 0.5, momentum=0.9), [], []
    inputs, targets = batch_of(dist.get_rank(group), config)

    def count(*_) -> None:
        buffers = [part.buffer.values for unit in sharded.units for part in unit.flat_params]
        full.append(sum(buffer.untyped_storage().nbytes() > 0 for buffer in buffers))

    for block in transformer_blocks(model):
        block.mlp.register_forward_pre_hook(count)
        block.mlp.register_full_backward_pre_hook(count)
    for _ in range(steps):
        optimizer.zero_grad()
        with count_traffic() as traffic, late_results() as works:
            for part in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
                (loss(sharded(part[0]), part[1]) / micro_batches).backward()
            sharded.finish()
        forgotten = [work.name for work in works if not work.waited]
        norms.append(clip_grad_norm_(sharded.parameters(), max_norm).item())
        optimizer.step()
    tensors = [*sharded.parameters(), *(p.grad for p in sharded.parameters())]
    tensors += [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    tensors += [p.buffer.values for u in [*sharded.units, sharded.root] for p in u.flat_params]
    return full_state_dict(cast(FullyShard, sharded)), norms, traffic, max(full), storage_bytes(tensors), forgotten


def check() -> None:
    """Assert the log, then weights, norms, gathers and memory of stage 3 on 2 to 4 ranks against one process."""
    from course_kit.ranks import shared

    check_log()
    cases = [(n, stage_3_trial, *how) for n, *how in CASES]
    with shared(4).within(20):
        for (n, micro_batches, config), outcome in zip(CASES, results_of(cases), strict=True):
            expected, norms = one_process(n, config=config)
            elements = sum(w.numel() for w in expected.values())
            for rank, (weights, got, traffic, full, saved, forgotten) in enumerate(outcome):
                where = f"{n} ranks, {micro_batches} micro-batches{', tied embeddings' * config.tied}, rank {rank}"
                assert not forgotten, (
                    f"{where}: after finish() {len(forgotten)} transfers were never waited for: "
                    f"{', '.join(forgotten)}. Each unit's, and the root's, must be over before it is used"
                )
                name, error = farthest(weights, expected)
                early = "" if error == error else ": NaN, for a transfer's result is used before it is waited for"
                assert error < 1e-4, f"{where}: after 2 steps {name} is not one process's{early}"
                assert np.allclose(got, norms, rtol=1e-4), f"{where}: norms {got}, one process has {norms}"
                calls = traffic.select("all_gather").calls
                assert config.tied or calls == 9 * micro_batches, (
                    f"{where}: {calls} all-gathers; 5 units make 9 for each micro-batch"
                )
                assert full <= 2, f"{where}: {full} units are unsharded at a time; two are enough"
                assert config.tied or saved < 1.05 * 12 * elements / n + 1000, (
                    f"{where}: {saved:,} bytes kept between steps; 1/{n} is {12 * elements // n:,}"
                )
