"""ZeRO stages 1 and 2 on two to four ranks against one process and ZeroRedundancyOptimizer. CPU, gloo."""

import contextlib
import copy
import gc
import io
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from calls import said
from course_kit.checks.watchers import NoHostReads
from course_lib.collectives.traffic import count_traffic
from course_lib.single_gpu.model import ModelConfig, Transformer, loss
from course_lib.single_gpu.placement import placement_of
from course_lib.single_gpu.profile import MemoryProfile
from course_lib.zero.optimizer import ZeroOptimizer
from course_lib.zero.optimizer_shards import OptimizerShard
from course_lib.zero.shards import FlatLayout, GradientBuffer, is_unused

ODD = ModelConfig(layers=2, hidden=30, heads=3, kv_heads=1, ffn_hidden=37, vocab=53, tied=True)
STEPS, SEQUENCES, SEQ, MAX_NORM = 3, 12, 7, 0.5  # 12 sequences: as many for each of 2, 3 or 4 ranks
ADAM = {"optimizer_cls": torch.optim.AdamW, "lr": 1e-3}
ALL = "first second third scale"


class Odd(nn.Module):
    """Layers of odd sizes, one without parameters, a scalar, an empty one, a frozen one, and one that is used twice."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.third = nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 1, bias=False)
        self.tanh, self.again = nn.Tanh(), nn.Linear(7, 3)
        self.again.weight = self.second.weight
        self.scale, self.empty = nn.Parameter(torch.rand(())), nn.Parameter(torch.rand(0, 3))
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)

    def forward(self, x: torch.Tensor, use: str = ALL) -> torch.Tensor:
        x = self.tanh(self.first(x)) if "first" in use else x.new_ones(len(x), 7)
        x = self.second(x) + self.again(x) + self.frozen + self.empty.sum()
        x = self.third(x) if "third" in use else x
        return (x * self.scale if "scale" in use else x).square().mean()


def subgroups() -> dict[int, dist.ProcessGroup]:
    """On a rank: groups of the first 2, 3 and 4 ranks; every rank makes all of them."""
    return {n: dist.new_group([*range(n)]) for n in (2, 3, 4)}


def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step for all ranks together, [b, s] each."""
    return torch.randint(ODD.vocab, (2, SEQUENCES, SEQ), generator=torch.Generator().manual_seed(step)).unbind()


def make_model(seed: int = 0) -> Transformer:
    """Larger weights than at the start of a training: there, attention's gradients are little but rounding errors."""
    model = Transformer(ODD, seed)
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    return model


def grouped(model: nn.Module) -> list[dict]:
    """Two parameter groups: matrices with much weight decay, the others with another rate; the last norm is frozen."""
    model.norm.weight.requires_grad_(False)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    return [{"params": matrices, "weight_decay": 0.3}, {"params": others, "lr": 0.05, "weight_decay": 0.0}]


def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def in_one_process(optimizer_cls, in_groups: bool = False, schedule=None, **kwargs) -> dict[str, list[torch.Tensor]]:
    """Losses, gradients, norms in each step on the whole batch, and the weights after the last."""
    model, found = make_model(), {"losses": [], "gradients": [], "norms": []}
    optimizer = optimizer_cls(grouped(model) if in_groups else model.parameters(), **kwargs)
    scheduler = schedule(optimizer) if schedule else None
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = batches(step)
        step_loss = loss(model(inputs), targets)
        step_loss.backward()
        found["losses"].append(step_loss.detach())
        found["gradients"] += [p.grad.clone() for p in model.parameters() if p.requires_grad]
        found["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
        if scheduler:
            scheduler.step()
    return found | {"weights": [parameter.detach() for parameter in model.parameters()]}


def whole_gradients(zero: ZeroOptimizer, model: nn.Module) -> list[torch.Tensor]:
    """The mean gradients, put together from all ranks' pieces, of the parameters that are trained."""
    zero.finish()
    wholes = {}
    for bucket in zero.gradients:
        wholes.update(zip(bucket.parameters, bucket.layout.gather(bucket.gradient), strict=True))
    return [wholes[parameter] for parameter in model.parameters() if parameter.requires_grad]


def on_ranks(
    group,
    stage: int,
    optimizer_cls,
    *,
    micro_batches: int = 1,
    quiet: bool = True,
    in_groups: bool = False,
    schedule=None,
    as_list: bool = False,
    recomputed: bool | None = None,
    **kwargs,
) -> dict[str, list[torch.Tensor]]:
    """The same by ZeroOptimizer, each rank of the group with its part of the batch, cut into micro-batches.

    quiet: all but the last micro-batch in no_sync(), in stage 1. recomputed: by which variant of checkpoint.
    """
    n, rank = group.size(), group.rank()
    model = make_model(seed=rank)  # other weights than the first rank's
    for block in model.blocks if recomputed is not None else ():
        plain = block.forward
        block.forward = lambda *args, plain=plain: checkpoint(plain, *args, use_reentrant=recomputed)
    options = {"param_groups": grouped(model)} if in_groups else {}
    trained = list(model.parameters()) if as_list else model
    zero = ZeroOptimizer(trained, optimizer_cls, group, stage, **options, **kwargs)
    scheduler = schedule(zero) if schedule else None
    found = {"losses": [], "gradients": [], "norms": []}
    for step in range(STEPS):
        inputs, targets = (part.chunk(n)[rank].chunk(micro_batches) for part in batches(step))
        whole = torch.zeros(())
        for i in range(micro_batches):
            silent = stage == 1 and quiet and i < micro_batches - 1
            with zero.no_sync() if silent else contextlib.nullcontext():
                part_loss = loss(model(inputs[i]), targets[i]) / micro_batches
                part_loss.backward()
            whole += part_loss.detach()
        assert all(parameter.grad is None for parameter in model.parameters())
        dist.all_reduce(whole, group=group)
        found["losses"].append(whole / n)
        found["gradients"] += [gradient.clone() for gradient in whole_gradients(zero, model)]
        found["norms"].append(zero.clip_grad_norm_(MAX_NORM))
        zero.step()
        zero.zero_grad()
        if scheduler:
            scheduler.step()
    zero.wait()
    return found | {"weights": [parameter.detach().clone() for parameter in model.parameters()]}


def differing(found: dict, expected: dict, relative: float = 1e-5) -> list[str]:
    """What is not the same within `relative` of the largest element of each tensor, by name and place."""
    wrong = [f"{key}: {len(found[key])}" for key in expected if len(found[key]) != len(expected[key])]
    for key in expected:
        for i, (ours, theirs) in enumerate(zip(found[key], expected[key], strict=False)):
            error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
            wrong += [f"{key} {i}: {error:.1e}"] * (not error <= relative)
    return wrong


WAYS = [
    {},
    {"bucket_mb": 0.02},
    {"bucket_mb": 0.001, "as_list": True},
    {"bucket_mb": 0.02, "micro_batches": 3},
    {"bucket_mb": 0.02, "micro_batches": 3, "quiet": False},
    {"bucket_mb": 0.02, "micro_batches": 2, "offload": True},
]
ONE_WAY = [{"bucket_mb": 0.02, "recomputed": True}, {"recomputed": False, "bucket_mb": 0.02}]


def training_differs() -> dict[str, list[str]]:
    """On a rank: what differs from one process, by ranks, stage and way of training."""
    expected, found = in_one_process(**ADAM), {}
    for n, group in subgroups().items():
        for stage in (1, 2) if dist.get_rank() < n else ():
            for way in {2: WAYS[:3], 3: WAYS, 4: WAYS[1:4] + ONE_WAY}[n]:  # odd sizes are cut worst by 3
                more = {"micro_batches": 2} if n == 3 and "micro_batches" in way else {}
                found[f"{n} {stage} {way}"] = differing(on_ranks(group, stage, **ADAM, **way | more), expected)
    return found


def test_training_is_that_of_one_process_with_the_whole_batch(ranks):
    """Losses, gradients, norms, weights after 3 clipped steps of AdamW; 2 to 4 ranks; they start from other weights."""
    results = ranks(training_differs)
    assert [len(found) for found in results] == [28, 28, 22, 10]
    assert [{key: wrong for key, wrong in found.items() if wrong} for found in results] == [{}] * 4


OPTIMIZERS = {  # with an eps where an update is a sign: a gradient's rounding error must not become a whole step
    "SGD": {"optimizer_cls": torch.optim.SGD, "lr": 0.5, "momentum": 0.9, "weight_decay": 0.1},
    "Nesterov": {"optimizer_cls": torch.optim.SGD, "lr": 0.5, "momentum": 0.9, "nesterov": True, "foreach": True},
    "Adam": {"optimizer_cls": torch.optim.Adam, "lr": 1e-3, "amsgrad": True},
    "fused": ADAM | {"fused": True},
    "foreach": ADAM | {"foreach": True},
    "Adagrad": {"optimizer_cls": torch.optim.Adagrad, "lr": 0.01, "eps": 1e-3},
    "RMSprop": {"optimizer_cls": torch.optim.RMSprop, "lr": 1e-3, "eps": 1e-3, "momentum": 0.5},
    "NAdam": {"optimizer_cls": torch.optim.NAdam, "lr": 1e-3, "eps": 1e-4},
    "groups": ADAM | {"in_groups": True, "schedule": halved},
    "groups of SGD": {"optimizer_cls": torch.optim.SGD, "lr": 0.5, "in_groups": True, "schedule": halved},
}


def optimizers_differ() -> dict[str, list[str]]:
    """On a rank: what differs from one process with other optimizers, parameter groups and a schedule."""
    group = dist.new_group([0, 1, 2])
    if dist.get_rank() == 3:
        return {}
    return {
        f"{name} {stage}": differing(on_ranks(group, stage, bucket_mb=0.02, **kwargs), in_one_process(**kwargs))
        for name, kwargs in OPTIMIZERS.items()
        for stage in (1, 2)
    }


def test_other_optimizers_parameter_groups_a_schedule_and_a_frozen_parameter(ranks):
    for found in ranks(optimizers_differ)[:3]:
        assert len(found) == 2 * len(OPTIMIZERS) and not any(found.values()), found


def differs_from_pytorch() -> list[str]:
    """On a rank: what differs from ZeroRedundancyOptimizer over DistributedDataParallel."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # takes a second: other workers need not import it

    model, rank = make_model(), dist.get_rank()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    theirs = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    found = {"gradients": [], "norms": [], "weights": []}
    for step in range(STEPS):
        inputs, targets = (part.chunk(4)[rank] for part in batches(step))
        loss(ddp(inputs), targets).backward()
        found["gradients"] += [parameter.grad.clone() for parameter in model.parameters()]
        found["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        theirs.step()
        theirs.zero_grad()
    found["weights"] = [parameter.detach() for parameter in model.parameters()]
    return [wrong for stage in (1, 2) for wrong in differing(on_ranks(dist.group.WORLD, stage, **ADAM), found, 3e-6)]


def test_training_is_that_of_zero_redundancy_optimizer(ranks):
    assert ranks(differs_from_pytorch) == [[]] * 4


# Parameters of 16 bits.


def masters(zero: ZeroOptimizer, model: nn.Module) -> list[torch.Tensor]:
    """The float32 values, put together from all ranks' shards."""
    wholes = {}
    for shard in zero.shards:
        wholes.update(zip(shard.parameters, shard.layout.gather(shard.shard.detach()), strict=True))
    return [wholes[parameter] for parameter in model.parameters()]


def in_16_bits(stage: int, grad_dtype: torch.dtype | None, micro_batches: int, narrowed: bool, group) -> list[str]:
    """On a rank: what differs from one process that has float32 values and sums of the ranks' bfloat16 gradients.

    Both train three steps from the same bfloat16 values; the reference takes ours after each, so nothing adds up.
    narrowed: the parameters are float32 until ZeroOptimizer gets them, and that is what the masters begin with.
    """
    n, rank, wrong = group.size(), group.rank(), []
    model, adam = make_model(seed=rank), {"lr": 1e-3, "eps": 1e-4}  # a rounding error must not become a whole step
    model = model if narrowed else model.bfloat16()
    settings = {"compute_dtype": torch.bfloat16 if narrowed else None, "grad_dtype": grad_dtype, "bucket_mb": 0.02}
    zero = ZeroOptimizer(model, torch.optim.AdamW, group, stage, **settings, **adam)
    first = make_model(seed=0) if narrowed else make_model(seed=0).bfloat16().float()
    same = all(map(torch.equal, masters(zero, model), first.parameters()))
    wrong += ["the masters are not the first rank's values"] * (not same)
    wrong += ["the parameters are wide"] * any(each.dtype != torch.bfloat16 for each in model.parameters())
    alone, exact = copy.deepcopy(model), [nn.Parameter(value) for value in masters(zero, model)]
    optimizer = torch.optim.AdamW(exact, **adam)
    for step in range(STEPS):
        parts = [torch.stack(batches(step))[:, r::n].chunk(micro_batches, 1) for r in range(n)]
        for i in range(micro_batches):
            with zero.no_sync() if stage == 1 and i < micro_batches - 1 else contextlib.nullcontext():
                (loss(model(parts[rank][i][0]), parts[rank][i][1]) / micro_batches).backward()
        ours = [each.float() for each in whole_gradients(zero, model)]
        for each in exact:
            each.grad = torch.zeros_like(each)
        for inputs, targets in (part for of_rank in parts for part in of_rank):
            (loss(alone(inputs), targets) / micro_batches).backward()
            for each, parameter in zip(exact, alone.parameters(), strict=True):
                each.grad += parameter.grad.float() / n
                parameter.grad = None
        tolerance = 1e-5 if grad_dtype else 0.03  # of bfloat16 sums: a rounding is up to 2**-9
        gradients = {"gradients": [each.grad for each in exact]}
        wrong += differing({"gradients": ours}, gradients, tolerance)
        if not grad_dtype:  # from here on as ours: a step of AdamW's is a sign
            for each, gradient in zip(exact, ours, strict=True):
                each.grad = gradient
        zero.step()
        zero.zero_grad()
        optimizer.step()
        model.state_dict()  # waits
        whole = masters(zero, model)
        wrong += differing({"masters": whole}, {"masters": [each.detach() for each in exact]})
        rounded = all(torch.equal(m.bfloat16(), p) for m, p in zip(whole, model.parameters(), strict=True))
        wrong += ["the parameters are not the rounded masters"] * (not rounded)
        with torch.no_grad():
            for copied, each, parameter, value in zip(
                alone.parameters(), exact, model.parameters(), whole, strict=True
            ):
                copied.copy_(parameter)
                each.copy_(value)
    return wrong


def all_in_16_bits() -> dict[str, list[str]]:
    group = dist.new_group([0, 1, 2])
    if dist.get_rank() == 3:
        return {}
    ways = [(s, d, m, m == s) for s in (1, 2) for d in (torch.float32, None) for m in (1, 2)]
    return {str(way): in_16_bits(*way, group) for way in ways}


def test_bfloat16_parameters_have_float32_masters_and_may_sum_gradients_in_float32(ranks):
    """With grad_dtype float32, gradients and masters are within 1e-5 of sums in float32; without, gradients within 3%
    of their largest element, and what the optimizer makes of them within 1e-5.
    """
    for found in ranks(all_in_16_bits)[:3]:
        assert len(found) == 8 and not any(found.values()), found


# What is sent, stored, and when.


def sent_and_stored() -> list[str]:
    """On a rank: what is wrong with the traffic of a step, and with the bytes that a rank keeps."""
    wrong, (inputs, targets) = [], batches(0)
    for n, group in subgroups().items():
        for stage in (1, 2) if dist.get_rank() < n else ():
            for dtype, grad_dtype, bucket_mb in (
                (torch.float32, None, 0.02),
                (torch.bfloat16, None, 0.01),
                (torch.bfloat16, torch.float32, 25),
            ):
                about = f"{n} ranks, stage {stage}, {dtype}, {grad_dtype}, {bucket_mb}"
                model = make_model().to(dtype)
                psi, size = sum(p.numel() for p in model.parameters()), dtype.itemsize
                options = {"grad_dtype": grad_dtype, "bucket_mb": bucket_mb, "fused": True}
                zero = ZeroOptimizer(model, torch.optim.AdamW, group, stage, **options)
                with count_traffic() as traffic:
                    loss(model(inputs), targets).backward()
                    zero.step()
                    zero.zero_grad()
                    model(inputs)
                buckets = len(zero.gradients)
                padded = sum(shard.layout.padded for shard in zero.shards)
                unaligned = [shard.layout.shard_numel for shard in zero.shards if shard.layout.shard_numel % 8]
                wrong += [f"{about}: pieces of {unaligned}, no multiples of 16 bytes"] * bool(unaligned)
                largest = max(shard.layout.padded for shard in zero.shards)
                grad_size = (grad_dtype or dtype).itemsize
                exact = {
                    "reduce_scatter": grad_size * padded * (n - 1) // n,
                    "all_gather": size * padded * (n - 1) // n,
                }
                found = {name: traffic.select(name, (*range(n),)).bytes for name in exact}
                wrong += [f"{about}: sent {found}, not {exact}"] * (found != exact)
                wrong += [f"{about}: {traffic.calls} calls, {buckets} buckets"] * (traffic.calls != 2 * buckets)
                wrong += [f"{about}: {buckets} buckets"] * ((buckets > 2) != (bucket_mb < 1))
                wrong += [f"{about}: {padded} elements for {psi}"] * (not 0 <= padded - psi < 8 * n * buckets)

                states = [v for s in zero.optimizer.state.values() for v in s.values() if v.dim()]
                values = {shard.values.untyped_storage() for shard in zero.shards}
                pool = {b.pool for b in zero.gradients if b.pool}
                whole = [buffer for each in pool for buffer in each.free]
                bytes_of = {
                    "parameters": stored(p for p in model.parameters()),
                    "optimizer states": stored(states),
                    "masters": stored(s.shard for s in zero.shards) if dtype == torch.bfloat16 else 0,
                    "gradients": stored([b.gradient for b in zero.gradients] + whole),
                }
                expected = {
                    "parameters": size * padded,
                    "optimizer states": 8 * padded // n,
                    "masters": 4 * padded // n if dtype == torch.bfloat16 else 0,
                    "gradients": grad_size * (padded if stage == 1 else padded // n + 2 * largest),
                }
                wrong += [f"{about}: keeps {bytes_of}, not {expected}"] * (bytes_of != expected)
                in_place = all(s.shard.untyped_storage() in values for s in zero.shards)
                wrong += [f"{about}: a master in place"] * (in_place != (dtype == torch.float32))
                wrong += [f"{about}: {len(whole)} whole buffers"] * (len(whole) != (2 if stage == 2 else 0))
    return wrong


def stored(tensors) -> int:
    """Bytes of the storages behind tensors, each once."""
    return sum({s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}.values())


def test_a_step_sends_twice_all_parameters_and_a_rank_keeps_an_nth_of_the_states(ranks):
    """To the byte: reduce-scatter and all-gather of (N-1)/N of the padded buffers; states, masters, gradients kept."""
    assert ranks(sent_and_stored) == [[]] * 4


def peaks() -> dict[int, float]:
    """On a rank: the peak of making a model of 8 layers and of two steps, in layers."""
    found, x = {}, torch.ones(1, 300)
    for stage in (1, 2):
        with MemoryProfile(nn.Linear(1, 1)) as profile:
            model = nn.Sequential(*(nn.Linear(300, 300, bias=False) for _ in range(8)))  # 360 kB each
            zero = ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1, bucket_mb=0.36)
            for _ in range(2):
                model(x).sum().backward()
                zero.step()
                zero.zero_grad()
        found[stage] = sum(profile.peak().values()) / 360_000
    return found


def test_stage_2_has_two_whole_gradients_at_a_time_and_stage_1_all(ranks):
    """Measured, without the copies that gloo makes: 8 weights; 8 gradients, or 8 quarters and two; the one that
    backward makes; little else. The least of four measurements: gloo's thread may keep what it has sent last, here the
    weight that the constructor has sent before it moved it, until it is given time again.
    """
    tries = [ranks(peaks) for _ in range(4)]
    for rank in range(4):
        least = {stage: min(found[rank][stage] for found in tries) for stage in (1, 2)}
        assert 17 <= least[1] < 17.2 and 13 <= least[2] < 13.2, (rank, least)


def weights_on_their_way() -> list[str]:
    """On a rank: which weights of an attention are on their way when its forward begins, after a step."""
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.MultiheadAttention(16, 2, bias=False)])})
    zero, attention = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, bucket_mb=1e-6), model["blocks"][0]
    found, x = [], torch.ones(3, 1, 16)

    def note(*_):
        waiting = {parameter for shard in zero.shards if shard.work for parameter in shard.parameters}
        found.extend(name for name, parameter in attention.named_parameters() if parameter in waiting)

    attention.register_forward_pre_hook(note)
    attention(x, x, x)[0].sum().backward()
    zero.step()
    found.clear()
    attention(x, x, x)
    return found


def test_a_block_waits_for_weights_that_it_uses_without_calling_their_layer(ranks):
    """nn.MultiheadAttention multiplies with out_proj.weight and never calls out_proj."""
    assert ranks(weights_on_their_way) == [[]] * 4


def order_of_issue(stage: int) -> dict[str, list]:
    """On a rank: how many reduce-scatters have started when backward leaves each of 6 layers; which values are on
    their way after step(), and when forward reaches each layer.
    """
    model, seen, gathered = nn.Sequential(*(nn.Linear(50, 50, bias=False) for _ in range(6))), [], []  # 10 kB
    zero = ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1, bucket_mb=0.0201)
    x, plain = torch.ones(3, 50, requires_grad=True), OptimizerShard.gather
    for layer in model:
        layer.register_full_backward_hook(lambda *_: seen.append(traffic.calls))

    def gather(shard: OptimizerShard) -> None:
        gathered.append(next(i for i, layer in enumerate(model) if layer.weight in set(shard.parameters)))
        plain(shard)

    def on_their_way() -> list[int]:
        waiting = {parameter for shard in zero.shards if shard.work for parameter in shard.parameters}
        return [i for i, layer in enumerate(model) if layer.weight in waiting]

    found = {}
    with count_traffic() as traffic:
        model(x).sum().backward()
        found["reduce-scatters at each layer"] = [*seen, traffic.calls]
        try:
            OptimizerShard.gather = gather
            zero.step()
        finally:
            OptimizerShard.gather = plain
        found["gathered"], found["calls"] = gathered, traffic.calls
    found["after step"], found["at each layer"] = on_their_way(), []
    for layer in model:
        layer.register_forward_pre_hook(lambda *_: found["at each layer"].append(on_their_way()))
    model(x)
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_reduce_scatters_start_in_backward_and_all_gathers_end_in_the_next_forward(ranks, stage):
    """A layer's own gradients come before its hook or after it: so its own reduce-scatter may or may not be counted."""
    for found in ranks(order_of_issue, stage):
        *layers, end = found["reduce-scatters at each layer"]
        assert end == 3 and all(i // 2 <= calls <= (i + 1) // 2 for i, calls in enumerate(layers)), found
        assert found["gathered"] == [0, 2, 4] and found["calls"] == 6, "first layers first"
        assert found["after step"] == [0, 1, 2, 3, 4, 5]
        rest = [[2, 3, 4, 5]] * 2 + [[4, 5]] * 2 + [[]] * 2
        assert found["at each layer"] == rest, "a bucket is waited for by the first layer that needs it"


def steps_without_reading() -> None:
    inputs, targets = batches(0)
    for stage in (1, 2):
        for kwargs in ({"optimizer_cls": torch.optim.SGD, "momentum": 0.9}, ADAM | {"fused": True}):
            model = make_model().bfloat16()
            zero = ZeroOptimizer(model, stage=stage, bucket_mb=0.01, **kwargs)
            with NoHostReads():
                for _ in range(2):
                    for _ in range(2):
                        loss(model(inputs), targets).backward()
                    zero.clip_grad_norm_(1.0)
                    zero.step()
                    zero.zero_grad()


def test_a_step_reads_no_value_on_the_host(ranks):
    ranks(steps_without_reading)


# Parameters of all kinds.

USES = {
    "all": [ALL] * 4,
    "unused on one rank": [ALL] * 2 + ["second third scale"] + [ALL],
    "others on each rank": ["first second", "second third", "second scale", "first second third"],
    "unused on all": ["second third"] * 4,
    "one rank alone": ["second", "second third", "second", "second"],
}


def odd_loss(model: Odd, use: str, seed: int) -> torch.Tensor:
    return model(torch.rand(4, 5, generator=torch.Generator().manual_seed(seed)), use)


def unused() -> list[str]:
    """On a rank: what differs from steps by the mean of all ranks' gradients, computed here, with a decay of weights;
    in the last step all is used.
    """
    wrong, rank = [], dist.get_rank()
    for name, uses in USES.items():
        for stage, bucket_mb, rounds in ((1, 25, 1), (1, 5e-5, 2), (2, 25, 2), (2, 5e-5, 1), (2, 5e-5, 3)):
            model, alone = Odd(rank), Odd(0)
            options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
            zero = ZeroOptimizer(model, torch.optim.SGD, stage=stage, bucket_mb=bucket_mb, **options)
            sgd = torch.optim.SGD(alone.parameters(), **options)
            for step in range(3):
                used = uses if step < 2 else USES["all"]
                for i in range(rounds):
                    odd_loss(model, used[rank], rank + step + 10 * i).backward()
                    (sum(odd_loss(alone, used[r], r + step + 10 * i) for r in range(4)) / 4).backward()
                zero.step()
                sgd.step()
                zero.wait()
                for (key, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
                    same = torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
                    wrong += [f"{name}, stage {stage}, {bucket_mb}, step {step}: {key}"] * (not same)
                zero.zero_grad()
                sgd.zero_grad()
    return wrong


def test_a_parameter_gets_the_mean_if_any_rank_used_it_and_stays_as_it_is_otherwise(ranks):
    """The model also has a shared weight, an empty parameter, a scalar and others smaller than the world size."""
    assert ranks(unused) == [[]] * 4


def sums_of_zeros() -> dict[str, list[bool]]:
    """On a rank: by dtype, whether a sum of -0.0 over the ranks is taken for unused; with +0.0 on rank 2; with 1."""
    found = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        found[str(dtype)] = []
        for other in (-0.0, 0.0, 1.0):
            parameters = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (5, 11)]
            buffer = GradientBuffer(parameters, FlatLayout(parameters, dist.group.WORLD))
            buffer.attach(torch.empty(buffer.layout.padded, dtype=dtype))
            if dist.get_rank() == 2:
                parameters[1].grad = torch.full((11,), other, dtype=dtype)
                buffer.store(parameters[1])
            buffer.fill_missing()
            shard = parameters[0].new_empty(buffer.layout.shard_numel)
            buffer.send(shard).wait()
            pieces = buffer.layout.local_views(shard * 0.25)
            found[str(dtype)] += [bool(is_unused(piece)) for piece in pieces if piece.numel()]
    return found


def test_a_sum_of_negative_zeros_is_told_from_any_other(ranks):
    """Rank 0 has 4 elements of the first parameter, rank 1 the last one and 3 of the second."""
    for rank, found in enumerate(ranks(sums_of_zeros)):
        wanted = {0: [True] * 3, 1: [True, True, True, False, True, False]}.get(rank, [True, False, False])
        assert all(each == wanted for each in found.values()), (rank, found)


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
    """On a rank: weights after steps in which each rank runs other layers, in its own order, or none."""
    found = []
    for stage in (1, 2):
        torch.manual_seed(0)
        model = Branches()
        zero = ZeroOptimizer(model, torch.optim.SGD, stage=stage, bucket_mb=0.0008, lr=0.1)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(10):
            order = torch.randperm(8, generator=generator)[: int(torch.randint(0, 9, (), generator=generator))]
            if len(order):
                model(torch.ones(2, 9), order.tolist()).backward()
            zero.step()
            zero.zero_grad()
            zero.wait()
            found.append([parameter.tolist() for parameter in model.parameters()])
        free = [len(bucket.pool.free) for bucket in zero.gradients if bucket.pool]
        assert free == [2] * len(zero.gradients) * (stage == 2), "a buffer that an order took more than two is kept"
    return found


def test_ranks_that_run_other_layers_in_another_order_or_have_no_batch_do_not_hang_and_agree(ranks):
    first, *others = ranks(other_orders)
    assert all(other == first for other in others) and first[0] != first[9]
    torch.testing.assert_close(torch.tensor(first[9][0]), torch.tensor(first[19][0]), rtol=1e-5, atol=1e-7)


def own_groups(stage: int) -> dict:
    """On a rank: `third` is shared by ranks 0 and 2, and by 1 and 3: one clipped step."""
    pairs, rank = [dist.new_group([0, 2]), dist.new_group([1, 3])], dist.get_rank()
    model = Odd(seed=rank)
    placement_of(model.third.weight).reduce_group = pairs[rank % 2]
    zero = ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=1.0)
    start = [p.detach().clone() for p in model.parameters()]
    odd_loss(model, ALL, rank).backward()
    norm = zero.clip_grad_norm_(1e-3)
    with count_traffic() as traffic:
        zero.step()
        zero.wait()
    alone = Odd()
    for parameter, value in zip(alone.parameters(), start, strict=True):
        parameter.data.copy_(value)
    odd_loss(alone, ALL, rank).backward()
    names = [name for name, _ in model.named_parameters()]
    return {
        "start": dict(zip(names, start, strict=True)),
        "moved": {name: p.detach() - s for (name, p), s in zip(model.named_parameters(), start, strict=True)},
        "own": {name: p.grad for name, p in alone.named_parameters()},
        "norm": norm,
        "groups": {record.group for record in traffic.records},
    }


@pytest.mark.parametrize("stage", [1, 2])
def test_a_parameter_with_a_group_of_its_own_is_shared_out_there_and_counts_once_in_the_norm(ranks, stage):
    """Two pairs have other values of `third`: the norm is that of all four ranks' different parameters together."""
    results = ranks(own_groups, stage)
    means = {name: sum(found["own"][name] for found in results) / 4 for name in ("first.weight", "scale")}
    thirds = [(results[i]["own"]["third.weight"] + results[i + 2]["own"]["third.weight"]) / 4 for i in (0, 1)]
    trained = [name for name, gradient in results[0]["own"].items() if gradient is not None and "third" not in name]
    gradients = [sum(found["own"][name] for found in results) / 4 for name in trained] + thirds
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    for rank, found in enumerate(results):
        assert torch.equal(found["start"]["third.weight"], Odd(rank % 2).third.weight)
        assert torch.equal(found["start"]["first.weight"], Odd(0).first.weight)
        assert found["norm"].item() == pytest.approx(norm.item(), rel=1e-5)
        assert found["groups"] == {(rank % 2, rank % 2 + 2), (0, 1, 2, 3)}
        for name, gradient in (means | {"third.weight": thirds[rank % 2]}).items():
            moved = -gradient * 1e-3 / norm
            torch.testing.assert_close(found["moved"][name], moved, rtol=1e-3, atol=2e-7)  # a difference of float32


# States.


def train(model: nn.Module, zero, group, steps: range) -> None:
    for step in steps:
        inputs, targets = (part.chunk(group.size())[group.rank()] for part in batches(step))
        loss(model(inputs), targets).backward()
        zero.step()
        zero.zero_grad()


def copied(state: dict) -> dict:
    """As from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def different(one, two, where: str = "") -> list[str]:
    """Where two states are not the same, bit by bit."""
    if isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
        return [found for key in one for found in different(one[key], two[key], f"{where}.{key}")]
    if isinstance(one, (list, tuple)) and len(one) == len(two):
        return [
            found for i, pair in enumerate(zip(one, two, strict=True)) for found in different(*pair, f"{where}.{i}")
        ]
    if torch.is_tensor(one) and torch.is_tensor(two):
        return [where] * (one.dtype != two.dtype or not torch.equal(one, two))
    return [where] * (one != two)


def resumed(dtype: torch.dtype, stage: int) -> dict[str, list[str]]:
    """On a rank: what goes wrong when a training on 4 ranks goes on after 2 steps on 4, 3, 2 and one."""
    groups, rank, found = subgroups(), dist.get_rank(), {}
    kwargs = {"lr": 1e-3, "fused": True}
    model = make_model().to(dtype)
    zero = ZeroOptimizer(model, torch.optim.AdamW, groups[4], stage, bucket_mb=0.02, **kwargs)
    train(model, zero, groups[4], range(2))
    weights, state = copied(model.state_dict()), copied(zero.state_dict())
    kept = copied(state)
    of_adam = {"step", "exp_avg", "exp_avg_sq"} | ({"master"} if dtype == torch.bfloat16 else set())
    parameters = list(model.parameters())
    found["state"] = [f"{i}" for i, p in enumerate(parameters) if state["state"][i].keys() != of_adam] + [
        f"{name} of {i}"
        for i, p in enumerate(parameters)
        for name in of_adam - {"step"}
        if state["state"][i][name].shape != p.shape or state["state"][i][name].dtype != torch.float32
    ]
    train(model, zero, groups[4], range(2, 4))
    expected, later = copied(model.state_dict()), copied(zero.state_dict())
    for n, group in groups.items():
        for other_stage in (1, 2) if rank < n else ():
            again = make_model(seed=5).to(dtype)
            mb = 0.02 if n == 4 else 0.005  # gloo adds in an order that depends on the place in the buffer
            zero = ZeroOptimizer(again, torch.optim.AdamW, group, other_stage, bucket_mb=mb, **kwargs | {"lr": 7.0})
            again.load_state_dict(weights)
            zero.load_state_dict(state)
            about = f"{n} ranks, stage {other_stage}"
            found[f"{about}: loaded"] = different(zero.state_dict(), kept) + different(again.state_dict(), weights)
            train(again, zero, group, range(2, 4))
            if n == 4:
                found[f"{about}: bits"] = different(again.state_dict(), expected) + different(zero.state_dict(), later)
            elif dtype == torch.float32:
                found[f"{about}: goes on"] = differing(
                    {"weights": list(again.state_dict().values())}, {"weights": list(expected.values())}
                )
    found["the state that was loaded"] = different(state, kept)
    if dtype == torch.float32:
        alone = make_model(seed=6)
        alone.load_state_dict(weights)
        adam = torch.optim.AdamW(alone.parameters(), **kwargs)
        adam.load_state_dict(copied(state))
        for step in range(2, 4):
            inputs, targets = batches(step)
            loss(alone(inputs), targets).backward()
            adam.step()
            adam.zero_grad()
        found["alone"] = differing({"weights": list(alone.state_dict().values())}, {"weights": list(expected.values())})
        theirs = copied(adam.state_dict())
        again = make_model(seed=7)
        zero = ZeroOptimizer(again, torch.optim.AdamW, groups[4], stage, bucket_mb=0.02, **kwargs)
        again.load_state_dict(alone.state_dict())
        zero.load_state_dict(theirs)
        found["and back"] = different(zero.state_dict(), theirs)
    return found


@pytest.mark.parametrize(("dtype", "stage"), [(torch.float32, 1), (torch.float32, 2), (torch.bfloat16, 2)])
def test_a_state_loads_at_another_world_size_stage_and_bucket_size_and_in_one_process(ranks, dtype, stage):
    """Loaded bit by bit; goes on bit by bit at the same world size, else within 1e-5 (float32)."""
    for found in ranks(resumed, dtype, stage):
        assert len(found) >= 4 and not any(found.values()), found


def other_states() -> dict[str, list[str]]:
    """On a rank: states of optimizers with other states, of odd parameters, groups, and before the first step."""
    found, group = {}, dist.group.WORLD
    for name, kwargs in OPTIMIZERS.items():
        kwargs = {key: value for key, value in kwargs.items() if key not in ("in_groups", "schedule")}
        model, again, alone = (Odd(seed) for seed in (0, 1, 2))
        zero = ZeroOptimizer(model, bucket_mb=1e-5, **kwargs)
        found[f"{name}, new"] = different(zero.state_dict()["state"], {}) if name != "Adagrad" else []
        for _ in range(2):
            odd_loss(model, ALL, 3).backward()
            zero.step()
            zero.zero_grad()
        state = copied(zero.state_dict())
        for bucket_mb in (1e-5, 1e-4):
            other = ZeroOptimizer(again, group=group, stage=2, bucket_mb=bucket_mb, **kwargs)
            again.load_state_dict(model.state_dict())
            other.load_state_dict(state)
            found[f"{name}, {bucket_mb}"] = different(other.state_dict(), state)
            del other
        other = ZeroOptimizer(again, stage=2, bucket_mb=1e-5, **kwargs)
        other.load_state_dict(state)
        cls = kwargs.pop("optimizer_cls")
        plain = cls([p for p in alone.parameters() if p.requires_grad], **kwargs)
        alone.load_state_dict(model.state_dict())
        plain.load_state_dict(copied(state))
        for net, optimizer in ((again, other), (alone, plain)):
            odd_loss(net, ALL, 4).backward()
            optimizer.step()
        ours, theirs = list(again.state_dict().values()), list(alone.state_dict().values())
        close = [torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(ours, theirs, strict=True)]
        found[f"{name}, alone"] = [] if all(close) else [str(close)]
    return found


def test_states_of_other_optimizers_and_of_odd_parameters(ranks):
    """A bucket of a scalar alone has a state of one element, which is no counter."""
    for found in ranks(other_states):
        assert not any(found.values()), {key: wrong for key, wrong in found.items() if wrong}


def bad_states() -> dict:
    """On a rank: what bad states raise, and whether they changed anything."""
    model = make_model()
    zero = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-3, bucket_mb=0.02)
    train(model, zero, dist.group.WORLD, range(1))
    good = copied(zero.state_dict())
    shorter, wrong_shape, later_shape = (copied(good) for _ in range(3))
    shorter["param_groups"][0]["params"].pop()
    wrong_shape["state"][0]["exp_avg"] = torch.zeros(2, 2)
    later_shape["param_groups"][0]["lr"] = 5.0
    later_shape["state"][19]["exp_avg_sq"] = torch.zeros(31)
    states = {"none": {}, "shorter": shorter, "shape": wrong_shape, "later": later_shape, "model": model.state_dict()}
    found = {name: said(lambda state=state: zero.load_state_dict(state)) for name, state in states.items()}
    return found | {"changed": different(zero.state_dict(), good)}


def test_a_bad_state_is_one_line_and_changes_nothing(ranks):
    for found in ranks(bad_states):
        assert found.pop("changed") == []
        assert all(text.startswith("ValueError: ") and "\n" not in text for text in found.values()), found
        assert "not the state of an optimizer" in found["none"] and "not the state of an optimizer" in found["model"]
        assert "parameter groups of [19] parameters, this optimizer of [20]" in found["shorter"]
        assert "exp_avg of parameter 0 has shape [2, 2], the parameter [53, 30]" in found["shape"]
        assert "exp_avg_sq of parameter 19" in found["later"]


def loaded_models() -> list[str]:
    """On a rank: what is wrong when the module gets other values after it was wrapped, in the midst of a gather."""
    wrong = []
    for dtype, offload in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, False)):
        for stage in (1, 2):
            model, other = make_model().to(dtype), make_model(seed=3).to(dtype)
            zero = ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1, bucket_mb=0.02, offload=offload)
            train(model, zero, dist.group.WORLD, range(1))
            model.load_state_dict(other.state_dict())  # while its values are on their way
            same = all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
            wrong += [f"{dtype} {stage}: the values"] * (not same)
            follow = all(
                torch.equal(m, p.float()) for m, p in zip(masters(zero, model), other.parameters(), strict=True)
            )
            wrong += [f"{dtype} {stage}: the masters"] * (not follow)
            fresh = ZeroOptimizer(other, torch.optim.SGD, stage=stage, lr=0.1, bucket_mb=0.02)
            for net, optimizer in ((model, zero), (other, fresh)):
                train(net, optimizer, dist.group.WORLD, range(1, 2))
            wrong += different(model.state_dict(), other.state_dict(), f"{dtype} {stage}: goes on")
    return wrong


def test_a_model_loaded_after_it_was_wrapped_takes_its_masters_along(ranks):
    assert ranks(loaded_models) == [[]] * 4


def offloaded() -> list[str]:
    """On a rank: what differs from no offload, and what of the optimizer shares memory with the model."""
    wrong = []
    for dtype in (torch.float32, torch.bfloat16):
        for stage in (1, 2):
            models = [make_model().to(dtype) for _ in range(2)]
            pair = [
                ZeroOptimizer(m, torch.optim.AdamW, stage=stage, lr=1e-3, bucket_mb=0.02, offload=o)
                for m, o in zip(models, (True, False), strict=True)
            ]
            for model, zero in zip(models, pair, strict=True):
                train(model, zero, dist.group.WORLD, range(3))
            wrong += different(models[0].state_dict(), models[1].state_dict(), f"{dtype} {stage}")
            wrong += different(pair[0].state_dict(), pair[1].state_dict(), f"{dtype} {stage}")
            of_model = {p.untyped_storage().data_ptr() for p in models[0].parameters()}
            of_optimizer = [s.shard for s in pair[0].shards]
            of_optimizer += [v for s in pair[0].optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
            shared = any(tensor.untyped_storage().data_ptr() in of_model for tensor in of_optimizer)
            wrong += [f"{dtype} {stage}: memory of the model"] * shared
            wrong += [f"{dtype} {stage}: {t.device}" for t in of_optimizer if t.device.type != "cpu"]
            wrong += [f"{dtype} {stage}: a gradient stays"] * any(s.shard.grad is not None for s in pair[0].shards)
    return wrong


def test_offload_changes_no_bit_and_shares_no_memory_with_the_model(ranks):
    assert ranks(offloaded) == [[]] * 4


# Lifetime.


def lives() -> dict[str, bool]:
    """On a rank: whether optimizer and model go when they should."""
    found = {}
    for stage in (1, 2):
        model = make_model()
        zero = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, bucket_mb=0.02)
        train(model, zero, dist.group.WORLD, range(2))
        gc.collect()
        gc.disable()
        gone, buffers = weakref.ref(zero), [weakref.ref(b.gradient) for b in zero.gradients]
        states = [weakref.ref(v) for s in zero.optimizer.state.values() for v in s.values()]
        del zero
        found[f"{stage}: optimizer goes at once"] = gone() is None
        found[f"{stage}: so do its buffers"] = not any(ref() is not None for ref in buffers + states)
        hooks = [p._post_accumulate_grad_hooks for p in model.parameters()]
        hooks += [module._forward_pre_hooks for module in model.modules()]
        hooks += [model._state_dict_pre_hooks, model._load_state_dict_post_hooks]
        found[f"{stage}: hooks go"] = not any(hooks)
        with count_traffic() as traffic:
            inputs, targets = batches(0)
            loss(model(inputs), targets).backward()
        alone = traffic.calls == 0 and all(p.grad is not None for p in model.parameters())
        found[f"{stage}: model alone trains as ever"] = alone
        model.zero_grad()
        zero = ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1)
        twin = copy.deepcopy(model)
        loss(twin(inputs), targets).backward()
        found[f"{stage}: a copy is free"] = all(p.grad is not None for p in twin.parameters())
        gone = weakref.ref(model)
        del zero, model, hooks
        found[f"{stage}: model goes"] = gone() is None
        gc.enable()
    return found


def test_optimizer_and_model_go_without_the_garbage_collector_and_copies_are_free(ranks):
    for found in ranks(lives):
        assert all(found.values()), found


def replaced() -> list[str]:
    """On a rank: an optimizer that goes, or steps twice, while values are on their way; a new one at once."""
    wrong, model, alone = [], Odd(), Odd()
    sgd = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(20):
        zero = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, bucket_mb=5e-5)
        odd_loss(model, ALL, 1).backward()
        zero.step()
        zero.step()  # by the same gradient, as torch.optim
        del zero
        odd_loss(alone, ALL, 1).backward()
        sgd.step()
        sgd.step()
        sgd.zero_grad()
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        wrong += [name] * (not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6))
    return wrong


def test_an_optimizer_that_goes_leaves_whole_values(ranks):
    assert ranks(replaced) == [[]] * 4


def forgotten() -> list[str]:
    """On a rank: gradients that zero_grad() has forgotten, at whatever point of a step, are not in the next one."""
    wrong = []
    for stage in (1, 2):
        for point in ("after a round", "after two rounds", "in no_sync after a round", "in no_sync", "after step"):
            if stage == 2 and "no_sync" in point:
                continue
            model = Odd()
            zero = ZeroOptimizer(model, torch.optim.SGD, stage=stage, lr=0.1, bucket_mb=5e-5)
            if point != "in no_sync":
                odd_loss(model, ALL, 1).backward()
            if point == "after two rounds":
                odd_loss(model, ALL, 2).backward()
            if "no_sync" in point:
                with zero.no_sync():
                    odd_loss(model, ALL, 2).backward()
            if point == "after step":
                zero.step()
            zero.zero_grad()
            alone = Odd()
            alone.load_state_dict(model.state_dict())
            odd_loss(model, ALL, 3).backward()
            odd_loss(alone, ALL, 3).backward()
            for (name, parameter), ours in zip(
                ((n, p) for n, p in alone.named_parameters() if p.requires_grad),
                whole_gradients(zero, model),
                strict=True,
            ):
                same = torch.allclose(ours, parameter.grad, rtol=1e-5, atol=1e-7)
                wrong += [f"stage {stage}, {point}: {name}"] * (not same)
    return wrong


def test_zero_grad_forgets_gradients_at_any_point_of_a_step(ranks):
    assert ranks(forgotten) == [[]] * 4


def parameters_as_in_torch() -> list[str]:
    """On a rank: parameters given in torch.optim's other ways; more than `float32`."""
    wrong = []
    for make in (
        lambda m: (m.parameters(), {}),
        lambda m: ([{"params": list(m.parameters())}], {}),
        lambda m: (m, {"param_groups": [{"params": m.first.weight}, {"params": m.second.parameters(), "lr": 0.2}]}),
    ):
        model = Odd().double()
        given, options = make(model)
        zero = ZeroOptimizer(given, torch.optim.SGD, lr=0.2, **options)
        wrong += ["dtype"] * any(shard.shard.dtype != torch.float64 for shard in zero.shards)
        alone = Odd().double()
        x = torch.rand(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        model(x).backward()
        alone(x).backward()
        zero.step()
        zero.wait()
        for group in zero.param_groups:
            for p in group["params"]:
                name = next(name for name, q in model.named_parameters() if q is p)
                theirs = alone.get_parameter(name)
                wrong += [name] * (not torch.allclose(p, theirs - 0.2 * theirs.grad, rtol=1e-12))
    return wrong


def test_parameters_are_given_as_to_torch_optim_and_may_have_64_bits(ranks):
    assert ranks(parameters_as_in_torch) == [[]] * 4


# Mistakes.


def wrong_arguments() -> dict[str, str]:
    rank, small, sgd = dist.get_rank(), nn.Linear(3, 3), torch.optim.SGD
    frozen = nn.Linear(3, 3).requires_grad_(False)
    some_frozen, all_but_one = nn.Linear(3, 3), nn.Linear(3, 3)
    some_frozen.weight.requires_grad_(rank != 3)
    all_but_one.requires_grad_(rank != 1)
    halves = [{"params": [small.weight]}, {"params": [small.bias]}]
    calls = {
        "stage": lambda: ZeroOptimizer(small, sgd, stage=3),
        "bucket_mb": lambda: ZeroOptimizer(small, sgd, bucket_mb=0),
        "nan": lambda: ZeroOptimizer(small, sgd, bucket_mb=float("nan")),
        "frozen": lambda: ZeroOptimizer(frozen, sgd),
        "empty": lambda: ZeroOptimizer([], sgd),
        "meta": lambda: ZeroOptimizer(nn.Linear(3, 3, device="meta"), sgd),
        "twice": lambda: ZeroOptimizer(small, sgd, param_groups=[{"params": [small.weight]}] * 2),
        "foreign": lambda: ZeroOptimizer(small, sgd, param_groups=[{"params": [small.weight, nn.Linear(3, 3).bias]}]),
        "LBFGS": lambda: ZeroOptimizer(small, torch.optim.LBFGS),
        "Adafactor": lambda: ZeroOptimizer(small, torch.optim.Adafactor),
        "Muon": lambda: ZeroOptimizer(nn.Linear(3, 3, bias=False), torch.optim.Muon),
        "SparseAdam": lambda: ZeroOptimizer(small, torch.optim.SparseAdam),
        "shape": lambda: ZeroOptimizer(nn.Linear(3, 4 if rank == 2 else 3), sgd),
        "stages": lambda: ZeroOptimizer(small, sgd, stage=2 if rank == 2 else 1),
        "one bad stage": lambda: ZeroOptimizer(small, sgd, stage=3 if rank == 2 else 1),
        "one frozen": lambda: ZeroOptimizer(some_frozen, sgd),
        "all frozen on one": lambda: ZeroOptimizer(all_but_one, sgd),
        "dtypes": lambda: ZeroOptimizer(small, sgd, grad_dtype=torch.float32 if rank == 2 else None),
        "groups": lambda: ZeroOptimizer(small, sgd, param_groups=halves if rank else [{"params": small.parameters()}]),
        "optimizers": lambda: ZeroOptimizer(small, torch.optim.Adam if rank == 2 else sgd),
    }  # fmt: skip
    return {name: said(call) for name, call in calls.items()}


def test_bad_arguments_are_one_line_on_all_ranks(ranks):
    first, *others = ranks(wrong_arguments)
    assert others == [first] * 3
    assert all(text.startswith("ValueError: ") and "\n" not in text for text in first.values()), first
    parts = {
        "stage": ["stage 3", "1 or 2", "fully_shard"],
        "bucket_mb": ["bucket_mb 0"],
        "nan": ["bucket_mb nan"],
        "frozen": ["no parameter to train"],
        "empty": ["no parameter to train"],
        "meta": ["meta device"],
        "twice": ["in more than one parameter group"],
        "foreign": ["not of the module"],
        "LBFGS": ["LBFGS needs full"],
        "Adafactor": ["Adafactor needs full"],
        "Muon": ["Muon needs full"],
        "SparseAdam": ["SparseAdam needs full"],
        "shape": ["rank 2 has weight [4, 3]"],
        "stages": ["rank 2", "'stage': 2"],
        "one bad stage": ["rank 2", "'stage': 3"],
        "one frozen": ["rank 3 has weight", "to be trained"],
        "all frozen on one": ["rank 1"],
        "dtypes": ["rank 2", "'grad_dtype': torch.float32"],
        "groups": ["rank 1"],
        "optimizers": ["rank 2", "Adam"],
    }
    for name, words in parts.items():
        assert all(word in first[name] for word in words), (name, first[name])


def misuse() -> dict[str, str]:
    found, x = {}, torch.ones(2, 3)
    zero = ZeroOptimizer(module := nn.Linear(3, 3), torch.optim.SGD, stage=2)

    def quiet():
        with zero.no_sync():
            module(x).sum().backward()

    found["no_sync in stage 2"] = said(quiet)
    zero = ZeroOptimizer(module, torch.optim.SGD)
    for name in ("finish", "step"):

        def inside():
            with zero.no_sync():
                module(x).sum().backward()
                getattr(zero, name)()

        found[name] = said(inside)
    with contextlib.suppress(KeyError), zero.no_sync():
        raise KeyError
    found["no_sync ends with an error"] = str(zero.synchronizes)
    table = nn.Embedding(5, 3, sparse=True)
    zero = ZeroOptimizer(table, torch.optim.SGD)
    found["sparse"] = said(lambda: table(torch.tensor([1])).sum().backward())
    table.weight.grad = None
    zero = ZeroOptimizer(module := nn.Linear(3, 3), torch.optim.SGD)
    found["new group"] = said(lambda: zero.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}))
    module(x).sum().backward()
    module.double()
    found["moved"] = said(zero.step)
    return found


def test_misuse_is_one_clear_line(ranks):
    for found in ranks(misuse):
        assert found["no_sync in stage 2"].startswith("RuntimeError: no_sync() keeps unsharded gradients")
        assert found["finish"] == found["step"] and found["step"].startswith("RuntimeError: finish() inside no_sync()")
        assert found["no_sync ends with an error"] == "True"
        assert found["sparse"] == "ValueError: weight has a sparse gradient: use a layer with sparse=False"
        assert not any("\n" in text for text in found.values())
        assert found["new group"].startswith("RuntimeError: no parameter group can be added")
        assert found["moved"].startswith("RuntimeError: parameters have moved")
