"""course_lib.sequence_parallel.model on two to four ranks against one process: results, traffic, memory. CPU, gloo."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from calls import said
from course_lib.collectives.traffic import count_traffic
from course_lib.sequence_parallel.model import (
    GatheredMatmul,
    SequenceParallelNorm,
    apply_sequence_parallel,
    gather_sequence,
    reduce_scatter_sequence,
)
from course_lib.sequence_parallel.shards import split_by_rank
from course_lib.single_gpu.memory import activation_bytes
from course_lib.single_gpu.placement import placement_of
from course_lib.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, project_together, replicas_of
from course_lib.tensor_parallel.model import apply_tensor_parallel
from course_lib.tensor_parallel.partitioned_checkpoints import apply_partitioned_recompute
from course_lib.tensor_parallel.shards import TensorShard
from course_lib.tensor_parallel.vocabulary import vocab_parallel_cross_entropy
from split_models import (
    BATCH,
    REPLICAS,
    Diary,
    Exchanges,
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
    whole_gradients,
    whole_model,
)

SEQ = 12  # goes on 2, 3 and 4 ranks

# (ranks, K/V heads, tied, options)
WAYS = [
    (2, 4, False, {"meta": True, "optimizer": "AdamW"}),
    (2, 2, True, {"recompute": "matmuls"}),
    (2, 1, False, {"recompute": "full", "gather_logits": True}),
    (3, 3, True, {"meta": True, "recompute": "full"}),
    (3, 1, False, {"optimizer": "AdamW"}),
    (4, 4, True, {"gather_logits": True}),
    (4, 2, True, {"recompute": "full", "meta": True}),
    (4, 1, False, {"recompute": "selective"}),
]


def training_differs() -> dict[str, list[str]]:
    """On a rank: what differs from one process, or has drifted apart, by way of training."""
    found, groups = {}, {n: group_of(n) for n in (2, 3, 4)}
    for n, kv_heads, tied, options in WAYS:
        of = config(kv_heads, tied)
        ours, apart = on_ranks(of, groups[n], seq=SEQ, sequence=True, **options)
        expected = one_process(of, options.get("optimizer", "SGD"), SEQ)
        found[f"{n} {kv_heads} {tied} {options}"] = differing(ours, expected) + [f"{x} has drifted" for x in apart]
    return found


def test_training_is_that_of_one_process(ranks):
    """Losses, gradients, norms, weights after 3 clipped steps; copies and whole parameters have the same bits."""
    for found in ranks(training_differs):
        assert len(found) == len(WAYS)
        assert not any(found.values()), {way: wrong for way, wrong in found.items() if wrong}


def composed(how: str, kv_heads: int, together: bool = True) -> dict[str, torch.Tensor]:
    """On one of 2 x 2 ranks: losses, norms and the weights after 3 steps; each pair has half of the batch. together:
    the norms' gradients are summed over all ranks at once.
    """
    of = config(kv_heads, tied=kv_heads == 1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"].get_group(), mesh["tp"].get_group()
    model = apply_tensor_parallel(meta_model(of) if how == "fully_shard" else whole_model(of), tp)
    apply_sequence_parallel(model, tp, reduce_group=dist.group.WORLD if together else None)
    assert any(isinstance(module, SequenceParallelNorm) for module in model.modules()) != together
    return in_replicas(how, model, dp, tp, lambda whole: whole.chunk(2)[dp.rank()], SEQ)


@pytest.mark.parametrize("how", REPLICAS)
def test_the_norms_gradients_travel_with_those_of_data_parallelism(ranks, how):
    """With reduce_group: clipped by the norm of all, as one process; K/V heads as many as ranks, and fewer."""
    for kv_heads in (2, 1):
        for found in ranks(composed, how, kv_heads):
            assert not not_as(found, one_process(config(kv_heads, tied=kv_heads == 1), seq=SEQ)), (how, kv_heads)
    for found in ranks(composed, how, 1, together=False):
        assert not not_as(found, one_process(config(1, tied=True), seq=SEQ)), how


def in_bfloat16() -> dict[str, tuple]:
    """On a rank: dtypes of logits and of a norm's gradient, errors of the loss and of each gradient over a whole
    model's.
    """
    of, group, found = config(2), dist.group.WORLD, {}
    inputs, targets = batches(0, seq=SEQ)
    exact = whole_model(of).double()
    exact_loss = F.cross_entropy(exact(inputs).flatten(0, 1), targets.flatten())
    exact_loss.backward()
    for how in ("bfloat16", "autocast"):
        models = split_model(of, group, sequence=True), whole_model(of)
        errors = []
        for model in (x.bfloat16() for x in models) if how == "bfloat16" else models:
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                logits = model(inputs)
            split = model is models[0]
            step_loss = vocab_parallel_cross_entropy(logits, targets, group if split else alone(), of.vocab)
            step_loss.backward()
            gradients = whole_gradients(model)
            errors.append(
                {
                    name: ((gradients[name].double() - p.grad).norm() / p.grad.norm()).item()
                    for name, p in exact.named_parameters()
                }
            )
            if split:
                found[how] = [logits.dtype, model.norm.weight.grad.dtype, abs(step_loss.item() / exact_loss.item() - 1)]
        found[how].append({name: (error, errors[1][name]) for name, error in errors[0].items()})
    return found


def alone() -> dist.ProcessGroup:
    return group_of(1)


def test_bfloat16_is_as_exact_as_in_one_process(ranks):
    """Against float64: the loss within 1%; each gradient's error at most twice that of one process and 0.5%."""
    for found in ranks(in_bfloat16):
        for how, (logits, norm, loss_error, errors) in found.items():
            assert (logits, norm) == (torch.bfloat16, torch.bfloat16 if how == "bfloat16" else torch.float32)
            worse = {name: pair for name, pair in errors.items() if pair[0] > 2 * pair[1] + 5e-3}
            assert loss_error < 1e-2 and not worse, (how, loss_error, worse)


# The borders.


def borders(n: int) -> list[str]:
    """On a rank: what is wrong with g and g*, by themselves."""
    group, wrong, b, own, h = group_of(n), [], 2, 3, 5
    rank, size = group.rank(), group.size()
    wholes = torch.randn(size, b, own * size, h, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    part, moved = split_by_rank(wholes[0], size)[rank], (size - 1) * b * own * h * 8
    for strided in (False, True):  # an input and a gradient that do not lie row by row
        x = part.transpose(0, 1).clone().transpose(0, 1) if strided else part.clone()
        given = wholes[rank].transpose(0, 2).clone().transpose(0, 2) if strided else wholes[rank].clone()
        x.requires_grad_()
        with count_traffic() as traffic:
            out = gather_sequence(x, group)
            out.backward(given)
        wrong += ["g"] * (not torch.equal(out, wholes[0]))
        wrong += ["g: gradient"] * (not torch.allclose(x.grad, split_by_rank(wholes.sum(0), size)[rank]))
        wrong += ["g: its gradient has changed"] * (not torch.equal(given, wholes[rank]))
        sent = [(record.collective, record.bytes) for record in traffic.records]
        wrong += [f"g sends {sent}"] * (sent != [("all_gather", moved), ("reduce_scatter", moved)])

        y = given.clone().requires_grad_() if not strided else given.requires_grad_()
        with count_traffic() as traffic:
            out = reduce_scatter_sequence(y, group)
            out.backward(part)
        wrong += ["g*"] * (not torch.allclose(out, split_by_rank(wholes.sum(0), size)[rank]))
        wrong += ["g*: gradient"] * (not torch.equal(y.grad, wholes[0]))
        wrong += ["g*: its input has changed"] * (not torch.equal(y, wholes[rank]))
        sent = [(record.collective, record.bytes) for record in traffic.records]
        wrong += [f"g* sends {sent}"] * (sent != [("reduce_scatter", moved), ("all_gather", moved)])
    z = part.clone().requires_grad_()  # g, own work, g*: numbers near z, against what one process finds
    reduce_scatter_sequence(gather_sequence(z, group).pow(2) * (rank + 1), group).sum().backward()
    wrong += ["g and g*"] * (not torch.allclose(z.grad, 2 * part * sum(range(1, size + 1))))
    too_long = said(lambda: reduce_scatter_sequence(torch.zeros(1, 4 * size + 1, 2), group))
    expected = f"ValueError: a sequence of {4 * size + 1} tokens cannot be split into {size} equal shards"
    wrong += [too_long] * (too_long != (expected if size > 1 else "nothing"))
    return wrong


@pytest.mark.parametrize("n", [2, 3, 4])
def test_g_and_its_conjugate(ranks, n):
    assert ranks(borders, n) == [[]] * 4


def layers_by_themselves(n: int) -> dict[str, list[str]]:
    """On a rank: what is wrong with layers between g and g*, with biases, frozen parts, in autocast, with copies."""
    group, found = group_of(n), {}
    size, rank = group.size(), group.rank()
    torch.manual_seed(0)
    whole_x, columns = torch.randn(2, 4 * size, 12), [nn.Linear(12, 12 * k) for k in (2, 1, 1)]
    row = nn.Linear(24, 12, bias=False)
    copies = replicas_of(group, size)

    def compare(name: str, wants: tuple[bool, ...], dtype=None, replicas=None) -> None:
        theirs = whole_x.clone().requires_grad_(wants[0])
        ours = split_by_rank(whole_x, size)[rank].clone().requires_grad_(wants[0])
        for layer, want in zip(columns, wants[1:], strict=True):
            layer.zero_grad()
            layer.weight.requires_grad_(want)
        row.zero_grad()
        layers = [ColumnParallelLinear(x, group, replicas if i else None) for i, x in enumerate(columns)]
        last = RowParallelLinear(row, group)
        last.output_reduce = reduce_scatter_sequence
        for layer in layers:
            layer.matmul = GatheredMatmul
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            q, k, v = project_together(ours, layers)
            q1, k1, v1 = (layer(theirs) for layer in columns)
            # all of k and v count on each rank that has a copy: a part of them on each
            mine = last(q.sin()) + reduce_scatter_sequence(own(k * v, rank, size, replicas), group)
            other = row(q1.sin()) + (k1 * v1).sum(-1, keepdim=True)
        (mine.float() * split_by_rank(whole_x, size)[rank]).sum().backward()
        (other.float() * whole_x).sum().backward()
        pairs = {"out": (mine, split_by_rank(other, size)[rank])}
        if wants[0]:
            pairs["x"] = ours.grad, split_by_rank(theirs.grad, size)[rank]
        for i, (layer, linear) in enumerate(zip([*layers, last], [*columns, row], strict=True)):
            for part, p in layer.named_parameters():
                of_whole = linear.get_parameter(part).grad
                if p.grad is None or of_whole is None:
                    found[f"{name}: {i} {part}"] = ["a gradient"] * (p.grad is not of_whole)
                    continue
                pairs[f"{i} {part}"] = placement_of(p).tensor_shard.gather(p.grad), of_whole
        within = 1e-5 if dtype is None else 2e-2
        found[name] = differing(*({key: pair[i].float() for key, pair in pairs.items()} for i in (0, 1)), within)
        found[f"{name}: dtype"] = ["of the output"] * (q.dtype != (dtype or torch.float32))

    compare("all", (True,) * 4)
    compare("x alone", (True, False, False, False))
    compare("weights alone", (False, True, True, True))
    compare("one weight", (False, False, True, False))
    compare("x and one weight", (True, False, False, True))
    compare("autocast", (True,) * 4, torch.bfloat16)
    if size > 1:
        compare("copies", (True,) * 4, replicas=copies)
        compare("copies in autocast", (True,) * 4, torch.bfloat16, copies)
    return found


def own(products: torch.Tensor, rank: int, size: int, replicas) -> torch.Tensor:
    """This rank's summand of the sum over all columns."""
    if replicas:
        products = products.chunk(size, -1)[rank]
    return products.sum(-1, keepdim=True)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_layers_by_themselves(ranks, n):
    """Whatever wants a gradient; biases; bfloat16 by autocast within 2e-2; k and v the same on all ranks."""
    for found in ranks(layers_by_themselves, n):
        assert not any(found.values()), {use: wrong for use, wrong in found.items() if wrong}


# What is sent, kept, and when.


def sent_and_kept(n: int, kv_heads: int, tied: bool, gather_logits: bool) -> list[str]:
    """On a rank: what is wrong with the traffic of a step, and the bytes kept for backward."""
    of, group, wrong = config(kv_heads, tied), group_of(n), []
    model = split_model(of, group, sequence=True, gather_logits=gather_logits)
    if group.size() < n:
        return wrong
    inputs, targets = batches(0, seq=SEQ)
    tokens = BATCH * SEQ
    with count_traffic() as forward, kept_storages(but=model.parameters()) as kept:
        step_loss = split_loss(model, inputs, targets, group)
    with count_traffic() as backward:
        step_loss.backward()
    moved, places = (n - 1) * 4 * tokens * of.hidden // n, 1 + 2 * of.layers
    logits = (n - 1) * 4 * tokens * -(-of.vocab // n)
    copies, norm = n // kv_heads, 2 * (n - 1) * 4 * of.hidden // n
    expected = {
        "forward": {
            ("all_gather", n): (places + gather_logits, places * moved + gather_logits * logits),
            ("reduce_scatter", n): (places, places * moved),
        },
        "backward": {
            ("all_gather", n): (2 * places, 2 * places * moved),
            ("reduce_scatter", n): (places, places * moved),
            ("all_reduce", n): (places, places * norm),
        },
    }
    if not gather_logits:
        expected["forward"]["all_reduce", n] = 2, sum(2 * (n - 1) * 4 * k * tokens // n for k in (1, 2))
    if copies > 1:
        weights = 2 * of.layers, 2 * of.layers * 2 * (copies - 1) * 4 * of.head_dim * of.hidden // copies
        mixed = expected["backward"].pop(("all_reduce", n), (0, 0)) if copies == n else (0, 0)
        expected["backward"]["all_reduce", copies] = tuple(a + b for a, b in zip(weights, mixed, strict=True))
    for name, traffic in (("forward", forward), ("backward", backward)):
        kinds = {(record.collective, len(record.group)) for record in traffic.records}
        sent = {
            kind: (len(these), sum(record.bytes for record in these))
            for kind in kinds
            for these in [[r for r in traffic.records if (r.collective, len(r.group)) == kind]]
        }
        wrong += [f"{name}: {sent}, not {expected[name]}"] * (sent != expected[name])
    if not gather_logits:
        formula = activation_bytes(of, BATCH, SEQ, 4, fused_norm=False, tp=n, sp=True) / tokens
        # In place of the 16 of tokens and targets: 8 of the embedding's rows, and two masks. And odd sizes.
        of_split = -6 + 4 * (TensorShard.of(of.vocab, group).size - of.vocab / n)
        off = sum(kept.values()) / tokens - formula - of_split
        wrong += [f"{off:+.1f} bytes a token kept beyond the formula"] * (abs(off) > 1)
    return wrong


TRAFFIC = [(2, 4, False, False), (2, 2, True, True), (3, 6, False, False), (4, 4, True, False), (4, 2, False, False)]


def test_what_is_sent_and_what_is_kept(ranks):
    """To the byte: at each border an all-gather and a reduce-scatter, in backward an all-gather more at each column
    layer, and each norm's gradient. Kept: memory.activation_bytes with sp, less 6 bytes a token, within 1.
    """
    for case in [*TRAFFIC, (4, 1, False, False)]:
        for rank, wrong in enumerate(ranks(sent_and_kept, *case)):
            assert not wrong, (case, rank, wrong)


def one_layer() -> list:
    """On a rank: what a column layer's backward does, in order."""
    group, diary = dist.group.WORLD, Diary()
    layers = [ColumnParallelLinear(nn.Linear(8, 8 * size, bias=False), group) for size in (1, 2)]
    for layer in layers:
        layer.matmul = GatheredMatmul
    x = torch.ones(1, 3, 8, requires_grad=True)
    first, second = project_together(x, layers)
    with Exchanges(diary.events), diary:
        torch.autograd.backward([first.sum(), second.sum()])
    return diary.events


def test_what_travels_does_so_beside_products(ranks):
    """x comes beside the products that make its gradient; the sum of that goes beside those for the weights."""
    of_x, of_weights = ([("product", 12 * 8 * size * 8 // 4) for size in (1, 2)],) * 2
    gather, scatter, wait = ("start", 3 * 8), ("start", 12 * 8), ("wait", 0)
    for events in ranks(one_layer):
        assert events == [gather, *of_x, scatter, wait, *of_weights, wait], events


# Parts of a model, and mistakes.


def stages() -> dict[str, object]:
    """On a rank: a model in two stages, between which each rank's tokens travel; what is said of unclear inputs."""
    of, group = config(4), dist.group.WORLD
    first, last = split_model(of, group, sequence=True), split_model(of, group, sequence=True)
    first.head, last.embedding = None, None
    last.blocks = nn.ModuleList()
    whole, (inputs, targets) = whole_model(of), batches(0, seq=SEQ)
    positions = torch.randint(50, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    hidden = first(inputs, positions)
    for again in (last(hidden, positions), last(hidden, positions=positions), last(hidden, torch.arange(SEQ))):
        step_loss = vocab_parallel_cross_entropy(again, targets, group, of.vocab)
    step_loss = vocab_parallel_cross_entropy(last(hidden, positions), targets, group, of.vocab)
    expected = F.cross_entropy(whole(inputs, positions).flatten(0, 1), targets.flatten())
    found = {"part": list(hidden.shape) == [BATCH, SEQ // 4, of.hidden]}
    found["loss"] = torch.allclose(step_loss, expected)
    for name, call in {
        "no positions": lambda: last(hidden),
        "None": lambda: last(hidden, None),
        "by keyword": lambda: last(x=hidden),
    }.items():
        text = "ValueError: hidden states without positions: pass the positions of all tokens of the sequence"
        found[name] = said(call) == text
    found["tokens by keyword"] = torch.equal(first(x=inputs), first(inputs))
    odd = said(lambda: first(inputs[:, :7]))
    found["7 tokens"] = odd == "ValueError: a sequence of 7 tokens cannot be split into 4 equal shards"
    return found


def test_stages_pass_parts_of_a_sequence_on(ranks):
    for found in ranks(stages):
        assert all(found.values()), found


def refused() -> dict[str, tuple[str, bool]]:
    """On a rank: what is said of models that can't be made sequence parallel, and whether they are as before."""
    of, group, pair, found = config(4), dist.group.WORLD, group_of(2), {}
    cases = {
        "whole": (whole_model(of), group),
        "another group": (split_model(of, group), pair),
        "chunks": (split_model(of, group, chunks=2), group),
        "twice": (split_model(of, group, sequence=True), group),
    }
    for name, (model, over) in cases.items():
        before = [(module, list(vars(module).items())) for module in model.modules()]
        text = said(lambda: apply_sequence_parallel(model, over, reduce_group=group))
        after = [(module, list(vars(module).items())) for module in model.modules()]
        marked = any(placement_of(p).reduce_group for p in model.parameters())
        found[name] = (
            text,
            str(before) == str(after) and len(model._forward_pre_hooks) == (name == "twice") and not marked,
        )
    return found


def test_what_is_not_split_so_is_one_line_and_stays_as_it_is(ranks):
    for found in ranks(refused):
        assert found == {
            "whole": ("ValueError: the model is not split over this group: call apply_tensor_parallel first", True),
            "another group": (
                "ValueError: the model is not split over this group: call apply_tensor_parallel first",
                True,
            ),
            "chunks": ("ValueError: row layers in chunks sum over the group: split the model with chunks=1", True),
            "twice": ("ValueError: the model is sequence parallel already", True),
        }


def not_for_parts() -> list[str]:
    """On a rank: what is said where checkpoints that all ranks should have alike are to be partitioned."""
    of, group = config(4), dist.group.WORLD
    after, before = split_model(of, group, sequence=True), apply_partitioned_recompute(split_model(of, group))
    return [said(lambda: apply_partitioned_recompute(after)), said(lambda: apply_sequence_parallel(before))]


def test_partitioned_checkpoints_are_refused(ranks):
    """Each rank's input is a part already: another rank's would come back in its place, and gradients be wrong."""
    for found in ranks(not_for_parts):
        assert all(text.startswith("ValueError: ") for text in found), found
