"""course_lib.tensor_parallel.model on two to four ranks against one process: results, traffic, memory, order. CPU,
gloo.
"""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from calls import peak_bytes, said, short_corpus
from course_kit.ranks import Ranks
from course_lib.collectives.traffic import count_traffic
from course_lib.data_parallel.replicas import DataParallel
from course_lib.single_gpu import training as single_gpu
from course_lib.single_gpu.memory import activation_bytes, param_count
from course_lib.single_gpu.model import Transformer, loss
from course_lib.single_gpu.placement import placement_of
from course_lib.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, replicas_of
from course_lib.tensor_parallel.model import apply_tensor_parallel, main
from course_lib.tensor_parallel.shards import TensorShard, gather_state_dict
from course_lib.tensor_parallel.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy
from course_lib.zero.shards import clip_grad_norm_
from split_models import (
    BATCH,
    MAX_NORM,
    RECOMPUTE,
    REPLICAS,
    SEQ,
    Diary,
    batches,
    config,
    differing,
    group_of,
    in_replicas,
    kept_storages,
    meta_model,
    not_as,
    on_ranks,
    one_process,
    split_loss,
    split_model,
    stored,
    whole_gradients,
    whole_model,
)

# (ranks, K/V heads, tied, options): K/V heads more than ranks, as many, fewer.
WAYS = [
    (2, 4, False, {"meta": True, "optimizer": "AdamW"}),
    (2, 2, True, {"chunks": 2, "recompute": "matmuls"}),
    (2, 1, False, {"recompute": "full"}),
    (3, 6, False, {"chunks": 2, "recompute": "full"}),
    (3, 3, True, {"meta": True}),
    (3, 1, True, {"recompute": "matmuls", "optimizer": "AdamW"}),
    (4, 12, False, {"chunks": 3, "meta": True}),
    (4, 4, True, {"gather_logits": True}),
    (4, 2, True, {"recompute": "partitioned", "meta": True}),
    (4, 2, False, {"chunks": 3, "recompute": "partitioned"}),
    (4, 1, False, {"recompute": "selective", "chunks": 2, "gather_logits": True}),
]


def training_differs() -> dict[str, list[str]]:
    """On a rank: what differs from one process, or has drifted apart, by way of training."""
    found, groups = {}, {n: group_of(n) for n in (2, 3, 4)}
    for n, kv_heads, tied, options in WAYS:
        of = config(kv_heads, tied)
        ours, apart = on_ranks(of, groups[n], **options)
        expected = one_process(of, options.get("optimizer", "SGD"))
        drift = [f"{name} has drifted" for name in apart]
        found[f"{n} {kv_heads} {tied} {options}"] = differing(ours, expected) + drift
    return found


def test_training_is_that_of_one_process(ranks):
    """Losses, gradients, norms, weights after 3 clipped steps; copies and whole parameters have the same bits."""
    for found in ranks(training_differs):
        assert len(found) == len(WAYS)
        assert not any(found.values()), {way: wrong for way, wrong in found.items() if wrong}


def error_of(found: dict, exact: dict) -> dict[str, float]:
    """By name, the norm of the error over that of the exact tensor."""
    return {name: ((found[name].double() - exact[name]).norm() / exact[name].norm()).item() for name in exact}


def in_bfloat16(kv_heads: int) -> dict[str, tuple]:
    """On a rank: dtypes of logits and gradients, errors of the loss, of gradients of a split and of a whole model."""
    of, group, found = config(kv_heads), dist.group.WORLD, {}
    inputs, targets = batches(0)
    exact = whole_model(of).double()
    exact_loss = F.cross_entropy(exact(inputs).flatten(0, 1), targets.flatten())
    exact_loss.backward()
    gradients = {name: p.grad for name, p in exact.named_parameters()}
    for how, chunks in (("bfloat16", 1), ("bfloat16", 3), ("autocast", 1), ("autocast", 3)):
        split, whole = split_model(of, group, chunks=chunks), whole_model(of)
        if how == "bfloat16":
            split, whole = split.bfloat16(), whole.bfloat16()
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            logits, whole_logits = split(inputs), whole(inputs)
        step_loss = vocab_parallel_cross_entropy(logits, targets, group, of.vocab)
        step_loss.backward()
        loss(whole_logits, targets).backward()
        ours = error_of(whole_gradients(split), gradients)
        theirs = error_of({name: p.grad for name, p in whole.named_parameters()}, gradients)
        dtypes = logits.dtype, split.norm.weight.grad.dtype, step_loss.dtype
        found[f"{how} {chunks}"] = dtypes, abs(step_loss.item() / exact_loss.item() - 1), ours, theirs
    return found


def test_bfloat16_is_as_exact_as_in_one_process(ranks):
    """Against float64: the loss within 1%; each gradient's error at most twice that of one process and 0.5%."""
    for kv_heads in (4, 2):
        for found in ranks(in_bfloat16, kv_heads):
            for how, (dtypes, loss_error, ours, theirs) in found.items():
                kept = torch.bfloat16 if how.startswith("bfloat16") else torch.float32
                assert dtypes == (torch.bfloat16, kept, torch.float32), (how, dtypes)
                assert loss_error < 1e-2, (how, loss_error)
                worse = {name: (ours[name], theirs[name]) for name in ours if ours[name] > 2 * theirs[name] + 5e-3}
                assert not worse and max(ours.values()) < 0.2, (how, worse, max(ours.values()))


# Construction.


def built(kv_heads: int, tied: bool) -> dict[str, object]:
    """On a rank: whether its parts are slices of the unsplit model, bit by bit; the peak of building them."""
    of, group, found, kept = config(kv_heads, tied), dist.group.WORLD, {}, []
    whole = dict(whole_model(of).named_parameters(remove_duplicate=False))
    for meta in (False, True):
        model = split_model(of, group, meta)
        wrong = []
        for name, p in model.named_parameters(remove_duplicate=False):
            shard = placement_of(p).tensor_shard
            same = torch.equal(p, shard.cut(whole[name]) if shard else whole[name])
            wrong += [name] * (not same or p.is_meta or not p.is_contiguous())
            wrong += [f"{name} is whole"] * (p.untyped_storage().nbytes() != 4 * p.numel())
        wrong += ["tied"] * ((model.head.weight is model.embedding.weight) != tied)
        wrong += ["names"] * (list(model.state_dict()) != list(Transformer(of).state_dict()))
        found[f"meta {meta}"] = wrong
    peak = peak_bytes(lambda: kept.append(split_model(of, group, meta=True)))
    largest = max(4 * p.numel() for p in whole.values())
    found["peak"] = peak, stored(kept[0].parameters()), largest
    return found


@pytest.mark.parametrize("kv_heads, tied", [(4, False), (2, True), (1, False)])
def test_a_model_from_the_meta_device_has_the_same_bits_and_is_never_whole(ranks, kv_heads, tied):
    """Above the parts, there is one whole parameter at a time, and what is needed to fill it with random numbers."""
    for rank, found in enumerate(ranks(built, kv_heads, tied)):
        assert not found["meta False"] and not found["meta True"], (rank, found)
        peak, own, largest = found["peak"]
        assert own <= peak <= own + largest + 1000, (rank, found["peak"])


# With data parallelism, over the other axis of a mesh.


def composed(how: str, kv_heads: int) -> dict[str, torch.Tensor]:
    """On one of 2 x 2 ranks: losses, norms and the weights after 3 steps; each pair has half of the batch."""
    of = config(kv_heads)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"].get_group(), mesh["tp"].get_group()
    model = apply_tensor_parallel(meta_model(of) if how == "fully_shard" else whole_model(of), tp)
    return in_replicas(how, model, dp, tp, lambda whole: whole.chunk(2)[dp.rank()])


@pytest.mark.parametrize("how", REPLICAS)
def test_data_parallelism_over_the_other_axis_trains_as_one_process(ranks, how):
    """Clipped by the norm of all: squares are added up over both axes for what is split over both."""
    for kv_heads in (4, 1):
        for found in ranks(composed, how, kv_heads):
            assert not not_as(found, one_process(config(kv_heads))), (how, kv_heads)


# What is sent, kept, and when.


def sent_and_kept(n: int, kv_heads: int, tied: bool, chunks: int, gather_logits: bool) -> list[str]:
    """On a rank: what is wrong with the traffic of a step, the bytes of parameters and those kept for backward."""
    of, group, wrong = config(kv_heads, tied), group_of(n), []
    model = split_model(of, group, chunks=chunks, gather_logits=gather_logits)
    if group.size() < n:
        return wrong
    inputs, targets = batches(0)
    members, tokens = tuple(dist.get_process_group_ranks(group)), BATCH * SEQ

    with count_traffic() as forward, kept_storages(but=model.parameters()) as kept:
        step_loss = split_loss(model, inputs, targets, group)
    with count_traffic() as backward:
        step_loss.backward()
    hidden = 2 * (n - 1) * 4 * tokens * of.hidden // n  # bytes that an all-reduce of hidden states sends
    scalars = 2 * (n - 1) * 4 * tokens  # ... of three numbers a token: n times
    copies = n // kv_heads
    for name, traffic, calls, bytes_sent in (
        ("forward", forward, 1 + 2 * of.layers * chunks, (1 + 2 * of.layers) * hidden),
        ("backward", backward, 1 + 2 * of.layers, (1 + 2 * of.layers) * hidden),
    ):
        over = traffic.select("all_reduce", members)
        small = [r for r in over.records if r.bytes in (scalars // n, 2 * scalars // n)]
        large = [r for r in over.records if r not in small]
        wrong += [f"{name}: {len(large)} all-reduces, not {calls}"] * (len(large) != calls)
        total = sum(record.bytes for record in large)
        wrong += [f"{name}: {total} bytes, not {bytes_sent}"] * (abs(total - bytes_sent) > n * calls)
        loss_calls = 2 * (name == "forward" and not gather_logits)
        wrong += [f"{name}: {len(small)} of the loss"] * (len(small) != loss_calls)
        others = [r for r in traffic.records if r not in over.records]
        if name == "forward" and gather_logits:
            gathered = (n - 1) * 4 * tokens * -(-of.vocab // n)
            wrong += [f"logits: {others}"] * ([(r.collective, r.bytes) for r in others] != [("all_gather", gathered)])
        elif name == "backward" and n > copies > 1:
            pair = tuple(dist.get_process_group_ranks(model.blocks[0].attention.k_proj.replicas.copies))
            each = 2 * (copies - 1) * 4 * of.head_dim * of.hidden // copies
            expected = [("all_reduce", pair, each)] * 2 * of.layers
            wrong += [f"copies: {others}"] * ([(r.collective, r.group, r.bytes) for r in others] != expected)
            wrong += ["not these copies"] * (pair != tuple(m for m in members if m // copies == group.rank() // copies))
        else:
            wrong += [f"{name}: {others}"] * bool(others)
    weights = stored(model.parameters())
    enough = 4 * param_count(of, n) + 4 * of.hidden * n * (2 - tied)  # an odd vocabulary: up to n rows more
    wrong += [f"{weights} bytes of weights, not {enough}"] * (weights > enough or weights != stored_exactly(model))
    if not gather_logits:
        formula = activation_bytes(of, BATCH, SEQ, 4, fused_norm=False, tp=n) / tokens
        # In place of the 16 of tokens and targets: 8 of the embedding's rows, and two masks. And odd sizes.
        of_split = -6 + 4 * (TensorShard.of(of.vocab, group).size - of.vocab / n)
        off = sum(kept.values()) / tokens - formula - of_split
        wrong += [f"{off:+.1f} bytes a token kept beyond the formula"] * (abs(off) > 1)
    return wrong


def stored_exactly(model: nn.Module) -> int:
    return sum(4 * p.numel() for p in model.parameters())


TRAFFIC = [
    (2, 4, False, 1, False),
    (2, 2, True, 2, False),
    (4, 4, True, 1, True),
    (4, 2, True, 1, False),
    (4, 2, False, 2, False),
    (3, 6, False, 1, False),
]


def test_what_is_sent_and_what_is_kept(ranks):
    """Two all-reduces a layer each way, one at each end, two small ones of the loss; copies send for themselves.

    Kept: memory.activation_bytes, less 6 bytes a token: the split loss keeps no targets.
    """
    for case in TRAFFIC:
        for rank, wrong in enumerate(ranks(sent_and_kept, *case)):
            assert not wrong, (case, rank, wrong)


def in_order(chunks: int) -> tuple[list, list, dict]:
    """On a rank: the diaries of a forward and a backward, and multiplications of each product."""
    of, group = config(4), dist.group.WORLD
    model, (inputs, targets) = split_model(of, group, chunks=chunks), batches(0)
    with Diary() as forward:
        step_loss = split_loss(model, inputs, targets, group)
    with Diary() as backward:
        step_loss.backward()
    return forward.events, backward.events


def test_sums_travel_beside_products(ranks):
    """Backward: x's gradient is sent before the products for the weights, and waited for after them."""
    of, n, tokens = config(4), 4, BATCH * SEQ
    hidden = tokens * of.hidden
    qkv = [hidden * of.hidden // n * share // of.heads for share in (of.heads, of.kv_heads, of.kv_heads)]
    gate = [hidden * of.ffn_hidden // n] * 2
    row = {"o": [hidden * of.hidden // n] * 2, "down": gate}  # of x, of the weight
    for chunks in (1, 3):
        for forward, backward in ranks(in_order, chunks):
            works = [event for event in backward if event[0] in ("start", "wait", "sum")]
            assert works == [("start", hidden), ("wait", 0)] * (1 + 2 * of.layers), works
            products = [[]]
            for word, number in backward:
                if word == "product":
                    products[-1].append(number)
                else:
                    products.append([])
            *layers, last = products[2:]  # the head's stand before and beside its sum
            assert last == []
            for _ in range(of.layers):
                for rows, columns in (("down", gate), ("o", qkv)):
                    before, beside, *layers = layers
                    assert before == row[rows] + columns and beside == columns, (rows, before, beside)
            assert not layers
            in_chunks = [event for event in forward if event[0] in ("start", "wait")]
            if chunks == 1:
                assert not in_chunks and sum(event[0] == "sum" for event in forward) == 1 + 2 * of.layers + 2
            else:
                sizes = [len(part) * of.hidden for part in torch.arange(tokens).chunk(chunks)]
                once = [("start", size) for size in sizes] + [("wait", 0)] * chunks
                assert in_chunks == once * 2 * of.layers
                places = [i for i, event in enumerate(forward) if event[0] == "start"]
                assert all(forward[i - 1][0] == "product" for i in places), "each chunk goes as soon as it is there"


# Parts of a model, other inputs.


def other_uses() -> dict[str, object]:
    """On a rank: what is wrong, by use."""
    of, group, found = config(2, tied=True), dist.group.WORLD, {}
    whole, (inputs, targets) = whole_model(of), batches(0)
    expected = whole(inputs).detach()

    def same(ours: torch.Tensor, theirs: torch.Tensor) -> list[str]:
        return differing({"it": ours}, {"it": theirs})

    model = split_model(of, group, gather_logits=True)
    found["gather_logits"] = same(model(inputs), expected)
    positions = torch.randint(50, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    found["positions [b, s]"] = same(model(inputs, positions), whole(inputs, positions))
    model.eval()
    with torch.no_grad():
        out = model(inputs)
    found["eval"] = same(out, expected) + ["a graph"] * out.requires_grad
    shifted = split_model(of, group)(inputs)
    found["own logits"] = same(shifted, TensorShard.of(97, group, -1).cut(expected))

    first, last = split_model(of, group), split_model(of, group, gather_logits=True)
    first.head, last.embedding = None, None
    hidden = first(inputs)
    given = hidden.detach().requires_grad_()
    found["stages"] = same(last(given), whole.head(whole.norm(run_blocks(whole, hidden.detach()))))
    with count_traffic() as traffic:
        last(hidden.detach()).sum()
    found["a hidden state without gradient"] = [] if traffic.select("all_gather").calls == 1 else ["traffic"]
    for missing in ("embedding", "head"):
        whole_part, part = whole_model(of), whole_model(of)
        setattr(whole_part, missing, None)
        setattr(part, missing, None)
        apply_tensor_parallel(part, group, gather_logits=True)
        x = inputs if missing == "head" else hidden.detach()
        mine, theirs = (x.clone().requires_grad_(x.is_floating_point()) for _ in range(2))
        ours_out, theirs_out = part(mine), whole_part(theirs)
        found[f"without {missing}"] = same(ours_out, theirs_out)
        ours_out.square().sum().backward()
        theirs_out.square().sum().backward()
        gradients = {name: p.grad for name, p in whole_part.named_parameters() if p.grad is not None}
        found[f"without {missing}"] += differing(whole_gradients(part), gradients)
        if x.is_floating_point():
            found[f"without {missing}"] += same(mine.grad, theirs.grad)

    frozen = split_model(of, group)
    for name, p in frozen.named_parameters():
        p.requires_grad_("v_proj" in name or "down" in name)
    for name, p in whole.named_parameters():
        p.requires_grad_("v_proj" in name or "down" in name)
    for how in RECOMPUTE:
        frozen.zero_grad()
        whole.zero_grad()
        split_loss(RECOMPUTE[how](frozen, group), inputs, targets, group).backward()
        loss(whole(inputs), targets).backward()
        theirs = {name: p.grad for name, p in whole.named_parameters() if p.requires_grad}
        ours = {n: placement_of(p).tensor_shard.gather(p.grad) for n, p in frozen.named_parameters() if p.requires_grad}
        found[f"frozen, {how}"] = differing(ours, theirs)
        found[f"frozen, {how}"] += ["gradients"] * any(p.grad is not None for p in frozen.norm.parameters())
    partly = whole_model(of)
    partly.blocks.requires_grad_(False)
    apply_tensor_parallel(partly, group)
    split_ones = [p.requires_grad for p in partly.blocks.parameters()]
    found["frozen before the split"] = ["a gradient"] * any(split_ones)
    dist.barrier(group)  # a rank that returns closes the groups it has just made, on which others may still connect
    return found


def run_blocks(model: Transformer, x: torch.Tensor) -> torch.Tensor:
    """The hidden states x [b, s, h] through all blocks."""
    bare = copy.deepcopy(model)
    bare.embedding = bare.head = None
    return bare(x)


def test_other_uses_of_a_split_model(ranks):
    for found in ranks(other_uses):
        assert not any(found.values()), {use: wrong for use, wrong in found.items() if wrong}


def layer_by_layer(n: int) -> dict[str, object]:
    """On a rank: what is wrong with layers by themselves: biases, copies of them, sizes that do not divide."""
    group, found = group_of(n), {}
    copies = 2 if group.size() % 2 == 0 else 1
    replicas = replicas_of(group, copies)
    torch.manual_seed(0)
    x = torch.randn(5, 13)
    for out_features in (11, 12):
        whole = nn.Linear(13, out_features)
        layer = ColumnParallelLinear(whole, group, gather_output=True)
        for at, inputs in (("2", x), ("4", x[:, None, None].repeat(1, 2, 3, 1))):
            ours, theirs = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
            layer.zero_grad()
            whole.zero_grad()
            layer(ours).square().sum().backward()
            whole(theirs).square().sum().backward()
            pairs = {"x": (ours.grad, theirs.grad), "out": (layer(inputs), whole(inputs))}
            for name, p in layer.named_parameters():
                pairs[name] = placement_of(p).tensor_shard.gather(p.grad), whole.get_parameter(name).grad
            found[f"column {out_features} {at}"] = differing(*({k: v[i] for k, v in pairs.items()} for i in (0, 1)))
    with count_traffic() as traffic:
        layer(x).sum().backward()  # x wants no gradient: nothing is summed
    found["x without gradient"] = [str(traffic)] * (traffic.select("all_reduce").calls != 0)
    whole = nn.Linear(13, 3 * group.size() // copies)
    layer = ColumnParallelLinear(whole, group, replicas if copies > 1 else None)
    of_rank = group.rank() // copies
    layer(x).square().sum().backward()
    whole(x).square().sum().backward()
    weight, bias = whole.weight.grad.split(3)[of_rank], whole.bias.grad.split(3)[of_rank]
    ours = {"weight": layer.weight.grad / copies, "bias": layer.bias.grad / copies}  # used by each copy
    found["copies"] = differing(ours, {"weight": weight, "bias": bias})
    for chunks in (1, 2, 7):
        whole = nn.Linear(13, 6)
        layer = RowParallelLinear(whole, group, chunks)
        theirs = x.clone().requires_grad_()
        ours = TensorShard.of(13, group, 1).cut(x).clone().requires_grad_()
        layer(ours).square().sum().backward()
        whole(theirs).square().sum().backward()
        pairs = {"out": (layer(ours), whole(x)), "x": (ours.grad, TensorShard.of(13, group, 1).cut(theirs.grad))}
        pairs["weight"] = placement_of(layer.weight).tensor_shard.gather(layer.weight.grad), whole.weight.grad
        pairs["bias"] = layer.bias.grad, whole.bias.grad
        found[f"row {chunks}"] = differing(*({k: v[i] for k, v in pairs.items()} for i in (0, 1)))
    embedding, tokens = nn.Embedding(97, 3), torch.arange(97).repeat(2).view(2, 97)
    layer = VocabParallelEmbedding(embedding, group)
    layer(tokens).square().sum().backward()
    embedding(tokens).square().sum().backward()
    pairs = {"out": (layer(tokens), embedding(tokens))}
    pairs["weight"] = placement_of(layer.weight).tensor_shard.gather(layer.weight.grad), embedding.weight.grad
    found["embedding"] = differing(*({k: v[i] for k, v in pairs.items()} for i in (0, 1)))
    return found


@pytest.mark.parametrize("n", [2, 3, 4])
def test_layers_by_themselves(ranks, n):
    for found in ranks(layer_by_layer, n):
        assert not any(found.values()), {use: wrong for use, wrong in found.items() if wrong}


# The loss.


def losses_of(scale: float, dtype: torch.dtype, ignored: str) -> dict[str, tuple]:
    """On a rank: pairs of what vocab_parallel_cross_entropy and F.cross_entropy make; the second backward's message."""
    group, found, vocab = dist.group.WORLD, {}, 97
    shard = TensorShard.of(vocab, group, -1)
    torch.manual_seed(0)
    logits, targets = (scale * torch.randn(3, 5, vocab)).to(dtype), torch.randint(vocab, (3, 5))
    if ignored != "none":
        targets[0 if ignored == "some" else slice(None)] = -100
    for reduction in ("mean", "sum"):
        ours, theirs = shard.cut(logits).clone().requires_grad_(), logits.clone().requires_grad_()
        got = vocab_parallel_cross_entropy(ours, targets, group, vocab, reduction)
        expected = F.cross_entropy(theirs.flatten(0, 1).float(), targets.flatten(), reduction=reduction)
        before = ours.detach().clone()
        got.backward(retain_graph=True)
        expected.backward()
        found[reduction] = (got.detach(), expected.detach()), (ours.grad, shard.cut(theirs.grad))
        found[reduction, "again"] = said(got.backward)
        found[reduction, "unchanged"] = torch.equal(before, ours)
        with torch.no_grad():
            alone = vocab_parallel_cross_entropy(ours, targets, group, vocab, reduction)
        found[reduction, "no grad"] = alone.equal(got) or bool(alone.isnan() and got.isnan())
    equal, targets = logits[..., :96], targets.clamp(max=95)
    own = equal.chunk(4, -1)[group.rank()]
    got = vocab_parallel_cross_entropy(own, targets)
    expected = F.cross_entropy(equal.flatten(0, 1).float(), targets.flatten())
    found["all have as many"] = (got, expected), (got, expected)
    return found


@pytest.mark.parametrize(
    "scale, dtype, ignored",
    [(1, torch.float32, "none"), (1e4, torch.float32, "some"), (3, torch.bfloat16, "some"), (1, torch.float32, "all")],
)
def test_the_loss_is_that_of_all_logits(ranks, scale, dtype, ignored):
    """bfloat16: the gradient within its rounding. All targets ignored: NaN and gradients of 0, as F.cross_entropy."""
    for found in ranks(losses_of, scale, dtype, ignored):
        for name in ("mean", "sum", "all have as many"):
            (got, expected), (grad, expected_grad) = found[name]
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
            assert grad.dtype == expected_grad.dtype
            rounding = {"rtol": 1e-2, "atol": 1e-5} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-6}
            torch.testing.assert_close(grad, expected_grad, equal_nan=True, **rounding)
        for name in ("mean", "sum"):
            assert "modified by an inplace operation" in found[name, "again"], found[name, "again"]
            assert found[name, "unchanged"] and found[name, "no grad"]
    if ignored == "all":
        assert got.isnan() and not grad.any() or found["sum"][0][0] == 0


# Mistakes.


def refused() -> dict[str, tuple[str, bool]]:
    """On a rank: what is said of models that cannot be split, and whether they are as before."""
    group, found = dist.group.WORLD, {}
    base = config(4)
    cases = {
        "heads": dataclasses.replace(base, heads=6, kv_heads=6),
        "ffn_hidden": dataclasses.replace(base, ffn_hidden=62),
        "kv_heads": dataclasses.replace(base, kv_heads=6),
        "vocab": dataclasses.replace(base, vocab=5),
    }
    for name, of in cases.items():
        model = Transformer(of)
        before = list(model.modules()), list(model.parameters()), [vars(b.attention).keys() for b in model.blocks]
        text = said(lambda: apply_tensor_parallel(model, group))
        after = list(model.modules()), list(model.parameters()), [vars(b.attention).keys() for b in model.blocks]
        same = before[0] == after[0] and all(a is b for a, b in zip(before[1], after[1], strict=True))
        found[name] = text, same and before[2] == after[2]
    model = split_model(base, group)
    before = list(model.modules())
    found["twice"] = said(lambda: apply_tensor_parallel(model, group)), list(model.modules()) == before
    found["ranks"] = said(lambda: main(["--preset", "small", "--dtype", "fp32", "--steps", "1", "--tp", "8"])), True
    return found


def test_what_cannot_be_split_is_one_line_and_stays_as_it_is(ranks):
    first, *others = ranks(refused)
    assert others == [first] * 3
    words = {
        "heads": "ValueError: tp 4 does not divide heads, which is 6",
        "ffn_hidden": "ValueError: tp 4 does not divide ffn_hidden, which is 62",
        "kv_heads": "ValueError: tp 4 and kv_heads, which is 6: neither divides the other",
        "vocab": "ValueError: tp 4 leaves a rank without a token of vocab, which is 5",
        "twice": "ValueError: the model is split already",
        "ranks": "ValueError: --tp 8 does not divide the 4 ranks",
    }
    for name, text in words.items():
        assert first[name] == (text, True)


def other_orders() -> dict[str, object]:
    """On a rank: groups whose ranks were named in another order; all copies in one group; uneven groups."""
    found, of = {}, config(2)
    group = dist.new_group([3, 1, 0, 2])
    found["members"] = dist.get_process_group_ranks(group)
    ours, apart = on_ranks(of, group)
    found["differing"] = differing(ours, one_process(of)) + apart
    strided = dist.new_subgroups_by_enumeration([[0, 2], [3, 1]])[0]
    ours, apart = on_ranks(config(1), strided, meta=True)
    found["strided"] = differing(ours, one_process(config(1))) + apart
    found["members of two"] = dist.get_process_group_ranks(strided)
    return found


def test_the_order_of_a_groups_ranks_is_the_groups_own(ranks):
    """PyTorch sorts the ranks of a new group."""
    for rank, found in enumerate(ranks(other_orders)):
        assert found["members"] == [0, 1, 2, 3] and not found["differing"], found
        assert found["members of two"] == ([0, 2], [1, 3])[rank % 2] and not found["strided"], found


def saved() -> dict[str, object]:
    """On a rank: states of a split model, whole and in parts."""
    of, group, found = config(2, tied=True), dist.group.WORLD, {}
    model, whole = split_model(of, group, meta=True), whole_model(of)
    names = list(whole.state_dict())
    found["names"] = list(model.state_dict()) == names == list(gather_state_dict(model))
    state = gather_state_dict(model)
    found["bits"] = all(torch.equal(state[name], value) for name, value in whole.state_dict().items())
    found["own memory"] = all(state[name].untyped_storage().nbytes() == 4 * state[name].numel() for name in names)
    again = Transformer(of, seed=5)
    again.load_state_dict(state)
    found["loads"] = all(torch.equal(p, q) for p, q in zip(again.parameters(), whole.parameters(), strict=True))
    other = apply_tensor_parallel(Transformer(of, seed=5), group)
    other.load_state_dict(model.state_dict())
    found["parts load"] = all(torch.equal(p, q) for p, q in zip(other.parameters(), model.parameters(), strict=True))
    found["still split"] = [placement_of(p).tensor_shard is None for p in other.parameters()] == [
        placement_of(p).tensor_shard is None for p in model.parameters()
    ]
    moved = model.to(torch.bfloat16)
    found["moved"] = all((placement_of(p).tensor_shard is not None) == (p.dim() > 1) for p in moved.parameters())
    return found


def test_states_of_a_split_model(ranks):
    for found in ranks(saved):
        assert all(found.values()), found


# The program.


ARGUMENTS = ["--preset", "debug", "--steps", "2", "--seq", "16"]


def trained(argv: list[str]) -> list[float]:
    with short_corpus():
        return [record["loss"] for record in main(argv)]


def of_one_process() -> torch.Tensor:
    with short_corpus():
        alone = single_gpu.main([*ARGUMENTS, "--batch", "8", "--dtype", "fp32"])
    return torch.tensor([record["loss"] for record in alone])


def test_main_trains_as_one_process_for_each_degree(ranks):
    """The same global batch of 8; what each set of ranks has of it goes with their number."""
    expected = of_one_process()
    for tp, batch, more in (
        ("1", "2", []),
        ("2", "4", ["--recompute", "partitioned", "--micro-batch", "1"]),
        ("4", "8", ["--recompute", "partitioned", "--chunks", "3", "--micro-batch", "4"]),
    ):
        argv = [*ARGUMENTS, "--tp", tp, "--batch", batch, "--dtype", "fp32", *more]
        for found in ranks(trained, argv):
            torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=0, msg=lambda m: f"{argv}: {m}")


def test_main_trains_in_bfloat16(ranks):
    expected = of_one_process()
    for found in ranks(trained, [*ARGUMENTS, "--batch", "8", "--dtype", "bf16", "--chunks", "2"]):
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-2, atol=0)  # BF16 has 8 significant bits


# GPUs.


def on_gpus() -> list[str]:
    of, group = config(4), dist.group.WORLD
    with torch.device(torch.accelerator.current_accelerator()):
        model = split_model(of, group, meta=True, chunks=2)
    inputs, targets = (part.to(model.norm.weight.device) for part in batches(0))
    step_loss = split_loss(model, inputs, targets, group)
    step_loss.backward()
    found = {f"gradient 0 {name}": whole.cpu() for name, whole in whole_gradients(model).items()}
    found |= {"loss 0": step_loss.detach().cpu(), "norm 0": clip_grad_norm_(model.parameters(), MAX_NORM).cpu()}
    whole = whole_model(of)
    whole.load_state_dict(gather_state_dict(model))  # a GPU draws other random numbers
    expected_loss = loss(whole(inputs.cpu()), targets.cpu())
    expected_loss.backward()
    expected = {f"gradient 0 {name}": p.grad for name, p in whole.named_parameters()}
    norm = nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM)
    expected = {name: p.clone() for name, p in expected.items()} | {"loss 0": expected_loss.detach(), "norm 0": norm}
    scale = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
    expected |= {name: value / scale for name, value in expected.items() if name.startswith("gradient")}
    return differing(found, expected, 1e-4)


def misused() -> dict[str, str]:
    """On one of 4 ranks: what is said of misuse that would give plausible numbers."""
    group, targets = dist.group.WORLD, torch.arange(6)
    logits, of = torch.zeros(6, TensorShard.of(97, group).size, dtype=torch.float64), config(12)
    replicas, even = replicas_of(group, 2), dataclasses.replace(of, vocab=96)
    split = apply_tensor_parallel(whole_model(even), group)
    return {
        "gathered copies": said(lambda: ColumnParallelLinear(nn.Linear(4, 8), group, replicas, gather_output=True)),
        "3 copies": said(lambda: replicas_of(group, 3)),
        "0 copies": said(lambda: replicas_of(group, 0)),
        "3 tokens": said(lambda: VocabParallelEmbedding(nn.Embedding(3, 4), group)),
        "a loss of 3 tokens": said(lambda: vocab_parallel_cross_entropy(logits[:, :1], targets, group, 3)),
        "5 tokens": said(lambda: vocab_parallel_cross_entropy(logits[:, :2], targets, group, 5)),
        "3 copies on rank 1": said(lambda: replicas_of(group, 3 if dist.get_rank() == 1 else 2)),
        "other numbers": said(lambda: replicas_of(group, 1 if dist.get_rank() == 1 else 2)),
        "whole logits": said(lambda: vocab_parallel_cross_entropy(torch.zeros(6, 97), targets, group, 97)),
        "reduction": said(lambda: vocab_parallel_cross_entropy(logits, targets, group, 97, "none")),
        "float64": said(lambda: vocab_parallel_cross_entropy(logits.requires_grad_(), targets, group, 97).backward()),
        "default group": said(lambda: DataParallel(split)),
    }


def test_misuse_that_would_give_plausible_numbers_is_one_line(ranks):
    for found in ranks(misused):
        assert found["gathered copies"].startswith("ValueError: gather_output with replicas")
        assert found["3 copies"] == found["3 copies on rank 1"] == "ValueError: 3 copies do not divide 4 ranks"
        assert found["0 copies"] == "ValueError: 0 copies: it must be 1 or more"
        assert found["3 tokens"] == found["a loss of 3 tokens"]  # unrefused, the other ranks wait for ever
        assert found["3 tokens"] == "ValueError: a vocabulary of 3 leaves one of 4 ranks without a token"
        assert found["5 tokens"] == "ValueError: a vocabulary of 5 leaves one of 4 ranks without a token"
        assert found["other numbers"].startswith("ValueError: the ranks of a group passed different groups or ")
        assert found["whole logits"].startswith("ValueError: 97 logits, but this rank's shard of 97 tokens has 2")
        assert found["reduction"] == "ValueError: reduction 'none': it is mean or sum" and found["float64"] == "nothing"
        assert "from index 24 of 96, where rank 0 has embedding.weight" in found["default group"]


@pytest.mark.gpu
def test_on_gpus_it_is_one_process_too():
    """NCCL sums in another order, and CUDA's products too: within 1e-4."""
    n = 2 if torch.cuda.device_count() > 1 else 1
    with Ranks(n, "nccl", timeout_s=60) as gpus:
        assert gpus(on_gpus) == [[]] * n
