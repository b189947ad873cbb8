"""parallelize and the training program on 2, 4 and 16 ranks (on 8: test_eight_ranks) against one process: each pair of
dimensions, and all five. CPU, gloo.
"""

import dataclasses
import functools
import itertools
import json
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from calls import peak_bytes, said, short_text
from course_kit.ranks import Ranks
from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.planner import estimate
from course_lib.collectives.traffic import count_traffic
from course_lib.expert_parallel.mixture import apply_moe
from course_lib.expert_parallel.router import routers_of
from course_lib.five_d.gather_once import GatherOncePerStep
from course_lib.five_d.layouts import Layout, coordinates, groups_along
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import full_weights, parallelize
from course_lib.pipeline.norm import gradients_of
from course_lib.recompute.modes import IGNORED, summed_loss
from course_lib.single_gpu.model import PRESETS, ModelConfig, Transformer
from course_lib.single_gpu.placement import placement_of
from course_lib.single_gpu.training import decay_groups, flops_per_token
from course_lib.tensor_parallel.shards import TensorShard
from course_lib.train import trainer
from course_lib.train.batches import PackedBatches
from course_lib.train.model import named_model
from course_lib.train.program import main, options
from course_lib.zero.full_sharding import FullyShard
from course_lib.zero.sharded_parameters import find_blocks
from split_models import differing, stored

# 97 tokens go on no 2 ranks, 2 K/V heads are copied on 4; 2 layers, embedding and head fill 4 stages.
OF = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=44, vocab=97)
QWEN = {"qkv_bias": True, "qk_norm": True, "head_size": 12, "rope_factor": 4.0, "rope_trained": 8}
MOE = {"experts": 4, "top_k": 2, "ffn_hidden": 12, "shared": 1, "aux_loss_coeff": 0.02, "z_loss_coeff": 0.01}
SEQ, MAX_NORM = 16, 0.5
OPTIMIZERS = {  # eps: a gradient's rounding error must not become a whole step
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.5}),  # norms and biases have none
    "fused": (torch.optim.AdamW, {"lr": 1e-3, "eps": 1e-4, "fused": True}),  # it can skip a step on the device
    "SGD": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),  # unlike AdamW, it does not forgive a wrong scale
}


@dataclasses.dataclass(frozen=True)
class Way:
    """A layout, and what is trained on it."""

    words: str
    moe: bool = False
    tied: bool = False
    optimizer: str = "AdamW"
    batches: tuple[int, ...] = (4, 4)  # sequences of each step
    max_norm: float = MAX_NORM
    like: str = "Llama"  # or "Qwen": biases and norms of q and k, wider heads, and Llama 3.1's positions

    @property
    def layout(self) -> Layout:
        return Layout.parse(self.words)

    @property
    def config(self) -> ModelConfig:
        own = QWEN if self.like == "Qwen" else {}
        return dataclasses.replace(OF, tied=self.tied, layers=6 if self.layout.pp == 4 else 2, **own)


WAYS = {
    2: [
        Way("dp2,zero3", tied=True, batches=(4, 2), like="Qwen"),
        Way("pp2,zb-h2,selective", tied=True),
        Way("tp2,sp,full", tied=True),
        Way("cp2,zero1", optimizer="SGD"),
        Way("dp2,ep2,zero2,mb2", moe=True),
    ],
    4: [
        Way("dp2,ep2,tp2,zero1,sp", moe=True),
        Way("dp2,ep2,tp2,zero2,sp,mb2", moe=True, optimizer="SGD"),
        Way("dp2,ep2,tp2,zero3,sp", moe=True, tied=True),
        Way("dp2,pp2,ep2,zero1,zb-h1", moe=True, tied=True, batches=(8, 4)),
        Way("dp2,pp2,ep2,zero2,zb-v,full", moe=True),
        Way("dp2,pp2,ep2,zero3,interleaved,keep", moe=True, tied=True, optimizer="SGD"),
        Way("dp2,cp2,ep2,zero1,ulysses", moe=True),
        Way("dp2,cp2,ep2,zero2,all_gather,contiguous", moe=True, tied=True),
        Way("dp2,cp2,ep2,zero3", moe=True),
        Way("dp4,zero3,rep2", tied=True, batches=(8, 4, 4)),
        Way("dp2,tp2,sp,zero3,rep2", optimizer="SGD", batches=(4, 4, 2), like="Qwen"),
        Way("dp4,ep2,zero3,rep2", moe=True, batches=(8, 4)),
        Way("dp2,cp2,zero3,rep2,full", batches=(4, 2)),
        Way("dp2,pp2,zero3,keep,rep2", tied=True, optimizer="SGD"),  # each rank has all of its stage
        Way("dp4,ep2,full", moe=True),
        Way("pp2,tp2,sp,dualpipe", tied=True, batches=(4, 6)),
        Way("pp2,tp2,sp,zero1,zb-h1", optimizer="SGD", like="Qwen"),
        Way("pp2,cp2,zero3,zb-v,keep,mb2", tied=True),
        Way("pp2,cp2,zero1,interleaved,contiguous", tied=True, batches=(4, 8)),
        Way("cp2,tp2,sp,zero2,mb2", tied=True, like="Qwen"),
        Way("dp2,pp2,zero2,dualpipe", tied=True, batches=(8, 12)),
        Way("dp2,pp2,zb-h2,selective", optimizer="SGD", batches=(2, 8)),
        Way("tp4,sp,full,mb4", like="Qwen"),
        Way("tp4,mb3", tied=True, batches=(3, 9), like="Qwen"),
        Way("pp4,zb-v", tied=True, batches=(8, 3, 8)),
        Way("pp4,afab,full,mb2", optimizer="SGD", batches=(8, 8)),
    ],
    8: [
        Way("dp2,pp2,tp2,zero3,sp,interleaved,keep", tied=True),
        Way("dp2,cp2,tp2,zero2,sp", optimizer="SGD"),
        Way("pp2,cp2,tp2,zero1,sp,zb-v,mb2", tied=True),
        Way("dp4,ep2,tp2,zero3,sp", moe=True),
        Way("dp4,pp2,zero3,zb-v,keep,rep2", tied=True, optimizer="SGD"),
    ],
    16: [Way("dp2,pp2,cp2,tp2,ep2,zero1,sp", moe=True, tied=True)],
}


def batch_of(step: int, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step, [b, s] each; some targets do not count, of the first sequence more."""
    tokens = torch.randint(97, (sequences, SEQ + 1), generator=torch.Generator().manual_seed(step))
    inputs, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    targets[0, : step + 3] = targets[-1, -1:] = IGNORED
    return inputs, targets


@functools.cache
def one_process(way: Way, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Losses and norms of each step, first gradients and last weights, by name. The balance loss of a mixture is that
    of a micro-batch of all ranks together: it gets the same ones.
    """
    layout, (make, settings) = way.layout, OPTIMIZERS[way.optimizer]
    model, found = Transformer(way.config), {}
    if way.moe:
        apply_moe(model, **MOE)
    optimizer = make(decay_groups(model), **settings)
    for step, sequences in enumerate(way.batches):
        inputs, targets = batch_of(step, sequences)
        m = sequences // (layout.dp * layout.micro_batch)
        for router in routers_of(model):
            router.loss_weight = 1 / m
        optimizer.zero_grad()
        found[f"loss {step}"] = torch.zeros(())
        for rows in torch.arange(sequences).view(layout.dp, m, -1).transpose(0, 1).flatten(1):  # of a micro-batch
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                logits = model(inputs[rows])
            part = summed_loss(logits, targets[rows]) / (targets != IGNORED).sum()
            part.backward()
            found[f"loss {step}"] += part.detach()
        if step == 0:
            named = model.named_parameters(remove_duplicate=False)
            found |= {f"gradient {name}": p.grad.clone() for name, p in named}
        found[f"norm {step}"] = nn.utils.clip_grad_norm_(model.parameters(), way.max_norm)
        optimizer.step()
    return found | {f"weight {name}": p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


def parallel_of(way: Way, dtype: torch.dtype = torch.float32, **more):
    """On a rank: what `parallelize` makes of a way."""
    make, settings = OPTIMIZERS[way.optimizer]
    mesh = build_mesh(way.layout)
    choices = {"moe": MOE if way.moe else None, "dtype": dtype, "optimizer_cls": make}
    return parallelize(way.config, way.layout, mesh, **choices, **settings, **more)


def local_batch(parallel, step: int, sequences: int) -> list[torch.Tensor]:
    """What this rank's dp place has of a batch."""
    return [each.chunk(parallel.layout.dp)[parallel.mesh.dp.rank()] for each in batch_of(step, sequences)]


def whole_gradients(parallel) -> dict[str, torch.Tensor]:
    """Of a layout whose gradients are in .grad: those of this rank's stages, put together over tp. Collective."""
    found = {}
    for stage in parallel.stages.values():
        for name, p in stage.named_parameters(remove_duplicate=False):
            shard = placement_of(p).tensor_shard
            found[f"gradient {name}"] = shard.gather(p.grad) if shard else p.grad.clone()
    return found


def trained(ways: list[Way], dtype: torch.dtype = torch.float32) -> list[tuple[dict[str, torch.Tensor], dict]]:
    """On a rank, of each way: as one_process, of this rank's stages; gradients where they are whole. And its groups."""
    of_all = []
    for way in ways:
        parallel, found = parallel_of(way, dtype), {}
        if way.layout.zero_stage == 0:
            parallel.gradients(*local_batch(parallel, 0, way.batches[0]))
            found |= whole_gradients(parallel)
        for step, sequences in enumerate(way.batches):
            inputs, targets = local_batch(parallel, step, sequences)
            found[f"loss {step}"], found[f"norm {step}"] = parallel.step(inputs, targets, way.max_norm)
        found |= {f"weight {name}": whole for name, whole in full_weights(parallel).items()}
        of_all.append(({name: tensor.clone() for name, tensor in found.items()}, groups_in(parallel.mesh)))
    return of_all


def check(of_ranks: list[list[tuple]], ways: list[Way], relative: float = 1e-5, **options) -> None:
    """Every rank has the numbers of one process, in the groups of its place; together they have all of its weights."""
    for number, way in enumerate(ways):
        expected, seen = one_process(way, **options), set()
        check_groups(way.layout, [each[number][1] for each in of_ranks])
        for rank, (found, _) in enumerate(each[number] for each in of_ranks):
            wrong = differing(found, {name: expected[name] for name in found.keys() & expected.keys()}, relative)
            assert not wrong, (way, f"rank {rank}", wrong)
            seen |= found.keys()
        parts = {name for name in expected if way.layout.zero_stage == 0 or not name.startswith("gradient")}
        assert seen == parts, (way, seen ^ parts)


# The same as one process.


def test_four_ranks_train_as_one_process(ranks):
    """Losses, gradients, norms, and weights after 2 clipped steps, within 1e-5, float32."""
    check(ranks(trained, WAYS[4]), WAYS[4])


def test_two_ranks_train_as_one_process(two):
    check(two(trained, WAYS[2]), WAYS[2])


def test_sixteen_ranks_train_as_one_process():
    """Eight: test_eight_ranks."""
    with Ranks(16, "gloo", timeout_s=300) as sixteen:
        check(sixteen(trained, WAYS[16]), WAYS[16])


def kinds(layout: Layout) -> set[str]:
    """What a layout puts together, of dp, tp, pp, cp, ep, sp and the stages of ZeRO."""
    found = {axis for axis in ("dp", "tp", "pp", "cp", "ep") if getattr(layout, axis) > 1}
    found |= {"sp"} if layout.sequence_parallel else set()
    return found | ({f"zero{layout.zero_stage}"} if layout.zero_stage else set())


def test_each_pair_of_kinds_is_trained_together():
    everything = {"dp", "tp", "pp", "cp", "ep", "sp", "zero1", "zero2", "zero3"}
    layouts = [way.layout for ways in WAYS.values() for way in ways]
    trained_together = {frozenset(pair) for each in layouts for pair in itertools.combinations(kinds(each), 2)}
    pairs = {frozenset(pair) for pair in itertools.combinations(everything, 2)}
    assert pairs - trained_together == {frozenset(p) for p in itertools.combinations(("zero1", "zero2", "zero3"), 2)}
    schedules = {layout.schedule for layout in layouts if layout.pp > 1}
    assert schedules >= {"1f1b", "afab", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe"}


def test_clipping_is_by_the_norm_of_all_gradients(ranks):
    """SGD, clipped to a hundredth of the norm: a weight that moves is a weight clipped by the right factor."""
    words = [f"dp2,{axis}2,{zero}" for axis in ("tp", "pp", "cp") for zero in ("zero0", "zero1", "zero2", "zero3")]
    words = [each + ",keep" * ("pp" in each and "zero3" in each) for each in words]
    ways = [Way(each, tied=True, optimizer="SGD", batches=(4,), max_norm=0.02) for each in words]
    check(ranks(trained, ways), ways)
    assert one_process(ways[0])["norm 0"] > 1


BFLOAT16 = [Way("dp2,pp2,zero1", tied=True), Way("dp2,tp2,sp,zero3"), Way("pp2,cp2,zero3,keep"), Way("pp2,tp2,sp,zb-v")]


def states_of(parallel) -> list[torch.Tensor]:
    """The optimizer's numbers on this rank: moments and counters, and ZeRO's own copies of the weights."""
    inner = getattr(parallel.optimizer, "optimizer", parallel.optimizer)
    shards = [parameter.detach() for group in inner.param_groups for parameter in group["params"]]
    return shards + [value for state in inner.state.values() for value in state.values()]


def poisoned(texts: list[str], optimizer: str, at: int) -> dict[str, tuple]:
    """On a rank: whether the step `at`, in which rank 1 has one inf, or NaN, in one gradient, has changed weights or
    states; its norm; and whether the next step changes them.
    """
    found = {}
    for text, bad in itertools.product(texts, (float("inf"), float("nan"))):
        parallel = parallel_of(Way(text, optimizer=optimizer))
        gradients = parallel.gradients

        def with_one(*batch, parallel=parallel, gradients=gradients, bad=bad):
            loss = gradients(*batch)
            zero = parallel.optimizer if parallel.layout.zero_stage in (1, 2) else None
            if dist.get_rank() == 1:
                gradients_of(parallel.runner, zero)[0][0].view(-1)[0] = bad
            return loss

        states = [[x.clone() for x in full_weights(parallel).values()]] if at == 0 else []
        for step, run in enumerate((*[gradients] * at, with_one, gradients)):
            parallel.gradients = run
            norm = parallel.step(*local_batch(parallel, step, 4), MAX_NORM)[1].item()
            states.append([x.clone() for x in (*full_weights(parallel).values(), *states_of(parallel))])
            if step == at:
                bad_norm = norm
        kept, goes_on = (all(map(torch.equal, *pair)) for pair in itertools.pairwise(states))
        found[f"{text} {bad}"] = kept, not goes_on, bad_norm, all(x.isfinite().all() for x in states[-1])
    return found


@pytest.mark.parametrize("optimizer, at, texts", [
    ("fused", 1, ["dp4", "dp4,zero2", "dp2,tp2,zero3", "dp2,pp2,zero1", "tp2,pp2"]),
    ("AdamW", 1, ["dp4,zero2", "dp2,pp2,zero1"]),  # not fused: it can't skip on the device
    ("SGD", 0, ["dp4,zero1"]),
])  # fmt: skip
def test_a_step_with_an_inf_in_one_gradient_of_one_rank_changes_nothing_on_any(ranks, optimizer, at, texts):
    for found in ranks(poisoned, texts, optimizer, at):
        for case, (kept, goes_on, norm, finite) in found.items():
            assert kept and goes_on and finite and not math.isfinite(norm), (case, kept, goes_on, norm, finite)


def add_spare(stage: nn.Module) -> None:
    """A matrix that no forward uses."""
    stage.blocks[0].spare = nn.Parameter(torch.empty(5, 7, device="meta"))


def unmoved(texts: list[str]) -> dict[str, set[str]]:
    """On a rank: the weights that two steps with much weight decay leave as they were, by layout."""
    found = {}
    for text in texts:
        parallel = parallel_of(Way(text), extra=[add_spare])
        before = full_weights(parallel)
        for step in range(2):
            parallel.step(*local_batch(parallel, step, 4), MAX_NORM)
        after = full_weights(parallel)
        found[text] = {name for name, weight in after.items() if torch.equal(weight, before[name])}
    return found


def test_a_parameter_that_no_rank_uses_stays_as_it_is(ranks):
    texts = ["dp4", "dp2,pp2,zero1", "dp2,tp2,zero2", "dp2,tp2,zero3", "dp4,zero3,rep2", "dp2,pp2,zero3,keep"]
    first, *others = ranks(unmoved, texts)
    assert first == {text: {"blocks.0.spare"} for text in texts}  # rank 0 has the first stage
    assert all(names <= {"blocks.0.spare"} for found in others for names in found.values())


def test_bfloat16_products(ranks):
    """Losses within 0.5 %, norms and first gradients within 5 % of one process with autocast: 8 significant bits."""
    of_ranks = ranks(trained, BFLOAT16, torch.bfloat16)
    for number, way in enumerate(BFLOAT16):
        expected = one_process(way, torch.bfloat16)
        for found, _ in (each[number] for each in of_ranks):
            assert all(tensor.dtype == torch.float32 for tensor in found.values()), way
            for kind, relative in (("loss", 0.005), ("norm", 0.05), ("gradient", 0.05)):
                names = [name for name in found if name.startswith(kind)]
                wrong = differing({n: found[n] for n in names}, {n: expected[n] for n in names}, relative)
                assert not wrong, (way, wrong)


# Groups.


def own_groups(text: str) -> dict[str, list[int]]:
    return groups_in(build_mesh(Layout.parse(text)))


def groups_in(mesh) -> dict[str, list[int]]:
    """By name, the ranks of this rank's groups."""
    groups = mesh._asdict()
    del groups["device_mesh"]
    return {name: dist.get_process_group_ranks(group) for name, group in groups.items()}


def expected_groups(layout: Layout, rank: int) -> dict[str, list[int]]:
    """By hand, from the places of all ranks: which of them differ in what."""
    places = [coordinates(other, layout) for other in range(layout.ranks)]
    places = [place | {"copy": place["dp"] // layout.ep, "ep": place["dp"] % layout.ep} for place in places]

    def alike(*axes: str) -> list[int]:
        return [other for other, place in enumerate(places) if all(place[a] == places[rank][a] for a in axes)]

    found = {
        "dp": alike("pp", "cp", "tp"),
        "pp": alike("dp", "cp", "tp"),
        "cp": alike("dp", "pp", "tp"),
        "tp": alike("dp", "pp", "cp"),
        "ep": alike("copy", "pp", "cp", "tp"),
        "replicas": alike("pp", "tp"),
        "experts": alike("ep", "pp", "tp"),
    }
    return found | {"tokens": alike("pp") if layout.sequence_parallel else found["replicas"]}


def check_groups(layout: Layout, of_ranks: list[dict[str, list[int]]]) -> None:
    for rank, found in enumerate(of_ranks):
        assert found == expected_groups(layout, rank), (layout, rank)
        for name, axes in {"replicas": ("dp", "cp"), **{a: (a,) for a in ("dp", "pp", "cp", "tp")}}.items():
            assert found[name] in groups_along(layout, *axes), (layout, rank, name)


def test_groups_of_a_mesh(ranks):
    for text in ("dp4,ep2", "dp2,tp2,ep2,sp", "pp2,cp2", "dp1,cp2,tp2,sp"):
        check_groups(Layout.parse(text), ranks(own_groups, text))
    errors = ranks(lambda: said(lambda: build_mesh(Layout.parse("dp3"))))
    assert all(error.startswith("ValueError: dp 3 x pp 1 x cp 1 x tp 1 = 3 ranks, and there are 4") for error in errors)


# What a rank keeps, and what it sends.


WIDE = dataclasses.replace(OF, layers=8, hidden=64, ffn_hidden=176)


def built(texts: list[str]) -> dict[str, tuple[int, int]]:
    """On a rank: bytes at the peak while parallelize runs, and those of its own parameters, of each layout."""
    found = {}
    for text in texts:
        layout, kept = Layout.parse(text), []
        mesh = build_mesh(layout)
        peak = peak_bytes(lambda: kept.append(parallelize(WIDE, layout, mesh, lr=1e-3)))
        found[text] = peak, stored(kept[0].stages.parameters())
    return found


def test_no_rank_ever_holds_the_whole_model(ranks):
    """At the peak of parallelize: a rank's own parts, one whole tensor, its copy laid out, and 8 KiB. DataParallel has
    its buckets already, as much as the parts again; fully_shard the buffer of one block, which it gives back.
    """
    texts = ["tp4,sp", "pp4", "pp2,tp2", "dp4,zero3", "dp2,tp2,sp,zero3", "dp2,pp2,zero3,keep"]
    whole = Transformer(WIDE)
    sizes, block = [4 * p.numel() for p in whole.parameters()], stored(whole.blocks[0].parameters())
    for found in ranks(built, texts):
        for text, (peak, own) in found.items():
            more = block if "zero3" in text else own
            assert own <= peak <= own + more + 2 * max(sizes) + 8192, (text, peak, own)
            assert own < 0.4 * sum(sizes) and peak < 0.75 * sum(sizes), (text, peak / sum(sizes))


def sent_by(text: str, batches: list[int]) -> tuple[type, list[dict[str, int]], list[int]]:
    """On a rank: what shards, the bytes it sends over the replicas in a step of each batch, by collective; and the
    bytes of gathered weights that are left after it.
    """
    parallel, sent, left = parallel_of(Way(text, optimizer="SGD")), [], []
    for sequences in [batches[0], *batches]:  # the first negotiates shapes
        with count_traffic() as traffic:
            parallel.step(*local_batch(parallel, 0, sequences))
        group = tuple(dist.get_process_group_ranks(parallel.mesh.replicas))
        over = traffic.select(group=group)
        sent.append({kind: over.select(kind).bytes for kind in ("all_gather", "reduce_scatter")})
        units = [*parallel.sharding.units, parallel.sharding.root]
        left.append(sum(stored([part.buffer.values]) for unit in units for part in unit.flat_params))
    return type(parallel.sharding), sent[1:], left


def test_kept_gathers_send_weights_once_a_step_and_leave_nothing(ranks):
    """(N - 1)/N of this rank's stages are gathered, and as much reduced, for 2 and for 8 micro-batches."""
    for kind, sent, left in ranks(sent_by, "dp2,pp2,zero3,keep", [4, 16]):
        assert kind is GatherOncePerStep and left == [0, 0, 0]
        assert sent[0] == sent[1] and sent[0]["all_gather"] == sent[0]["reduce_scatter"] > 0, sent
    for kind, sent, left in ranks(sent_by, "dp4,zero3", [4, 8]):
        assert kind is FullyShard and left == [0, 0, 0]
        assert sent[1]["reduce_scatter"] == 2 * sent[0]["reduce_scatter"], sent
        assert 1.7 < sent[1]["all_gather"] / sent[0]["all_gather"] <= 2, sent  # the root is kept


def sent_with_replicas(text: str, batches: list[int]) -> list[dict[str, int]]:
    """On a rank: bytes that it sends to its shard group, and to the replicas, in a step of each batch."""
    parallel, sent = parallel_of(Way(text)), []
    group, others = (
        tuple(dist.get_process_group_ranks(each))
        for each in (parallel.sharding.flat_params[0].layout.group, parallel.sharding.flat_params[0].replicas)
    )
    for sequences in batches:
        with count_traffic() as traffic:
            parallel.step(*local_batch(parallel, 0, sequences))
        found = {kind: traffic.select(kind, group).bytes for kind in ("all_gather", "reduce_scatter")}
        sent.append(found | {"all_reduce": traffic.select("all_reduce", others).bytes, "groups": (group, others)})
    return sent


def test_replicas_sum_their_pieces_once_a_step_whatever_the_micro_batches(ranks):
    """Four bytes a number. In a group of two a rank sends half of each gather (a unit's two a micro-batch, but for the
    last one) and of each reduce-scatter; of an all-reduce over two replicas as much as its piece has.
    """
    sizes = [sum(p.numel() for each in unit for p in each.parameters()) for unit in find_blocks(Transformer(OF))]
    pieces = [-(-numel // 2) for numel in sizes]
    for rank, sent in enumerate(ranks(sent_with_replicas, "dp4,zero3,rep2", [4, 12])):
        for m, found in zip((1, 3), sent, strict=True):
            assert found == {
                "all_gather": 4 * m * (2 * sum(pieces) - pieces[-1]),
                "reduce_scatter": 4 * m * sum(pieces),
                "all_reduce": 4 * sum(pieces),
                "groups": ((0, 1) if rank < 2 else (2, 3), (rank % 2, rank % 2 + 2)),
            }, (rank, m)


def calls_over_all(words: str) -> tuple[int, int]:
    """On a rank: gathers and reduce-scatters of a step over all ranks, where small parameters alone have that group."""
    parallel = parallel_of(Way(words))
    own = local_batch(parallel, 0, 8)
    parallel.step(*own)
    with count_traffic() as traffic:
        parallel.step(*own)
    over = traffic.select(group=tuple(range(4)))
    return over.select("all_gather").calls, over.select("reduce_scatter").calls


def test_small_parameters_of_another_group_are_gathered_once_a_step(ranks):
    """Norms under sp: not with each unit, in each micro-batch and direction."""
    assert ranks(calls_over_all, "dp2,tp2,sp,zero3") == [(1, 4)] * 4
    assert ranks(calls_over_all, "dp2,tp2,sp,zero3,rep2") == [(1, 4)] * 4


# What a user may ask for.


def extended() -> list:
    """On a rank: what verbs of one's own are called with, in order; and whether attention is what they made of it."""
    seen = []

    def note(model: nn.Module) -> None:
        weight = model.blocks[1].mlp.gate_proj.weight
        seen.append(
            (
                weight.is_meta,
                list(weight.shape),
                isinstance(placement_of(weight).tensor_shard, TensorShard),
                len(model.blocks),
            )
        )

    def without_attention(model: nn.Module) -> None:
        for block in model.blocks:
            block.attention.core = lambda q, k, v: torch.zeros_like(q)

    parallel = parallel_of(Way("pp2,tp2,sp"), extra=[note, without_attention, note])
    parallel.gradients(*local_batch(parallel, 0, 8))
    return [*seen, [p.grad is None for name, p in parallel.stages.named_parameters() if "q_proj" in name]]


def test_verbs_of_ones_own_are_called_on_the_split_model(ranks):
    for found in ranks(extended):
        assert found == [(True, [22, 32], True, 2)] * 2 + [[True]]


def refused() -> list[str]:
    """On a rank: what wrong lengths and layouts raise; and a step that goes well afterwards."""
    layout = Layout.parse("cp2,pp2,interleaved,mb2")
    parallel = parallelize(OF, layout, build_mesh(layout), lr=1e-3)

    def step(sequences: int, seq: int):
        return lambda: parallel.gradients(*torch.zeros(2, sequences, seq, dtype=torch.int64))

    found = [said(step(*sizes)) for sizes in ((5, 16), (6, 16), (0, 16), (4, 18), (4, 16))]
    mesh = build_mesh(Layout.parse("dp4"))
    return found + [said(lambda: parallelize(OF, Layout.parse("dp2"), mesh))]


def test_lengths_and_layouts_that_do_not_fit_are_a_value_error(ranks):
    for uneven, schedule, empty, tokens, fits, layout in ranks(refused):
        assert uneven == "ValueError: 5 sequences are no multiple of micro_batch 2"
        assert schedule.startswith("ValueError: interleaved: ")
        assert empty.startswith("ValueError: ")
        assert tokens == "ValueError: seq 18 is not a multiple of 4, into which cp and sp split it: make it 20"
        assert fits == "nothing"
        assert layout.startswith("ValueError: dp 2 ") and "and there are 4: make dp 4" in layout


# The program.


ARGUMENTS = ["--preset", "debug", "--dtype", "fp32", "--seq", "16", "--no-document-masks"]  # a mask allows no cp


def trained_by_main(argv: list[str]) -> list[dict]:
    with short_text():
        return main(argv)


class Noted(PackedBatches):
    """Notes the windows that this rank has seen, step by step."""

    seen: list[list[list[int]]] = []

    def __next__(self):
        batch = super().__next__()
        self.seen.append(batch.inputs.tolist())
        return batch


def run_program(texts: list[str]) -> list[tuple]:
    """On a rank, of each layout: the sequences of each step, and the losses."""
    found = []
    for text in texts:
        Noted.seen = []
        with mock.patch.object(trainer, "PackedBatches", Noted):
            records = trained_by_main([*ARGUMENTS, "--layout", text, "--batch", "4", "--steps", "2"])
        found.append((Noted.seen, [record["loss"] for record in records]))
    return found


def test_all_layouts_see_the_same_batches(ranks):
    """Rank by rank, those of one dp place see the same sequences; all places together, the same for each layout."""
    texts = ["dp4", "dp2,tp2,sp,zero1", "pp2,cp2", "dp2,pp2,zero3,keep"]
    of_ranks, steps, losses = ranks(run_program, texts), [], []
    for number, text in enumerate(texts):
        by_place = {}
        for rank, found in enumerate(each[number] for each in of_ranks):
            place = coordinates(rank, Layout.parse(text))["dp"]
            assert by_place.setdefault(place, found[0]) == found[0], (text, rank)
            losses.append(found[1])
        steps.append([sorted(sum(parts, [])) for parts in zip(*by_place.values(), strict=True)])
    assert all(each == steps[0] for each in steps) and all(len(step) == 4 for step in steps[0])
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(losses[:1]).expand(16, 2), rtol=1e-5, atol=0)


def test_main_with_a_file_of_settings(ranks, tmp_path):
    """The file's settings hold, and the command line's win; a JSON line a step, none as long as the world."""
    file, out = tmp_path / "run.toml", tmp_path / "run.jsonl"
    run = "[run]\nbatch = 16\nsteps = 50\nstart_batch = 4\nramp = 4\n"
    file.write_text(f'{run}[layout]\nlayout = "dp4"\n[optimizer]\nwarmup = 3\nlr = 0.01\n')
    argv = [str(file), *ARGUMENTS, "--layout", "dp2,pp2,zero1", "--steps=12", "--out", str(out)]
    of_ranks = ranks(trained_by_main, argv)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines == of_ranks[0] and [line["step"] for line in lines] == list(range(1, 13))
    for records in of_ranks:
        assert [record["loss"] for record in records] == [line["loss"] for line in lines]
        assert [record["peak_memory"] for record in records] == [line["peak_memory"] for line in lines]
    assert [line["batch"] for line in lines] == [4, 4, 8, 12] + [16] * 8
    assert [line["tokens"] for line in lines] == [16 * n for n in itertools.accumulate(x["batch"] for x in lines)]
    assert lines[0]["lr"] == pytest.approx(0.01 / 3) and lines[2]["lr"] == 0.01
    assert lines[-1]["lr"] == pytest.approx(0.001)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5 and all(line["norm"] > 0 for line in lines)
    for line in lines:
        assert line["peak_memory"] > 2**20 and line["fullest_rank"] in range(4)
        assert not any(isinstance(value, list) for value in line.values())
        assert line["layout"] == "dp2,pp2,zero1" and line["tokens_per_s"] > 0


def test_a_growing_batch_fits_the_schedule(ranks):
    """The ramp is the same whatever the layout, in multiples of its first batch."""
    for layout, sizes in (("pp2,cp2,interleaved", [2, 2, 4, 6, 8]), ("pp2,tp2,zb-h1", [2, 2, 4, 6, 8])):
        argv = [*ARGUMENTS, "--layout", layout, "--batch", "8", "--start-batch", "2", "--ramp", "4", "--steps", "5"]
        assert [record["batch"] for record in ranks(trained_by_main, argv)[0]] == sizes


def test_main_trains_a_mixture(ranks):
    more = [
        "--layout",
        "dp2,ep2,tp2,sp,zero2",
        "--experts",
        "4",
        "--top-k",
        "1",
        "--expert-hidden",
        "32",
        "--shared",
        "1",
        "--batch",
        "8",
    ]
    for records in ranks(trained_by_main, [*ARGUMENTS, *more, "--steps", "6", "--lr", "0.01", "--peak-tflops", "0.1"]):
        assert records[-1]["loss"] < records[0]["loss"] - 0.3
        assert all(0 < record["mfu"] < 1 for record in records)


def runs_of_a_mixture(runs: list[list[str]]) -> list[dict]:
    return [trained_by_main([*ARGUMENTS, *argv, "--steps", "1", "--peak-tflops", "1"])[0] for argv in runs]


def test_the_mfu_of_a_mixture_counts_what_a_token_goes_through(ranks):
    """By hand: top_k and the shared experts. The planner and the model say the same."""
    runs, expected = [], []
    seq, vocab, h, layers = 16, 256, 64, 2  # of preset debug, with bytes as tokens: 4 heads of 16, 2 of K and V, tied
    for top_k, width, shared in ((1, 32, 0), (1, 32, 1), (2, 32, 2), (2, None, 1)):
        sizes = ["--layout", "dp2,ep2,tp2", "--batch", "4", "--experts", "4", "--top-k", str(top_k)]
        sizes += ["--shared", str(shared)] + ([] if width is None else ["--expert-hidden", str(width)])
        runs.append(sizes)
        layer = 2 * h * 64 + 2 * h * 32 + 2 * h + (top_k + shared) * 3 * h * (width or 176)
        expected.append(6 * (vocab * h + layers * layer + h) + 12 * layers * 4 * 16 * seq)
        moe = {"experts": 4, "top_k": top_k, "ffn_hidden": width, "shared": shared}
        assert estimate(PRESETS["debug"], CLUSTERS["H100"], Layout(), 4, seq, moe).flops == expected[-1]
        with torch.device("meta"):
            model = apply_moe(Transformer(PRESETS["debug"]), **moe)
        assert flops_per_token(model.active_config, seq) == expected[-1]
    for records in ranks(runs_of_a_mixture, runs):
        found = [record["mfu"] * 1e12 / record["tokens_per_s"] for record in records]
        assert found == pytest.approx(expected, rel=1e-9)


def test_main_refuses_a_layout_of_other_ranks(ranks):
    argv = [*ARGUMENTS, "--layout", "dp2", "--batch", "8"]
    for error in ranks(lambda: said(lambda: trained_by_main(argv))):
        assert error.startswith("ValueError: layout dp2: dp 2 ") and error.endswith("make dp 4")


@pytest.mark.parametrize(
    "argv, text",
    [
        (["--layout", "dp2,qp2"], "'qp2' is not one of"),
        (["--layout", "dp2,dp2"], "sets dp again"),
        (["--layout", "dp3", "--batch", "8"], "make it 9"),
        (["--layout", "cp8"], "seq 24 is not a multiple of 16"),
        (["--layout", "tp3"], "tp 3"),
        (["--layout", "pp2,zero3"], "make zero_stage 1"),
        (["--layout", "dp2,ep2"], "make ep 1"),
        (["--layout", "dp4,ep4", "--experts", "6"], "change ep"),
        (["--experts", "2", "--top-k", "3"], "top_k"),
        (["--layout", "pp2,dualpipe", "--batch", "8", "--start-batch", "2", "--ramp", "3"], "batch 2"),
        (["--start-batch", "32", "--batch", "16"], "start_batch"),
        (["--warmup", "-1"], "--warmup"),
        (["--ramp", "-1"], "--ramp"),
        (["--max-norm", "0"], "--max-norm"),
        (["--max-norm", "nan"], "--max-norm"),
        (["--steps", "0"], "--steps"),
        (["--lr", "0"], "--lr"),
        (["--peak-tflops", "-1"], "--peak-tflops"),
        (["--experts", "0"], "--experts"),
        (["--experts", "4", "--expert-hidden", "-4"], "--expert-hidden"),
        (["--experts", "4", "--shared", "-1"], "--shared"),
        (["--shared", "1"], "--shared"),
        (["--layout", "dp2,tp3", "--elastic"], "tp 3"),
        (["--layo", "dp2"], "--layo"),
        (["--colour", "red"], "--colour"),
        (["nowhere.toml"], "nowhere.toml"),
        (["broken.toml"], "broken.toml"),
        (["unknown.toml"], "colour"),
        (["wrong.toml"], "batch"),
        (["--out", "broken.toml/run.jsonl"], "broken.toml is not a folder"),
    ],
)
def test_wrong_options_end_with_status_2_and_a_line(argv, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.toml").write_text("[layout]\nlayout = dp2")
    (tmp_path / "unknown.toml").write_text('[run]\ncolour = "red"')
    (tmp_path / "wrong.toml").write_text('[run]\nbatch = "many"')
    before = {file.name: file.read_text() for file in tmp_path.iterdir()}
    with pytest.raises(SystemExit) as stopped:
        options([*argv, "--preset", "debug", "--seq", "24", "--no-document-masks"])
    (error,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and error.startswith("train: error: ") and text in error, error
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == before


def test_settings_of_a_file_and_of_the_command_line(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        '[run]\nbatch = 32\n[model]\npreset = "debug"\n[layout]\nlayout = "dp2,tp2"\n[logging]\npeak_tflops = 1.5\n'
    )
    chosen = options(["--batch", "8", str(file)])
    assert (chosen.model.preset, chosen.layout.layout, chosen.run.batch) == ("debug", "dp2,tp2", 8)
    assert chosen.logging.peak_tflops == 1.5 and named_model(chosen).moe is None
    assert options(["--layout", "dp3,tp2", "--batch", "8", "--elastic"]).layout.elastic  # its dp is not known yet
    plain = {"experts": 4, "top_k": 2, "ffn_hidden": None, "aux_loss_coeff": 0.01}
    assert named_model(options(["--experts", "4"])).moe == plain  # as in checkpoints of runs before there was --shared
    assert named_model(options(["--experts", "4", "--shared", "2"])).moe == plain | {"shared": 2}
