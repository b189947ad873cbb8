"""course_lib.expert_parallel.model and nested_shards on four ranks against one process, with other parallelism too.
CPU, gloo.
"""

import contextlib
import dataclasses
import io
import itertools
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from calls import as_rank, peak_bytes, said, short_corpus
from course_lib.collectives.traffic import count_traffic
from course_lib.context_parallel.model import apply_context_parallel
from course_lib.data_parallel.replicas import DataParallel, find_diverged_params, parallel_accumulate
from course_lib.expert_parallel import model as expert_model
from course_lib.expert_parallel.mixture import MoE, apply_moe
from course_lib.expert_parallel.model import ExpertGroups, apply_expert_parallel, dispatch_ratio
from course_lib.expert_parallel.nested_shards import NestedShard, shard_nested
from course_lib.expert_parallel.program import main, options
from course_lib.expert_parallel.router import Router, routers_of, take_counts
from course_lib.recompute.modes import IGNORED
from course_lib.sequence_parallel.model import apply_sequence_parallel
from course_lib.sequence_parallel.shards import shard_sequence
from course_lib.single_gpu import training as single_gpu
from course_lib.single_gpu.model import Transformer, loss
from course_lib.single_gpu.placement import placement_of
from course_lib.tensor_parallel.model import apply_tensor_parallel
from course_lib.tensor_parallel.shards import gather_state_dict, materialize
from course_lib.tensor_parallel.vocabulary import vocab_parallel_cross_entropy
from split_models import (
    RECOMPUTE,
    batches,
    config,
    differing,
    group_of,
    in_replicas,
    init,
    meta_model,
    not_as,
    one_process,
    stored,
    whole_gradients,
    whole_model,
)

OF, SEQ = config(4), 8
SOFTMAX = (("experts", 8), ("top_k", 2), ("ffn_hidden", 32), ("aux_loss_coeff", 0.3), ("z_loss_coeff", 0.02))
SIGMOID = (
    ("experts", 4),
    ("top_k", 3),
    ("ffn_hidden", 32),
    ("shared", 1),
    ("score", "sigmoid"),
    ("aux_loss_coeff", 0.3),
)
ON_NODES = (*SOFTMAX[:2], ("ffn_hidden", 16), ("nodes", 2), ("node_limit", 1), ("scale", 2.0), ("aux_loss_coeff", 0.3))


class Layout(NamedTuple):
    """ep ranks share the experts, of nodes where there are two; tp: ranks that share matrices, cp: sequences."""

    ep: int
    nodes: int = 1
    tp: int = 1
    sequence: str = ""  # "matrices": experts are split over tp as well; "spread": tp's ranks have experts of their own
    cp: int = 1


LAYOUTS = {
    "ep 4": Layout(4),
    "dp 4, ep 2": Layout(2),
    "two hops": Layout(4, nodes=2),
    "ep 2, tp 2": Layout(2, tp=2),
    "dp 2, tp 2": Layout(1, tp=2),
    "ep 2, tp 2, sequence": Layout(2, tp=2, sequence="matrices"),
    "tp 2, sequence, ep over all": Layout(4, tp=2, sequence="spread"),
    "tp 2, sequence, two hops over all": Layout(4, nodes=2, tp=2, sequence="spread"),
    "cp 2, ep 4": Layout(4, cp=2),
    "cp 2, ep 2": Layout(2, cp=2),
}
# (layout, mixture, how gradients are averaged, recompute, optimizer)
WAYS = [
    ("ep 4", SOFTMAX, "DataParallel", "none", "AdamW"),
    ("ep 4", SIGMOID, "ZeRO stage 1", "full", "SGD"),
    ("dp 4, ep 2", SIGMOID, "DataParallel", "full", "SGD"),
    ("dp 4, ep 2", SOFTMAX, "ZeRO stage 2", "selective", "SGD"),
    ("dp 4, ep 2", SIGMOID, "fully_shard", "full", "AdamW"),
    ("two hops", ON_NODES, "DataParallel", "none", "SGD"),
    ("two hops", SOFTMAX, "fully_shard", "none", "SGD"),
    ("ep 2, tp 2", SOFTMAX, "DataParallel", "full", "AdamW"),
    ("ep 2, tp 2", SIGMOID, "ZeRO stage 2", "none", "SGD"),
    ("dp 2, tp 2", SOFTMAX, "fully_shard", "none", "SGD"),
    ("ep 2, tp 2, sequence", SIGMOID, "DataParallel", "none", "SGD"),
    ("ep 2, tp 2, sequence", SOFTMAX, "fully_shard", "full", "SGD"),
    ("tp 2, sequence, ep over all", SOFTMAX, "DataParallel", "full", "SGD"),
    ("tp 2, sequence, ep over all", SIGMOID, "ZeRO stage 1", "none", "SGD"),
    ("tp 2, sequence, two hops over all", ON_NODES, "DataParallel", "none", "SGD"),
    ("cp 2, ep 4", SOFTMAX, "DataParallel", "none", "SGD"),
    ("cp 2, ep 2", SIGMOID, "ZeRO stage 2", "full", "SGD"),
]


class Parts(NamedTuple):
    """On a rank: a model in its layout, and how to train it."""

    model: Transformer
    dp: dist.ProcessGroup
    tp: dist.ProcessGroup
    own: object  # what this rank has of a batch


def split(layout: Layout, mixture: tuple, meta: bool = False) -> Parts:
    """The verbs in their order; not materialized. Collective."""
    groups = ExpertGroups.make(layout.ep // (layout.tp if layout.sequence == "spread" else 1), 1, layout.tp)
    exchange, copies = groups.exchange, groups.copies
    if layout.nodes > 1 and layout.tp == 1:
        exchange = ExpertGroups.make(layout.ep, layout.nodes, 1).exchange
    if layout.sequence == "spread":
        exchange, copies = ([groups.dp, groups.tp] if layout.nodes > 1 else dist.group.WORLD), None
    model = meta_model(OF, mixture) if meta else whole_model(OF, mixture)
    if layout.tp > 1:
        apply_tensor_parallel(model, groups.tp)
    if layout.sequence:
        apply_sequence_parallel(model, groups.tp, reduce_group=dist.group.WORLD)
    batch_group = dist.group.WORLD if layout.sequence else groups.dp
    tp_group = groups.tp if layout.tp > 1 and layout.sequence != "spread" else None
    assert apply_expert_parallel(model, exchange, copies, batch_group, tp_group) is model

    def own(whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(groups.dp.size())[groups.dp.rank()]

    if layout.cp > 1:
        cp = dist.new_subgroups(group_size=layout.cp)[0]
        apply_context_parallel(model, cp, "ring", "zigzag")
        shares = groups.dp.size() // layout.cp

        def own(whole: torch.Tensor) -> torch.Tensor:
            return shard_sequence(whole.chunk(shares)[groups.dp.rank() // layout.cp], cp, "zigzag")

    return Parts(model, groups.dp, groups.tp, own)


def drifted(parts: Parts) -> list[str]:
    """Names of parameters and buffers that differ, in any bit, from a rank that should have the same. Collective."""
    alike = {}
    for name, p in [*parts.model.named_parameters(), *parts.model.named_buffers()]:
        alike.setdefault((placement_of(p).reduce_group or parts.dp), {})[name] = nn.Parameter(p.detach())
        if not placement_of(p).tensor_shard:
            alike.setdefault(parts.tp, {})[name] = nn.Parameter(p.detach())
    wrong = []
    for group, named in alike.items():
        places = find_diverged_params(nn.ParameterList(named.values()), group)
        wrong += [f"{list(named)[int(place)]} has drifted" for place in places]
    return wrong


def training_differs(ways: list[tuple]) -> dict[str, list[str]]:
    """On a rank: what differs from one process, or has drifted apart, by way of training."""
    found = {}
    for name, mixture, how, recompute, optimizer in ways:
        parts = split(LAYOUTS[name], mixture, meta=how == "fully_shard")
        RECOMPUTE[recompute](parts.model, parts.tp)
        ours = in_replicas(how, *parts[:3], parts.own, SEQ, optimizer)
        wrong = not_as(ours, one_process(OF, optimizer, SEQ, mixture=mixture))
        found[f"{name} {how} {recompute}"] = wrong + (drifted(parts) if how != "fully_shard" else [])
    return found


def test_training_is_that_of_one_process(ranks):
    """Losses, whole gradients, norms, weights and biases after 3 clipped steps, in float32 within 1e-5."""
    for found in ranks(training_differs, WAYS):
        assert len(found) == len(WAYS)
        assert not any(found.values()), {way: wrong for way, wrong in found.items() if wrong}


ONE = (("experts", 8), ("top_k", 1), ("ffn_hidden", 32), ("aux_loss_coeff", 0.3))
EXTREMES = {"one expert takes all": (ONE, 3, 1e3), "five experts are empty": (SOFTMAX, slice(5), -1e3)}


def extremes_differ() -> dict[str, list[str]]:
    """On a rank: what differs from one process in the loss and gradients of a step, by layout and how choices fall."""
    found, (inputs, targets) = {}, batches(0, seq=SEQ)
    for name, (kind, (mixture, experts, bias)) in itertools.product(("ep 4", "dp 4, ep 2"), EXTREMES.items()):
        whole, parts = whole_model(OF, mixture), split(LAYOUTS[name], mixture)
        for router in (*routers_of(whole), *routers_of(parts.model)):
            router.bias[experts] = bias
        expected = loss(whole(inputs), targets)
        expected.backward()
        dp = DataParallel(parts.model, parts.dp)
        got = parallel_accumulate(dp, [(parts.own(inputs), parts.own(targets))])
        idle = (take_counts(parts.model) == 0).sum(1).tolist()
        wanted = {f"gradient {n}": p.grad for n, p in whole.named_parameters()} | {"loss": expected.detach()}
        ours = {f"gradient {n}": g for n, g in whole_gradients(parts.model).items()} | {"loss": got}
        wrong = [f"{idle} experts are idle"] * (min(idle) < (7 if mixture is ONE else 5))
        found[f"{name}, {kind}"] = differing(ours, wanted) + wrong
    return found


def test_empty_experts_and_one_that_takes_every_token(ranks):
    for found in ranks(extremes_differ):
        assert len(found) == 4
        assert not any(found.values()), {way: wrong for way, wrong in found.items() if wrong}


def on_a_pair() -> list[str]:
    """On one of 2 times 2 ranks: each pair shares the experts, and knows of no other group."""
    pair, alone = group_of(2), group_of(1)
    model = apply_expert_parallel(whole_model(OF, SOFTMAX), pair)
    ours = in_replicas("DataParallel", model, pair, alone, lambda whole: whole.chunk(2)[pair.rank()], SEQ)
    return not_as(ours, one_process(OF, seq=SEQ, mixture=SOFTMAX))


def test_two_ranks_with_one_group(ranks):
    assert ranks(on_a_pair) == [[]] * 4


def in_micro_batches(name: str) -> list[str]:
    """On a rank: what differs in the gradients of a step of 5 sequences, which the ranks share unevenly, in two
    micro-batches, of which some are empty; and in the choices counted.
    """
    parts, whole = split(LAYOUTS[name], SOFTMAX), whole_model(OF, SOFTMAX)
    for router in (*routers_of(parts.model), *routers_of(whole)):
        # Without the balance loss, which is of one micro-batch on all ranks.
        router.routing = dataclasses.replace(router.routing, aux_loss_coeff=0.0, z_loss_coeff=0.2)
    inputs, targets = batches(0, batch=5, seq=SEQ)
    n, count = parts.dp.size(), (targets != IGNORED).sum()
    dp = DataParallel(parts.model, parts.dp)
    mine = [each.tensor_split(n)[parts.dp.rank()].tensor_split(2) for each in (inputs, targets)]
    for number, (own_inputs, own_targets) in enumerate(zip(*mine, strict=True)):
        for router in routers_of(parts.model):
            router.loss_weight = n * len(own_inputs) / len(inputs)
        with dp.no_sync() if number == 0 else contextlib.nullcontext():
            summed = vocab_parallel_cross_entropy(dp(own_inputs), own_targets, parts.tp, OF.vocab, "sum")
            (summed / count * n).backward()
    dp.finish()
    found = whole_gradients(parts.model) | {"counts": take_counts(parts.model).float()}
    loss(whole(inputs), targets).backward()
    return differing(found, whole_gradients(whole) | {"counts": take_counts(whole).float()})


@pytest.mark.parametrize("name", ["ep 4", "dp 4, ep 2", "ep 2, tp 2", "two hops"])
def test_uneven_micro_batches_are_weighted(ranks, name):
    """loss_weight: the share of the tokens. On four ranks, three have no token in the second micro-batch."""
    assert ranks(in_micro_batches, name) == [[]] * 4


# What is kept and sent.


def built(name: str, mixture: tuple) -> dict[str, object]:
    """On a rank: whether its parts are slices of the whole model, what it keeps, and the peak of building it."""
    kept, layout = [], LAYOUTS[name]
    whole = dict(whole_model(OF, mixture).named_parameters())
    own = split(layout, mixture, meta=True).model  # groups are made beforehand
    peak = peak_bytes(lambda: kept.append(materialize(own, lambda name, tensor: init(name, tensor, OF))))
    model, wrong = kept[0], []
    for each in (model, split(layout, mixture).model):
        for key, p in each.named_parameters():
            shard = placement_of(p).tensor_shard
            wrong += [key] * (not torch.equal(p, shard.cut(whole[key]) if shard else whole[key]) or p.is_meta)
            wrong += [f"{key} is whole"] * (p.untyped_storage().nbytes() != 4 * p.numel() or not p.is_contiguous())
            wrong += [f"{key}: shape"] * (shard is not None and shard.full_shape(p) != list(whole[key].shape))
            wrong += [f"{key}: gather"] * (shard is not None and not torch.equal(shard.gather(p.detach()), whole[key]))
        wrong += ["names"] * (list(each.state_dict()) != list(whole_model(OF, mixture).state_dict()))
        state = gather_state_dict(each)
        wrong += [key for key in whole if not torch.equal(state[key], whole[key])]
    experts = [
        sum(p.numel() for key, p in of if ".experts." in key) for of in (model.named_parameters(), whole.items())
    ]
    largest = max(4 * p.numel() for p in whole.values())
    return {"wrong": wrong, "share": experts[1] / experts[0], "peak": (peak, stored(model.parameters()), largest)}


@pytest.mark.parametrize(
    "name, mixture, share",
    [("ep 4", SOFTMAX, 4), ("two hops", ON_NODES, 4), ("ep 2, tp 2", SIGMOID, 4), ("dp 4, ep 2", SOFTMAX, 2)],
)
def test_a_rank_keeps_its_part_and_never_holds_the_whole_model(ranks, name, mixture, share):
    """1/(ep tp) of the experts; above its parts, one whole parameter at a time."""
    for rank, found in enumerate(ranks(built, name, mixture)):
        peak, own, largest = found["peak"]
        assert not found["wrong"] and found["share"] == share, (rank, found)
        assert own <= peak <= own + largest + 3000, (rank, found["peak"])


def nested() -> dict[str, bool]:
    """On one of 2 x 2 ranks: cuts along one dimension twice, and along two, against slices by hand."""
    rank, found = dist.get_rank(), {}
    outer = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
    inner = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0]
    whole = nn.Parameter(torch.arange(8 * 6.0).view(8, 6), requires_grad=False)
    row, column = divmod(rank, 2)
    for name, cuts, expected, starts, sizes in (
        ("twice", [(outer, 0), (inner, 0)], whole[2 * rank :][:2], (4 * row, 2 * column), (8, 4)),
        ("both", [(outer, 0), (inner, 1)], whole[4 * row :][:4, 3 * column :][:, :3], (4 * row, 3 * column), (8, 6)),
        ("one", [(inner, 1)], whole[:, 3 * column :][:, :3], (3 * column,), (6,)),
    ):
        part = shard_nested(whole, cuts)
        shard = placement_of(part).tensor_shard
        found |= {
            name: torch.equal(part, expected) and isinstance(shard, NestedShard) and not part.requires_grad,
            f"{name} cut": torch.equal(shard.cut(whole), expected),
            f"{name} gather": torch.equal(shard.gather(part.detach()), whole),
            f"{name} shape": shard.full_shape(part) == [8, 6] and shard.full_shape(part.to("meta")) == [8, 6],
            f"{name} norm": placement_of(part).norm_groups == tuple(group for group, _ in reversed(cuts)),
            f"{name} places": (shard.start, shard.full_size) == (starts, sizes),
        }
    return found


def test_parts_of_parts(ranks):
    for found in ranks(nested):
        assert all(found.values()), found


def kinds_sent(name: str) -> tuple[set, set, int]:
    """On a rank: how a mixture sends in forward and in backward, and how often in forward."""
    parts = split(LAYOUTS[name], (*SOFTMAX[:3],))
    layer, generator = parts.model.blocks[0].mlp, torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(2, SEQ, OF.hidden, generator=generator).requires_grad_()
    with count_traffic() as forward:
        out = layer(x)
    with count_traffic() as backward:
        out.sum().backward()
    return *({record.collective for record in log.records} for log in (forward, backward)), forward.calls


def test_tokens_travel_by_all_to_all(ranks):
    """Split matrices add f and f*: x's and the gates' sums in backward, the output's in forward."""
    for name, forward, backward, calls in (
        ("ep 4", {"all_to_all"}, {"all_to_all"}, 4),
        ("two hops", {"all_to_all"}, {"all_to_all"}, 8),
        ("ep 2, tp 2", {"all_to_all", "all_reduce"}, {"all_to_all", "all_reduce"}, 5),
    ):
        assert ranks(kinds_sent, name) == [(forward, backward, calls)] * 4, name


class Noted:
    """A transfer under way; waiting for it is noted."""

    def __init__(self, work, events: list[str]):
        self.work, self.events = work, events

    def wait(self):
        self.events.append("wait")
        return self.work.wait()


def beside_dispatch(name: str) -> tuple[list[str], list[str], list[str]]:
    """On a rank: in which order forward and backward exchange and compute; what differs from one process."""
    mixture, events, plain = SIGMOID, [], dist.all_to_all_single
    parts, whole = split(LAYOUTS[name], mixture), whole_model(OF, mixture)
    layer = parts.model.blocks[0].mlp
    layer.shared.register_forward_pre_hook(lambda *_: events.append("shared"))
    layer.shared.register_forward_hook(lambda *_: events.append("shared done"))
    layer.experts.register_forward_pre_hook(lambda *_: events.append("experts"))
    for module, name in ((layer.shared, "shared"), (layer.experts, "experts")):
        module.register_full_backward_pre_hook(lambda *_, name=name: events.append(name))
    layer.shared.register_full_backward_hook(lambda *_: events.append("shared done"))

    def noted(*args, async_op=False, **kwargs):
        events.append("start" if async_op else "sizes")
        work = plain(*args, async_op=async_op, **kwargs)
        return Noted(work, events) if async_op else work

    x = torch.randn(2, SEQ, OF.hidden, generator=torch.Generator().manual_seed(dist.get_rank() // 2)).requires_grad_()
    dist.all_to_all_single = noted
    try:
        out = layer(x)
        forward = events.copy()
        events.clear()
        out.square().sum().backward()
    finally:
        dist.all_to_all_single = plain
    return forward, events, differing({"out": out}, {"out": whole.blocks[0].mlp(x)})


@pytest.mark.parametrize("name, hops", [("ep 4", 1), ("two hops", 2), ("ep 2, tp 2", 1)])
def test_the_shared_expert_runs_while_tokens_travel(ranks, name, hops):
    """Dispatch is started before it and waited for after it, forward and backward; of two hops the outer one."""
    covered, home = ["start", "start", "shared", "shared done", "wait", "wait"], ["start", "wait"] * hops
    second = ["start", "start", "wait", "wait"] * (hops - 1)
    sizes = ["sizes"] * (hops - 1)
    for forward, backward, wrong in ranks(beside_dispatch, name):
        assert forward == ["sizes", *covered, *sizes, *second, "experts", *home], forward
        assert backward == [*home, "experts", *second, *covered] and not wrong, (backward, wrong)


# Mistakes.


def wrong_groups() -> dict[str, object]:
    """On a rank: what becomes of experts whose gradients are reduced over the wrong ranks."""
    groups, found = ExpertGroups.make(2, 1, 1), {}
    expected = one_process(OF, seq=SEQ, mixture=SOFTMAX)

    def trained(reduce_group) -> list[str]:
        model = whole_model(OF, SOFTMAX)
        apply_expert_parallel(model, groups.exchange, reduce_group, groups.dp)
        ours = in_replicas("DataParallel", model, groups.dp, groups.tp, lambda x: x.chunk(4)[dist.get_rank()], SEQ)
        return not_as({name: x for name, x in ours.items() if name.startswith("gradient 0")}, expected)

    found["right"] = trained(groups.copies)
    found["none"] = sorted(name.split(":")[0] for name in trained(None))
    for name, group in (("all", groups.dp), ("exchange", groups.exchange[0])):
        found[name] = said(lambda: trained(group))
    return found


def test_the_wrong_reduce_group_is_seen(ranks):
    """Missing, it leaves out the other copies' tokens; over ranks with other experts the verb is refused."""
    for found in ranks(wrong_groups):
        assert found["right"] == [] and len(found["none"]) == 3 * OF.layers
        assert all(".experts." in name for name in found["none"])
        for name in ("all", "exchange"):
            assert found[name].startswith("ValueError: the ranks differ: rank ") and "experts" in found[name], found


def refused() -> dict[str, tuple[str, bool]]:
    """On a rank: what is said of models that can't be spread, and whether they are as before."""
    world, pair, found = dist.group.WORLD, group_of(2), {}
    six, narrow = (("experts", 6), *SOFTMAX[1:]), (*SOFTMAX[:2], ("ffn_hidden", 10))
    cases = {
        "dense": (whole_model(OF), {}),
        "experts": (whole_model(OF, six), {}),
        "width": (whole_model(OF, narrow), {"group": pair, "tp_group": world}),
        "twice": (apply_expert_parallel(whole_model(OF, SOFTMAX), world), {}),
        "two hops": (whole_model(OF, SOFTMAX), {"group": [pair, pair]}),
        "hops' experts": (whole_model(OF, six), {"group": [pair, pair], "batch_group": world}),
    }
    for name, (model, arguments) in cases.items():
        before = str([vars(module) for module in model.modules()])
        text = said(lambda: apply_expert_parallel(model, **{"group": world, **arguments}))
        found[name] = text, str([vars(module) for module in model.modules()]) == before
    return found


def test_what_cannot_be_spread_is_one_line_and_stays_as_it_is(ranks):
    share = "ValueError: 4 ranks must divide 6 experts, and 1 ranks their width 32"
    for found in ranks(refused):
        assert found == {
            "dense": ("ValueError: the model has no mixture of experts: call apply_moe first", True),
            "experts": (share, True),
            "width": ("ValueError: 2 ranks must divide 8 experts, and 4 ranks their width 10", True),
            "twice": ("ValueError: the experts are split already", True),
            "two hops": (
                "ValueError: two groups: pass batch_group too, all ranks whose tokens make up the batch",
                True,
            ),
            "hops' experts": (share, True),
        }


def made_groups() -> dict[str, object]:
    found = {}
    for sizes in ((4, 1, 1), (2, 1, 1), (2, 1, 2), (4, 2, 1), (1, 1, 4)):
        groups = ExpertGroups.make(*sizes)
        named = [("exchange", groups.exchange), ("copies", [groups.copies]), ("dp", [groups.dp]), ("tp", [groups.tp])]
        found[sizes] = {name: [dist.get_process_group_ranks(g) for g in each] for name, each in named}
    for sizes in ((3, 1, 1), (4, 1, 2), (4, 3, 1)):
        found[sizes] = said(lambda: ExpertGroups.make(*sizes))
    return found


def test_groups_of_a_rank(ranks):
    """tp innermost, then the ranks of a node, then nodes, then copies."""
    found = ranks(made_groups)
    everybody = [0, 1, 2, 3]
    assert found[1][4, 1, 1] == {"exchange": [everybody], "copies": [[1]], "dp": [everybody], "tp": [[1]]}
    assert found[1][2, 1, 1] == {"exchange": [[0, 1]], "copies": [[1, 3]], "dp": [everybody], "tp": [[1]]}
    assert found[2][2, 1, 2] == {"exchange": [[0, 2]], "copies": [[2]], "dp": [[0, 2]], "tp": [[2, 3]]}
    assert found[3][4, 2, 1] == {"exchange": [[1, 3], [2, 3]], "copies": [[3]], "dp": [everybody], "tp": [[3]]}
    assert found[3][1, 1, 4] == {"exchange": [[3]], "copies": [[3]], "dp": [[3]], "tp": [everybody]}
    for ep, nodes, tp in ((3, 1, 1), (4, 1, 2), (4, 3, 1)):
        assert found[0][ep, nodes, tp].startswith(f"ValueError: --ep {ep} times --tp {tp} must divide the 4 ranks")


def test_all_groups_come_from_one_mesh(monkeypatch):
    """Its ranks split the world once for each kind of group, however many groups of a kind there are."""
    meshes, make = [], expert_model.init_device_mesh
    noted = lambda *given, **named: meshes.append(given[1:]) or make(*given, **named)  # noqa: E731
    monkeypatch.setattr(expert_model, "init_device_mesh", noted)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "gloo")  # of fake ranks on the CPU
    with as_rank(0, 128):
        groups = ExpertGroups.make(16, 2, 4)
        assert meshes == [((2, 2, 8, 4),)]
        assert [each.size() for each in (*groups.exchange, groups.copies, groups.dp, groups.tp)] == [2, 8, 2, 32, 4]


def test_the_names_of_the_notebook_are_here():
    layer = apply_moe(Transformer(OF), 4, 2).blocks[0].mlp
    assert isinstance(layer, MoE) and isinstance(layer.router, Router)


def test_dispatch_ratio():
    """DeepSeek-V3's layer by hand: bytes there and back over bandwidth, over products at the peak."""
    tokens, hidden, f, k, copies, bandwidth, peak = 4096, 7168, 2048, 8, 3.5, 50e9, 1e15
    moved, computed = tokens * hidden * copies * (1 + 2) / bandwidth, tokens * k * 6 * hidden * f / peak
    assert dispatch_ratio(copies, k, f, bandwidth, peak, 1, 2) == pytest.approx(moved / computed)
    assert dispatch_ratio(copies, k, f, bandwidth, peak) == pytest.approx(4 / 3 * moved / computed)


# The program.


ARGUMENTS = ["--preset", "debug", "--steps", "2", "--seq", "16", "--experts", "4", "--expert-hidden", "64"]


def trained(argv: list[str]) -> list[float]:
    with short_corpus():
        return [record["loss"] for record in main(argv)]


def of_one_process(*more: str) -> torch.Tensor:
    chosen = options([*ARGUMENTS, "--batch", "8", "--dtype", "fp32", *more])
    sizes = chosen.experts, chosen.top_k, chosen.expert_hidden, chosen.shared

    def build(config, seed):
        return apply_moe(Transformer(config, seed), *sizes, seed, score=chosen.score, aux_loss_coeff=chosen.balance)

    with short_corpus():
        return torch.tensor([record["loss"] for record in single_gpu.run(chosen, build=build)])


def test_main_trains_as_one_process_in_each_layout(ranks):
    """The same global batch of 8; what each rank has of it goes with the layout."""
    plain, sigmoid = of_one_process(), of_one_process("--score", "sigmoid", "--shared", "1", "--top-k", "1")
    for batch, more, expected in (
        ("2", [], plain),
        ("2", ["--ep", "2", "--recompute", "full"], plain),
        ("8", ["--tp", "4", "--recompute", "selective"], plain),
        ("2", ["--nodes", "2"], plain),
        ("4", ["--score", "sigmoid", "--shared", "1", "--top-k", "1", "--ep", "2", "--tp", "2"], sigmoid),
    ):
        argv = [*ARGUMENTS, "--batch", batch, "--dtype", "fp32", *more]
        for found in ranks(trained, argv):
            torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=0, msg=lambda m: f"{argv}: {m}")


def test_main_with_biases_nodes_and_micro_batches_agrees_across_layouts(ranks):
    """One balance for all: the losses of its micro-batches are alike where they have the same tokens."""
    more = ["--bias-rate", "0.01", "--z", "0.001", "--nodes", "2", "--node-limit", "1", "--balance", "0"]
    found = {}
    for layout in (
        ["--batch", "2"],
        ["--batch", "2", "--micro-batch", "1"],
        ["--batch", "4", "--tp", "2", "--ep", "2"],
    ):
        found[str(layout)] = ranks(trained, [*ARGUMENTS, "--dtype", "fp32", *layout, *more])
    expected, *others = [torch.tensor(losses) for losses in found.values()]
    for losses in others:
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


def test_main_trains_in_bfloat16_with_a_capacity(ranks):
    expected = of_one_process()
    for more in ([], ["--capacity", "4"]):  # four times the even share drops little, if anything
        for found in ranks(trained, [*ARGUMENTS, "--batch", "2", "--dtype", "bf16", *more]):
            torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-2, atol=0)  # 8 significant bits


def written(argv: list[str]) -> str:
    """On a rank: what main prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), short_corpus():
        main(argv)
    return printed.getvalue()


def test_what_main_prints(ranks):
    first, *others = ranks(written, [*ARGUMENTS, "--batch", "2", "--dtype", "fp32"])
    assert "4 experts in place of each MLP, 2 per token: " in first and not any(others)
    assert first.splitlines()[-1].startswith("last step, busiest expert over its even share, by layer: [")


def impossible(argv: list[str]) -> str:
    with short_corpus():
        return said(lambda: main([*ARGUMENTS, "--dtype", "fp32", "--batch", "2", *argv]))


def test_main_says_in_one_line_what_it_cannot_do(ranks, capsys):
    for argv, text in (
        (["--ep", "3"], "ValueError: --ep 3 times --tp 1 must divide the 4 ranks"),
        (["--ep", "4", "--tp", "2"], "ValueError: --ep 4 times --tp 2 must divide the 4 ranks"),
        (["--experts", "6"], "ValueError: 4 ranks must divide 6 experts"),
        (["--expert-hidden", "6", "--tp", "4"], "ValueError: 1 ranks must divide 4 experts, and 4 ranks their width 6"),
    ):
        assert all(found.startswith(text) for found in ranks(impossible, argv)), (argv, ranks(impossible, argv))
    for argv in (
        ["--experts", "0"],
        ["--top-k", "5"],
        ["--top-k", "0"],
        ["--score", "relu"],
        ["--expert-hidden", "0"],
        ["--shared", "-1"],
        ["--capacity", "0"],
        ["--ep", "0"],
        ["--nodes", "0"],
        ["--nodes", "3"],
        ["--nodes", "2", "--node-limit", "3"],
        ["--nodes", "4", "--node-limit", "1"],
        ["--tp", "0"],
        ["--tp", "3"],
        ["--micro-batch", "0"],
        ["--batch", "2", "--micro-batch", "3"],
        ["--recompute", "matmuls"],
    ):
        with pytest.raises(SystemExit) as stopped:
            options([*ARGUMENTS, *argv])
        assert stopped.value.code == 2, argv
        assert "error: " in capsys.readouterr().err.splitlines()[-1]


def batch_groups_said() -> list[str]:
    """On one of 2 x 2 ranks: what is said to batch groups that do not fit; and whether the model is as before."""
    groups, world = ExpertGroups.make(ep=2, nodes=1, tp=2), dist.group.WORLD
    found = []
    for sequence, batch_group in ((True, groups.dp), (False, world)):
        with torch.device("meta"):
            model = apply_tensor_parallel(apply_moe(Transformer(OF), 4, 2), groups.tp)
        if sequence:
            apply_sequence_parallel(model, groups.tp, reduce_group=world)
        before = {name: id(parameter) for name, parameter in model.named_parameters()}
        found.append(said(lambda: apply_expert_parallel(model, groups.exchange, groups.copies, batch_group, groups.tp)))
        assert before == {name: id(parameter) for name, parameter in model.named_parameters()}
    return found


def test_a_batch_group_that_does_not_fit_is_refused(ranks):
    for with_sequence, without in ranks(batch_groups_said):
        assert with_sequence.startswith("ValueError: batch_group must hold all tensor-parallel ranks")
        assert without.startswith("ValueError: batch_group must hold one tensor-parallel rank alone")
