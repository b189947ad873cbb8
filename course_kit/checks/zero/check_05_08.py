"""Check of exercise 05.8: two steps of `ZeroOptimizer` against one process, and the order of events in a step."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from course_kit.checks.zero.comparing import ONE_LAYER, one_process, results_of
from course_kit.labs.zero import batch_of, farthest, storage_bytes
from course_lib.collectives.traffic import count_traffic
from course_lib.single_gpu.model import ModelConfig, Transformer, loss
from course_lib.zero import ZeroOptimizer

MOMENTUM = torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}
ADAM = torch.optim.AdamW, {"lr": 0.01, "betas": (0.7, 0.8), "eps": 1e-3, "weight_decay": 0.3}
CASES: tuple[tuple[int, bool, int, tuple[type[torch.optim.Optimizer], dict]], ...] = (
    (1, True, 4, MOMENTUM),
    (2, True, 3, ADAM),
    (1, False, 4, MOMENTUM),
)  # stage, with a module, ranks, optimizer
Event = tuple[str, int]  # a method and the number of its bucket


def tensors_on(zero: ZeroOptimizer) -> int:
    """Return the bytes of tensors in attributes of `zero`, in lists and dictionaries too."""
    return storage_bytes(leaf for leaf in tree_leaves([*vars(zero).values()]) if torch.is_tensor(leaf))


def note_calls(zero: ZeroOptimizer, log: list[Event], copies: list[int]) -> None:
    """Have the shards and the optimizer of `zero` note their calls in `log`, and in `copies` the buckets for which
    set_grad gets another tensor than their gradient.
    """
    for number, shard in enumerate([*zero.shards, zero.optimizer]):
        for name in ("set_grad", "gather", "wait") if shard is not zero.optimizer else ("step",):
            method = getattr(shard, name)

            def noted(*args, name=name, number=number, shard=shard, method=method):
                if name != "wait" or shard.work is not None and log[-1:] != [("set_grad", number)]:  # not take's wait
                    log.append((name, number))
                if name == "set_grad":
                    given = zero.gradients[number].gradient.untyped_storage()._cdata
                    copies.extend([number] * (args[0].untyped_storage()._cdata != given))
                return method(*args)

            setattr(shard, name, noted)


def zero_trial(
    group: dist.ProcessGroup,
    stage: int,
    as_module: bool,
    optimizer_cls: type[torch.optim.Optimizer],
    settings: dict,
    config: ModelConfig = ONE_LAYER,
    steps: int = 2,
    max_norm: float = 0.4,
) -> tuple:
    """Return the weights, the norms, traffic and order of calls of the last step, the reduce-scatters in each backward,
    the bytes of the states, and the number of buckets, of this rank.
    """
    model = Transformer(config, seed=dist.get_rank(group))  # other weights on each rank, at first
    model.load_state_dict(Transformer(config).state_dict())
    given = model if as_module else list(model.parameters())
    zero = ZeroOptimizer(given, optimizer_cls, group, stage, bucket_mb=0.02, **settings)
    inputs, targets = batch_of(dist.get_rank(group), config)
    log: list[Event] = []
    copies: list[int] = []
    at_first = tensors_on(zero)
    norms, early = [], []
    note_calls(zero, log, copies)
    for _ in range(steps):
        zero.zero_grad()
        with count_traffic() as traffic:
            loss(model(inputs), targets).backward()
            early.append(traffic.select("reduce_scatter").calls)
            norms.append(zero.clip_grad_norm_(max_norm).item())
            log.clear()
            zero.step()
            order = list(log)
    zero.wait()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    states = [value for state in zero.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    growth = tensors_on(zero) - at_first
    return weights, norms, traffic, order, early, storage_bytes(states), len(zero.shards), copies, growth


def check_order(where: str, order: list[Event], buckets: int, as_module: bool) -> None:
    """Assert the order of a step: all gradients, one update, gathers from the last bucket on, and the waits."""
    events = [f"{name} {k}" for name, k in order]
    shown, rest = ", ".join(events), ", ".join(word for word in events if not word.startswith("set_grad"))
    work = [event for event in order if event[0] != "wait"]
    names = [name for name, _ in work]
    for name in ("set_grad", "gather"):
        assert sorted(k for kind, k in work if kind == name) == list(range(buckets)), (
            f"{where}: {name} once for each bucket; you: {shown}"
        )
    assert names.count("step") == 1, (
        f"{where}: {names.count('step')} calls of the optimizer; one is enough for {buckets} buckets"
    )
    wanted = ["set_grad"] * buckets + ["step"] + ["gather"] * buckets
    assert names == wanted, f"{where}: all gradients, the update, then all gathers; you: {shown}"
    assert [k for name, k in work if name == "gather"] == list(reversed(range(buckets))), (
        f"{where}: the first layers first, and they are in the last bucket, {buckets - 1}; you: {rest}"
    )
    waits = [event for event in order if event[0] == "wait"]
    if as_module:
        assert not waits, f"{where}: it waits for {len(waits)} gathers; the module's forward does, later; you: {rest}"
    else:
        assert {k for _, k in waits} == set(range(buckets)), (
            f"{where}: no module, so nothing else waits: wait for all gathers, not for {len(waits)}"
        )
        assert order[: len(work)] == work, f"{where}: wait at the end, not in between; you: {rest}"


def check() -> None:
    """Assert order, weights, norms, states and bytes sent, in stages 1 and 2, with a module and without."""
    from course_kit.ranks import shared

    cases = [(n, zero_trial, stage, as_module, *selected) for stage, as_module, n, selected in CASES]
    with shared(4).within(20):
        for (stage, as_module, n, selected), outcome in zip(CASES, results_of(cases[:1], cases[1:]), strict=True):
            expected, norms = one_process(n, config=ONE_LAYER, optimizer_cls=cast(Any, selected[0]), **selected[1])
            elements = sum(w.numel() for w in expected.values())
            for rank, result in enumerate(outcome):
                weights, got, traffic, order, early, states, buckets, copies, growth = result
                where = f"stage {stage}, {n} ranks, {selected[0].__name__}, rank {rank}"
                check_order(where, order, buckets, as_module)
                assert not copies, (
                    f"{where}: set_grad gets a copy of bucket {copies[0]}'s gradient: give it the gradient"
                )
                assert growth <= 0, (
                    f"{where}: the optimizer object keeps {growth} bytes of tensors more than before a step"
                )
                name, error = farthest(weights, expected)
                assert error < 1e-4, (
                    f"{where}: after 2 steps {name} is not one process's: each bucket's own gradient? The optimizer "
                    f"that is asked for, with all its settings ({', '.join(selected[1])})?"
                )
                assert np.allclose(got, norms, rtol=1e-4), f"{where}: the norms are {got}, one process has {norms}"
                assert early[-1] == buckets, (
                    f"{where}: {early[-1]} of {buckets} reduce-scatters have started when backward ends"
                )
                each = 4 * elements * (2 if selected is ADAM else 1)  # AdamW has two states
                assert states < 1.1 * each / n + 64 * buckets, f"{where}: states of {states:,} bytes, more than 1/{n}"
                all_reduce = 2 * (n - 1) / n * 4 * elements
                assert abs(traffic.bytes / all_reduce - 1) < 0.01, (
                    f"{where}: {traffic.bytes:,} bytes sent; an all-reduce of the gradients would send "
                    f"{all_reduce:,.0f}"
                )
