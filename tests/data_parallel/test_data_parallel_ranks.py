"""course_lib.data_parallel.replicas on two to four ranks against one process and DistributedDataParallel. CPU, gloo."""

import contextlib
import copy
import gc
import io
import weakref
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from calls import peak_bytes, said, short_corpus
from course_lib.collectives.traffic import count_traffic
from course_lib.data_parallel.buckets import MODES
from course_lib.data_parallel.program import main
from course_lib.data_parallel.replicas import DataParallel, find_diverged_params, parallel_accumulate
from course_lib.data_parallel.same_model import check_same_model
from course_lib.recompute.modes import IGNORED
from course_lib.single_gpu import training as single_gpu
from course_lib.single_gpu.model import ModelConfig, Transformer, loss
from course_lib.single_gpu.placement import placement_of

ODD = ModelConfig(layers=2, hidden=30, heads=3, kv_heads=1, ffn_hidden=37, vocab=53, tied=True)
STEPS, SEQUENCES, SEQ = 3, 12, 7  # 12 sequences: as many for each of 2, 3 or 4 ranks
SETUPS = [("naive", 25), ("overlap", 25), ("bucket", 25), ("bucket", 0.02)]


class Odd(nn.Module):
    """Layers of odd sizes, with a bias, a buffer, a scalar and a frozen parameter."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.third = nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 1, bias=False)
        self.scale = nn.Parameter(torch.rand(()))
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
        self.register_buffer("count", torch.tensor([seed, 3]))
        self.register_buffer("mask", torch.tensor([seed > 0, True]))

    def forward(self, x: torch.Tensor, use: str = "first second third scale") -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x)) if "first" in use else x.new_ones(len(x), 7)) + self.frozen
        x = self.third(x) if "third" in use else x
        return (x * self.scale if "scale" in use else x).square().mean()


def subgroups() -> dict[int, dist.ProcessGroup]:
    """On a rank: groups of the first 2, 3 and 4 ranks; every rank makes all of them."""
    return {n: dist.new_group(list(range(n))) for n in (2, 3, 4)}


def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step for all ranks together, [b, s] each."""
    return torch.randint(ODD.vocab, (2, SEQUENCES, SEQ), generator=torch.Generator().manual_seed(step)).unbind()


def make_model(seed: int = 0) -> Transformer:
    """Larger weights than at the start of a training: there, attention's gradients are little but rounding errors."""
    model = Transformer(ODD, seed)
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    return model


def norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients]).norm()


def in_one_process() -> dict[str, list[torch.Tensor]]:
    """Losses, gradients and their norm in each step on the whole batch, and the weights after the last."""
    model, found = make_model(), {"losses": [], "gradients": [], "norms": []}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = batches(step)
        step_loss = loss(model(inputs), targets)
        step_loss.backward()
        found["losses"].append(step_loss.detach())
        found["gradients"] += [parameter.grad.clone() for parameter in model.parameters()]
        found["norms"].append(norm(found["gradients"][-len(list(model.parameters())) :]))
        optimizer.step()
    return found | {"weights": [parameter.detach() for parameter in model.parameters()]}


def on_ranks(group, wrap, micro_batches: int = 1, set_to_none: bool = True) -> dict[str, list[torch.Tensor]]:
    """The same by `wrap(model)`, each rank of the group with its part of the batch, cut into micro-batches."""
    n, rank = group.size(), group.rank()
    model = make_model(seed=rank)  # other weights than the first rank's
    dp, found = wrap(model), {"losses": [], "gradients": [], "norms": []}
    optimizer = torch.optim.AdamW(dp.parameters(), lr=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none)
        inputs, targets = (part.chunk(n)[rank].chunk(micro_batches) for part in batches(step))
        whole = torch.zeros(())
        for i in range(micro_batches):
            with dp.no_sync() if i < micro_batches - 1 else contextlib.nullcontext():
                part_loss = loss(dp(inputs[i]), targets[i]) / micro_batches
                part_loss.backward()
            whole += part_loss.detach()
        if isinstance(dp, DataParallel):
            dp.finish()
        dist.all_reduce(whole, group=group)
        found["losses"].append(whole / n)
        gradients = [parameter.grad for parameter in model.parameters()]
        found["gradients"] += [gradient.clone() for gradient in gradients]
        found["norms"].append(norm(gradients))
        optimizer.step()
    return found | {"weights": [parameter.detach() for parameter in model.parameters()]}


def differing(found: dict, expected: dict, relative: float = 1e-5) -> list[str]:
    """What is not the same within `relative` of the largest element of each tensor, by name and place."""
    wrong = [f"{key}: {len(found[key])}" for key in expected if len(found[key]) != len(expected[key])]
    for key in expected:
        for i, (ours, theirs) in enumerate(zip(found[key], expected[key], strict=False)):
            error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
            wrong += [f"{key} {i}: {error:.1e}"] * (not error <= relative)
    return wrong


def training_differs() -> dict[str, list[str]]:
    """On a rank: what differs from one process, by ranks, mode and way of training."""
    expected, found = in_one_process(), {}
    for n, group in subgroups().items():
        for mode, bucket_mb in SETUPS if dist.get_rank() < n else ():
            several = {"micro_batches": 2 if n == 3 else 3}
            for options in ({}, several, several | {"set_to_none": False}) if bucket_mb < 1 else ({},):
                result = on_ranks(group, lambda model: DataParallel(model, group, mode, bucket_mb), **options)
                found[f"{n} {mode} {bucket_mb} {options}"] = differing(result, expected)
    return found


def test_training_is_that_of_one_process_with_the_whole_batch(ranks):
    """Losses, gradients, norms, weights after 3 steps of AdamW; 2 to 4 ranks; the ranks start from other weights."""
    results = ranks(training_differs)
    assert [len(found) for found in results] == [18, 18, 12, 6]
    assert [{key: wrong for key, wrong in found.items() if wrong} for found in results] == [{}] * 4


def differs_from_ddp() -> list[str]:
    group = dist.group.WORLD
    theirs = on_ranks(group, lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True))
    return differing(on_ranks(group, DataParallel), theirs, 1e-6)


def test_training_is_that_of_distributed_data_parallel(ranks):
    assert ranks(differs_from_ddp) == [[]] * 4


# What is sent, and when.


def sent() -> list[str]:
    """On a rank: what is wrong with the traffic of a step."""
    wrong = []
    inputs, targets = batches(0)
    for n, group in subgroups().items():
        for mode, bucket_mb in SETUPS if dist.get_rank() < n else ():
            dp = DataParallel(Transformer(ODD), group, mode, bucket_mb)
            count = len(list(dp.parameters()))
            elements = sum(parameter.numel() for parameter in dp.parameters()) + count  # a flag each
            buckets = len(dp.reducer.buckets)
            with count_traffic() as traffic:
                with dp.no_sync():
                    loss(dp(inputs), targets).backward()
                wrong += ["sent in no_sync"] * (traffic.calls > 0)
                loss(dp(inputs), targets).backward()
                dp.finish()
            enough = 2 * (n - 1) * 4 * elements // n
            wrong += [f"{traffic}"] * (traffic.select("all_reduce", tuple(range(n))).calls != traffic.calls)
            wrong += [f"{mode}: {traffic.calls} calls, {buckets} buckets"] * (traffic.calls != buckets)
            wrong += [f"{mode}: {traffic.bytes} bytes, not {enough}"] * (not 0 <= enough - traffic.bytes < buckets)
            few = {25: 1, 0.02: 3}[bucket_mb] if mode == "bucket" else count
            wrong += [f"{mode} {bucket_mb}: {buckets} buckets, not {few}"] * (buckets != few)
    return wrong


def test_a_step_sends_one_all_reduce_a_bucket_of_twice_all_gradients_but_an_nth(ranks):
    assert ranks(sent) == [[]] * 4


def calls_at_each_layer() -> dict[str, list[int]]:
    """On a rank: all-reduces issued so far when backward leaves each of 6 layers, at its end, and after finish()."""
    found = {}
    for mode in MODES:
        model = nn.Sequential(*(nn.Linear(50, 50) for _ in range(6)))  # 10.2 kB a layer
        dp = DataParallel(model, mode=mode, bucket_mb=0.021)
        seen = found[mode] = []
        with count_traffic() as traffic:
            for layer in model:
                layer.register_full_backward_hook(lambda *_: seen.append(traffic.calls))
            dp(torch.ones(3, 50, requires_grad=True)).sum().backward()
            seen.append(traffic.calls)
            dp.finish()
            seen.append(traffic.calls)
    return found


def test_naive_sends_after_backward_and_the_others_as_soon_as_they_can(ranks):
    """A layer's own gradients come before its hook or after it: so its own all-reduces may or may not be counted."""
    for found in ranks(calls_at_each_layer):
        assert found["naive"] == [0] * 7 + [12]
        *layers, end, finished = found["overlap"]
        assert end == finished == 12
        assert all(2 * i <= calls <= 2 * i + 2 for i, calls in enumerate(layers)), found
        *layers, end, finished = found["bucket"]
        assert end == finished == 3, "two layers a bucket"
        assert all(i // 2 <= calls <= (i + 1) // 2 for i, calls in enumerate(layers)), found


# Where gradients are stored.


def storage_problems() -> list[str]:
    """On a rank: gradients that are no view of the bucket's flat buffer."""
    wrong = []
    for mode, bucket_mb in SETUPS:
        dp = DataParallel(Transformer(ODD), mode=mode, bucket_mb=bucket_mb)
        inputs, targets = batches(0)

        def check(when: str) -> None:
            memory = {bucket.flat.untyped_storage().data_ptr() for bucket in dp.reducer.buckets}
            used = {parameter.grad.untyped_storage().data_ptr() for parameter in dp.parameters()}
            wrong.extend([f"{mode}, {when}: another memory"] * (used != memory))
            spans = sorted((p.grad.data_ptr(), p.grad.nbytes) for p in dp.parameters())
            apart = all(a + size <= b for (a, size), (b, _) in zip(spans, spans[1:], strict=False))
            wrong.extend([f"{mode}, {when}: views overlap"] * (not apart))
            wrong.extend([f"{mode}, {when}: strides"] * any(p.grad.stride() != p.stride() for p in dp.parameters()))

        for set_to_none in (True, False):
            for _ in range(2):
                dp.zero_grad(set_to_none)
                with dp.no_sync():
                    loss(dp(inputs), targets).backward()
                check("no_sync")
                loss(dp(inputs), targets).backward()
                check("backward")
                dp.finish()
                check("finish")
    return wrong


def test_gradients_are_views_of_the_buckets_at_any_time(ranks):
    assert ranks(storage_problems) == [[]] * 4


def peaks() -> dict[str, int]:
    """On a rank: the peaks of a first step, its gradients and buckets included, alone and wrapped."""
    x, found = torch.ones(1, 300), {}
    for mode in (None, *MODES):

        def run() -> None:
            dp = nn.Module() if mode is None else DataParallel(model, mode=mode)
            for _ in range(2):
                model.zero_grad()
                if mode is None:
                    model(x).sum().backward()
                else:
                    with dp.no_sync():
                        dp(x).sum().backward()
                    dp(x).sum().backward()
                    dp.finish()

        model = nn.Sequential(*(nn.Linear(300, 300, bias=False) for _ in range(8)))  # 360 kB each
        found[mode] = peak_bytes(run)
    return found


def test_gradients_are_stored_once(ranks):
    """All gradients, the one that backward is making, and little else (activations: 1.2 kB a layer)."""
    for found in ranks(peaks):
        for mode in MODES:
            assert 8 * 360_000 <= found[mode] <= 9 * 360_000 + 60_000, found


# Parameters of all kinds.


def odd_step(dp: DataParallel, use: str = "first second third scale", seed: int | None = None) -> None:
    seed = dist.get_rank() if seed is None else seed
    dp(torch.rand(4, 5, generator=torch.Generator().manual_seed(seed)), use).backward()


def start_values() -> tuple[dict, dict]:
    model = Odd(seed=dist.get_rank() + 5)
    before = copy.deepcopy(model.state_dict())
    DataParallel(model)
    return before, model.state_dict()


def test_all_ranks_start_from_the_first_ones_parameters_frozen_ones_and_buffers(ranks):
    results = ranks(start_values)
    for _, after in results:
        assert all(torch.equal(after[name], value) for name, value in results[0][0].items())
    assert any(not torch.equal(before["frozen"], results[0][0]["frozen"]) for before, _ in results[1:])


def frozen_and_transposed() -> list:
    model = Odd()
    model.third.weight = nn.Parameter(torch.full((3, 1), 1.0 + dist.get_rank()).t())
    model.second.weight = nn.Parameter(torch.rand(7, 3).t() + dist.get_rank())  # strides (1, 3)
    dp = DataParallel(model)
    optimizer = torch.optim.AdamW([p for p in dp.parameters() if p.requires_grad], fused=True)
    odd_step(dp)
    dp.finish()
    same_strides = model.second.weight.grad.stride() == model.second.weight.stride() == (1, 3)
    optimizer.step()
    in_buckets = {p for bucket in dp.reducer.buckets for p in bucket.parameters}
    return [model.frozen.grad, model.frozen in in_buckets, model.third.weight.tolist(), same_strides]


def test_frozen_parameters_stay_out_and_strides_are_kept(ranks):
    results = ranks(frozen_and_transposed)
    for grad, in_buckets, third, same_strides in results:
        assert grad is None and not in_buckets and third == results[0][2] and same_strides


USES = {
    "all": ["first second third scale"] * 4,
    "unused on one rank": ["first second third scale"] * 2 + ["second third scale"] + ["first second third scale"],
    "others on each rank": ["first second", "second third", "second scale", "first second third"],
    "unused on all": ["second third"] * 4,
    "one rank alone": ["second", "second third", "second", "second"],
}


def unused(set_to_none: bool) -> list[str]:
    """On a rank: what differs from the mean of all ranks' gradients, computed here, over two steps."""
    wrong, rank = [], dist.get_rank()
    for name, uses in USES.items():
        for mode, bucket_mb in (("naive", 25), ("overlap", 25), ("bucket", 25), ("bucket", 5e-5)):
            dp, alone = DataParallel(Odd(), mode=mode, bucket_mb=bucket_mb), Odd()
            for step in range(2):
                dp.zero_grad(set_to_none)
                alone.zero_grad(set_to_none)
                odd_step(dp, uses[rank], rank + step)
                dp.finish()
                (sum(alone_loss(alone, uses[r], r + step) for r in range(4)) / 4).backward()
                for (key, ours), theirs in zip(dp.module.named_parameters(), alone.parameters(), strict=True):
                    same = (ours.grad is None) == (theirs.grad is None)
                    if same and ours.grad is not None:
                        same = torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-8)
                    wrong += [f"{name}, {mode}, step {step}: {key}"] * (not same)
    return wrong


def alone_loss(model: Odd, use: str, seed: int) -> torch.Tensor:
    return model(torch.rand(4, 5, generator=torch.Generator().manual_seed(seed)), use)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_parameter_gets_the_mean_if_any_rank_used_it_and_keeps_none_otherwise(ranks, set_to_none):
    assert ranks(unused, set_to_none) == [[]] * 4


def used_early() -> list[str]:
    """On a rank: `third` is used in the first micro-batch alone, on ranks 0 and 1; rank 3 has no last batch at all."""
    dp, alone, rank = DataParallel(Odd(), bucket_mb=5e-5), Odd(), dist.get_rank()
    total = 0
    for r in range(4):
        total = total + alone_loss(alone, "first second third" if r < 2 else "first second", r)
        total = total + (alone_loss(alone, "first second", r + 10) if r < 3 else 0)
    (total / 4).backward()
    with dp.no_sync():
        odd_step(dp, "first second third" if rank < 2 else "first second")
    if rank < 3:
        odd_step(dp, "first second", rank + 10)
    dp.finish()
    return [
        key
        for (key, ours), theirs in zip(dp.module.named_parameters(), alone.parameters(), strict=True)
        if (ours.grad is None) != (theirs.grad is None)
        or (ours.grad is not None and not torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-8))
    ]


def test_gradients_of_earlier_micro_batches_count_where_the_last_does_not_use_the_parameter(ranks):
    assert ranks(used_early) == [[]] * 4


class Branches(nn.Module):
    """Eight layers, run in any order."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(8))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for i in order:
            x = torch.tanh(self.layers[i](x))
        return x.sum()


def other_orders() -> list[list]:
    """On a rank: gradients after steps in which each rank runs other layers, in its own order."""
    found = []
    for mode, bucket_mb in (("overlap", 25), ("bucket", 0.0008)):
        dp = DataParallel(Branches(), mode=mode, bucket_mb=bucket_mb)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _step in range(10):
            dp.zero_grad()
            order = torch.randperm(8, generator=generator)[: int(torch.randint(0, 9, (), generator=generator))]
            if len(order):
                dp(torch.ones(2, 9), order.tolist()).backward()
            dp.finish()
            found.append([None if p.grad is None else p.grad.tolist() for p in dp.parameters()])
    return found


def test_ranks_that_run_other_layers_in_another_order_do_not_hang_and_agree(ranks):
    first, *others = ranks(other_orders)
    assert all(other == first for other in others)
    assert any(gradient is not None for step in first for gradient in step)


def own_groups() -> list:
    """On a rank: `third` is shared by ranks 0 and 2, and by 1 and 3: start values, gradients, traffic."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    model = Odd(seed=rank)
    placement_of(model.third.weight).reduce_group = pairs[rank % 2]
    dp = DataParallel(model)
    start = model.third.weight.tolist(), model.first.weight.tolist()
    with count_traffic() as traffic:
        odd_step(dp)
        dp.finish()
    by_group = {record.group: record.bytes for record in traffic.records}
    alone = Odd(seed=rank)
    alone.load_state_dict(model.state_dict())
    odd_step(alone)
    return [start, model.third.weight.grad, model.first.weight.grad, by_group, alone.third.weight.grad]


def test_a_parameter_with_a_group_of_its_own_is_summed_there_and_divided_by_the_data_parallel_size(ranks):
    results = ranks(own_groups)
    for rank, (start, third, first, by_group, _) in enumerate(results):
        pair, members = (rank % 2, rank % 2 + 2), (0, 1, 2, 3)
        assert start[0] == Odd(seed=rank % 2).third.weight.tolist() and start[1] == Odd(seed=0).first.weight.tolist()
        assert by_group == {pair: 4 * (3 + 1), members: 2 * 3 * 4 * (7 * 5 + 7 + 3 * 7 + 3 + 1 + 5) // 4}
        assert torch.allclose(third, (results[pair[0]][4] + results[pair[1]][4]) / 4, rtol=1e-5)
        assert torch.equal(first, results[0][2])


def tied_once() -> tuple[int, bool]:
    dp = DataParallel(Transformer(ODD))
    in_buckets = [parameter for bucket in dp.reducer.buckets for parameter in bucket.parameters]
    return len(in_buckets), dp.module.head.weight is dp.module.embedding.weight


def test_a_tied_parameter_is_reduced_once(ranks):
    assert ranks(tied_once) == [(20, True)] * 4


# Precision, checkpoints, autocast.


def in_float32() -> list:
    """On a rank: bf16 gradients on 3 ranks, reduced in float32 and in bf16; and what was sent."""
    group, found = dist.new_group([0, 1, 2]), []
    if dist.get_rank() == 3:
        return []
    for reduce_dtype in (torch.float32, None):
        model = nn.Linear(33, 11, bias=False, dtype=torch.bfloat16)
        dp = DataParallel(model, group, reduce_dtype=reduce_dtype)
        generator = torch.Generator().manual_seed(dist.get_rank())
        x = torch.rand(2, 33, generator=generator).to(torch.bfloat16)
        with count_traffic() as traffic:
            dp(x).sum().backward()
            own = model.weight.grad.clone()
            dp.finish()
        found.append((own, model.weight.grad, traffic.bytes))
    return found


def test_reduce_dtype_sums_in_float32_and_rounds_once(ranks):
    results = ranks(in_float32)[:3]
    exact = (sum(found[0][0].float() for found in results) * (1 / 3)).to(torch.bfloat16)
    for wide, narrow in results:
        assert wide[1].dtype == narrow[1].dtype == torch.bfloat16
        difference = (wide[1].float() - exact.float()).abs() / exact.float().abs()
        assert difference.max() <= 2**-8 and (difference > 0).float().mean() < 0.02, "of another order of summation"
        assert (wide[2], narrow[2]) == (2 * 2 * 4 * (33 * 11 + 1) // 3, 2 * 2 * 2 * (33 * 11 + 1) // 3)


def recomputed() -> dict[str, list[str]]:
    """On a rank: what differs from a training step without checkpoints, for both variants of them and for autocast."""
    inputs, targets = (part.chunk(4)[dist.get_rank()] for part in batches(0))

    def gradients(change, mode: str = "bucket", dtype: torch.dtype | None = None) -> dict:
        model = make_model()
        change(model)
        dp = DataParallel(model, mode=mode, bucket_mb=0.02)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            step_loss = loss(dp(inputs), targets)
        step_loss.backward()
        dp.finish()
        return {"gradients": [parameter.grad for parameter in dp.parameters()]}

    def with_checkpoints(reentrant: bool):
        def change(model: Transformer) -> None:
            for block in model.blocks:
                plain = block.forward
                block.forward = lambda *args, plain=plain: checkpoint(plain, *args, use_reentrant=reentrant)

        return change

    expected = gradients(lambda model: None)
    found = {
        f"{mode} {r}": differing(gradients(with_checkpoints(r), mode), expected)
        for mode in MODES
        for r in (True, False)
    }
    rough = differing(gradients(lambda model: None, "bucket", torch.bfloat16), expected, 0.1)
    return found | {"autocast": rough}


def test_checkpoints_of_both_variants_and_autocast(ranks):
    """bf16 matrix products: within 10% of the largest element of each gradient."""
    for found in ranks(recomputed):
        assert len(found) == 7 and not any(found.values()), found


# Mistakes.


def wrong_models() -> dict[str, str]:
    rank, small = dist.get_rank(), nn.Linear(3, 3)
    frozen = nn.Linear(3, 3)
    frozen.weight.requires_grad_(rank != 3)
    all_frozen = nn.Linear(3, 3).requires_grad_(False)
    longer = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3 if rank == 1 else 2)))
    named = nn.Sequential()
    named.add_module("mine" if rank == 2 else "ours", nn.Linear(2, 2))
    grouped, pair = nn.Linear(2, 2), dist.new_group([0, 1])
    if rank == 1:
        placement_of(grouped.weight).reduce_group = pair
    calls = {
        "shape": lambda: DataParallel(nn.Linear(3, 4 if rank == 2 else 3)),
        "dtype": lambda: DataParallel(nn.Linear(3, 3, dtype=torch.float64 if rank == 1 else torch.float32)),
        "frozen": lambda: DataParallel(frozen),
        "longer": lambda: DataParallel(longer),
        "named": lambda: DataParallel(named),
        "buffer": lambda: DataParallel(nn.BatchNorm1d(3, track_running_stats=rank != 3)),
        "grouped": lambda: DataParallel(grouped),
        "arguments": lambda: DataParallel(small, bucket_mb=1 + rank // 3),
        "one on meta": lambda: DataParallel(nn.Linear(3, 3, device="meta" if rank == 1 else "cpu")),
        "mode": lambda: DataParallel(small, mode="fast"),
        "bucket_mb": lambda: DataParallel(small, bucket_mb=0),
        "nan": lambda: DataParallel(small, bucket_mb=float("nan")),
        "meta": lambda: DataParallel(nn.Linear(3, 3, device="meta")),
        "none": lambda: DataParallel(all_frozen),
        "empty": lambda: DataParallel(nn.ReLU()),
    }
    return {name: said(call) for name, call in calls.items()}


def test_other_models_on_other_ranks_and_bad_arguments_are_one_line_on_all_ranks(ranks):
    first, *others = ranks(wrong_models)
    assert others == [first] * 3
    assert all(text.startswith("ValueError: ") and "\n" not in text for text in first.values()), first
    parts = {
        "shape": ["rank 2 has weight [4, 3]", "rank 0 has weight [3, 3]"],
        "dtype": ["rank 1 has weight", "float64", "float32"],
        "frozen": ["rank 3 has weight", "to be trained"],
        "longer": ["rank 1 has 2.weight", "nothing more"],
        "named": ["rank 2 has mine.weight", "ours.weight"],
        "buffer": ["rank 3 has nothing more", "running_mean"],
        "grouped": ["rank 1 has weight", "reduced over 2 ranks"],
        "arguments": ["rank 3", "'bucket_mb': 2"],
        "one on meta": ["rank 1 has weight", "meta"],
        "mode": ["'fast'", "naive, overlap, bucket"],
        "bucket_mb": ["bucket_mb 0"],
        "nan": ["bucket_mb nan"],
        "meta": ["weight is on the meta device"],
        "none": ["no parameter to train"],
        "empty": ["no parameter to train"],
    }
    for name, words in parts.items():
        assert all(word in first[name] for word in words), first[name]


def misuse() -> dict[str, str]:
    found, x = {}, torch.ones(2, 3)
    for mode in MODES:

        def twice(dp):
            dp(x).sum().backward()
            dp.module(x).sum().backward()

        def in_no_sync_after(dp):
            dp(x).sum().backward()
            with dp.no_sync():
                dp.module(x).sum().backward()

        def forgotten(dp):
            dp(x).sum().backward()
            dp.eval()
            dp(x)
            dp.train()
            with torch.no_grad():
                dp(x)
            dp(x)

        def finish_inside(dp):
            with dp.no_sync():
                dp(x).sum().backward()
                dp.finish()

        for function in (twice, in_no_sync_after, forgotten, finish_inside):
            dp = DataParallel(nn.Linear(3, 3), mode=mode)
            found[f"{function.__name__} {mode}"] = said(lambda: function(dp))
            dp.finish()  # so that all ranks have started the same
    table = DataParallel(nn.Embedding(5, 3, sparse=True))
    found["sparse"] = said(lambda: table(torch.tensor([1])).sum().backward())
    reused = nn.Linear(3, 3)
    dp = DataParallel(nn.Sequential(reused))
    y = checkpoint(reused, checkpoint(reused, x.clone().requires_grad_(), use_reentrant=True), use_reentrant=True)
    found["reentrant"] = said(lambda: y.sum().backward())
    dp.finish()
    return found


def test_misuse_is_one_clear_line(ranks):
    for found in ranks(misuse):
        for mode in MODES:
            for name in ("twice", "in_no_sync_after"):
                text = found[f"{name} {mode}"]
                assert text.startswith("RuntimeError: a second gradient for ") and "before finish()" in text, text
            assert found[f"forgotten {mode}"].startswith("RuntimeError: forward after a backward without finish()")
            assert found[f"finish_inside {mode}"].startswith("RuntimeError: finish() inside no_sync()")
        assert found["sparse"] == "ValueError: weight has a sparse gradient: use a layer with sparse=False"
        assert "reentrant checkpoint" in found["reentrant"]
        assert not any("\n" in text for text in found.values())


def after_errors() -> list[bool]:
    """On a rank: no_sync ends with an error in it; a second finish() leaves the gradients alone."""
    dp = DataParallel(Odd())
    with contextlib.suppress(KeyError), dp.no_sync():
        raise KeyError
    odd_step(dp)
    dp.finish()
    before = [p.grad.clone() for p in dp.module.parameters() if p.requires_grad]
    dp.finish()
    after = [p.grad for p in dp.module.parameters() if p.requires_grad]
    return [torch.allclose(a, b, rtol=1e-6) for a, b in zip(before, after, strict=True)]


def test_no_sync_ends_with_an_error_and_a_second_finish_leaves_means(ranks):
    assert ranks(after_errors) == [[True] * 6] * 4


# Lifetime and copies.


def lives() -> dict[str, bool]:
    """On a rank: whether wrapper and model go when they should, and what a copy of the model has."""
    model, found = Odd(), {}
    dp = DataParallel(model)
    gc.disable()
    gone = weakref.ref(dp)
    del dp
    found["wrapper goes at once"] = gone() is None
    found["hooks go"] = not any(p._post_accumulate_grad_hooks for p in model.parameters())
    with count_traffic() as traffic:
        alone_loss(model, "first second", 0).backward()
    found["model alone sends nothing"] = traffic.calls == 0
    for mode in MODES:
        dp = DataParallel(model, mode=mode)
    model.zero_grad()
    with count_traffic() as traffic:
        odd_step(dp)
        dp.finish()
    found["wrapped again, only the last sends"] = traffic.calls == len(dp.reducer.buckets)
    twin = copy.deepcopy(dp.module)
    with count_traffic() as traffic:
        alone_loss(twin, "first second", 0).backward()
    found["a copy is not wrapped"] = traffic.calls == 0
    file = io.BytesIO()
    torch.save(dp.module.state_dict(), file)
    file.seek(0)
    found["saves"] = all(torch.equal(v, model.state_dict()[k]) for k, v in torch.load(file).items())
    torch.save(model, io.BytesIO())  # a process group on a parameter could not be pickled
    found["nothing on parameters"] = not any(placement_of(p).reduce_group for p in model.parameters())
    gone = weakref.ref(model)
    del dp, model
    found["model goes"] = gone() is None
    gc.enable()
    return found


def test_wrapper_and_model_go_without_the_garbage_collector_and_copies_are_free(ranks):
    for found in ranks(lives):
        assert all(found.values()), found


def uneven(rank: int, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a rank; row i has lengths[i] targets that count."""
    inputs, targets = torch.randint(ODD.vocab, (2, len(lengths), SEQ), generator=torch.Generator().manual_seed(rank))
    for row, length in enumerate(lengths):
        targets[row, length:] = IGNORED
    return inputs, targets


LENGTHS = [[7, 2, 0], [1, 0, 3], [0, 0, 0], [7, 7, 7]]


def accumulated() -> tuple:
    """On a rank: the loss and the gradients of three uneven micro-batches, and what was sent."""
    inputs, targets = uneven(dist.get_rank(), LENGTHS[dist.get_rank()])
    dp = DataParallel(Transformer(ODD), bucket_mb=0.005)
    with count_traffic() as traffic:
        found = parallel_accumulate(dp, zip(inputs.split(1), targets.split(1), strict=True))
    return found, [p.grad for p in dp.parameters()], traffic, len(dp.reducer.buckets)


def test_accumulation_weighs_by_the_tokens_of_all_ranks_and_sends_gradients_once(ranks):
    model, (inputs, targets) = (
        Transformer(ODD),
        (torch.cat(x) for x in zip(*map(uneven, range(4), LENGTHS), strict=True)),
    )
    whole = loss(model(inputs), targets)
    whole.backward()
    for found, grads, traffic, buckets in ranks(accumulated):
        assert found.item() == pytest.approx(whole.item(), rel=1e-5)
        for got, parameter in zip(grads, model.parameters(), strict=True):
            torch.testing.assert_close(got, parameter.grad, rtol=1e-5, atol=1e-7)
        assert traffic.calls == traffic.select("all_reduce").calls == buckets + 2, "the number of tokens, and the loss"


CHANGES = {
    "none": lambda odd: None,
    "last digit": lambda odd: odd.first.weight[2, 3].mul_(1 + 2**-22),
    "exchanged": lambda odd: odd.second.weight.copy_(odd.second.weight.flip(0)),
    "buffer": lambda odd: odd.count.add_(1),
    "boolean": lambda odd: odd.mask.logical_not_(),
    "sign of zero": lambda odd: odd.frozen.fill_(-0.0),
    "exchanged far away": lambda odd: odd.large.copy_(odd.large.flip(1)),
}


def changed_on_rank_2() -> dict[str, list[str]]:
    """On a rank: what find_diverged_params finds, by change; NaN and zeros stand on all ranks."""
    found = {}
    for name, change in CHANGES.items():
        odd = Odd()
        with torch.no_grad():
            odd.first.bias.fill_(torch.nan)
            odd.frozen.fill_(0.0)
            odd.register_buffer("large", torch.eye(1, 2**20 + 1, dtype=torch.int8))  # one more than is read at a time
            if dist.get_rank() == 2:
                change(odd)
        found[name] = find_diverged_params(odd)
    return found


def test_out_of_step_names_what_differs_in_a_single_bit(ranks):
    for found in ranks(changed_on_rank_2):
        assert found == {
            "none": [],
            "last digit": ["first.weight"],
            "exchanged": ["second.weight"],
            "buffer": ["count"],
            "boolean": ["mask"],
            "sign of zero": ["frozen"],
            "exchanged far away": ["large"],
        }


ARGUMENTS = ["--preset", "debug", "--steps", "2", "--batch", "2", "--seq", "16", "--check-every", "1"]


def trained(argv: list[str]) -> list[float]:
    with short_corpus():
        return [record["loss"] for record in main(argv)]


def test_main_trains_as_one_process_with_the_whole_batch(ranks):
    with short_corpus():
        alone = single_gpu.main(["--preset", "debug", "--steps", "2", "--batch", "8", "--seq", "16"])
    for more in ([], ["--micro-batch", "1"], ["--reduce-fp32", "--bucket-mb", "0.1"]):
        for losses in ranks(trained, ARGUMENTS + more):
            assert losses == pytest.approx([record["loss"] for record in alone], rel=1e-4)


# Parts of split tensors (notebooks 06 and 08).


class Part(NamedTuple):
    """As much of a TensorShard as a comparison wants to know."""

    start: int
    full_size: int = 8


def compared() -> dict[str, str]:
    """On a rank: what is said of a model with a part of a tensor, by where the parts and the groups are."""
    rank, found = dist.get_rank(), {}
    pairs = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
    neighbours = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0]
    alone = dist.new_subgroups(group_size=1)[0]
    for name, start, group in (
        ("the same part", 0, None),
        ("another part", 2 * rank, None),
        ("parts in their groups", 2 * (rank % 2), pairs),
        ("parts across the groups", 2 * (rank % 2), neighbours),
        ("each its own", 2 * rank, alone),
        ("one differs in its group", 2 * (rank == 3), pairs),
        ("groups of other sizes", 0, pairs if rank < 3 else alone),
    ):
        model = nn.Linear(4, 2, bias=False)
        placement_of(model.weight).tensor_shard = Part(start)
        if group is not None:
            placement_of(model.weight).reduce_group = group
        found[name] = said(lambda: check_same_model(model, dist.group.WORLD, {}))
    return found


def test_parts_are_compared_among_the_ranks_that_reduce_them_together(ranks):
    """Same words on all ranks: which rank has which part, and who has another."""
    for found in ranks(compared):
        for name in ("the same part", "parts in their groups", "each its own"):
            assert found.pop(name) == "nothing", name
        start, plain = "ValueError: the ranks differ: rank ", "weight [2, 4] torch.float32 cpu to be trained"
        over = f"{plain} reduced over 2 ranks from index"
        assert found == {
            "another part": f"{start}1 has {plain} from index 2 of 8, where rank 0 has {plain} from index 0 of 8",
            "parts across the groups": f"{start}1 has {over} 2 of 8, where rank 0 has {over} 0 of 8",
            "one differs in its group": f"{start}3 has {over} 2 of 8, where rank 1 has {over} 0 of 8",
            "groups of other sizes": f"{start}3 has {plain} reduced over 1 ranks from index 0 of 8, where rank 0 has "
            f"{over} 0 of 8",
        }


def sent_to_compare() -> dict[tuple[bool, int], tuple[int, int]]:
    """On a rank: calls and bytes of a comparison that finds no difference, by whether parts differ, and by layers."""
    rank, found = dist.get_rank(), {}
    pairs = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
    for split in (False, True):
        for layers in (1, 100):
            model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
            for layer in model if split else ():
                placement_of(layer.weight).tensor_shard, placement_of(layer.weight).reduce_group = (
                    Part(2 * (rank % 2)),
                    pairs,
                )
            with count_traffic() as traffic:
                check_same_model(model, dist.group.WORLD, {"mode": "bucket"})
            found[split, layers] = traffic.calls, traffic.bytes
    return found


def test_ranks_that_agree_compare_a_few_bytes_however_many_parameters_there_are(ranks):
    for found in ranks(sent_to_compare):
        for split in (False, True):
            assert found[split, 1] == found[split, 100], "more parameters, more bytes"
            assert found[split, 100][1] <= 3 * 100, "hashes of all words, and of the parts in a group: to three ranks"
