"""course_lib.context_parallel.model on one to four ranks against one process, with other parallelism too (on 8 ranks:
test_eight_ranks). CPU, gloo.
"""

import functools
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from calls import said, short_corpus
from course_lib.context_parallel.blocks import PLAIN_BLOCK, AttentionBlock
from course_lib.context_parallel.model import METHODS, apply_context_parallel, exchange_ratio, main, options
from course_lib.sequence_parallel.model import apply_sequence_parallel
from course_lib.sequence_parallel.shards import ORDERS, local_positions, shard_sequence
from course_lib.single_gpu import training as single_gpu
from course_lib.single_gpu.memory import activation_bytes
from course_lib.single_gpu.model import loss
from course_lib.tensor_parallel.model import apply_tensor_parallel
from split_models import (
    RECOMPUTE,
    batches,
    config,
    differing,
    group_of,
    in_replicas,
    kept_storages,
    meta_model,
    not_as,
    one_process,
    whole_model,
)

SEQ, ODD = 24, 3  # 24 tokens are chunks for 2, 3 and 4 ranks
# Targets that do not count are uneven: with the first third of them, the first rank may have none.
BATCHES = {"seq": SEQ, "batch": ODD, "ignored": "first third"}

# (ranks, method, order, K/V heads, recompute, how gradients are averaged)
WAYS = [
    (2, "ring", "zigzag", 4, "none", "DataParallel"),
    (2, "all_gather", "contiguous", 1, "full", "ZeRO stage 2"),
    (2, "ulysses", "zigzag", 1, "none", "fully_shard"),
    (3, "ring", "contiguous", 3, "full", "fully_shard"),
    (3, "all_gather", "zigzag", 1, "none", "DataParallel"),
    (3, "ulysses", "contiguous", 3, "none", "ZeRO stage 1"),
    (4, "ring", "zigzag", 1, "full", "ZeRO stage 2"),
    (4, "ring", "contiguous", 4, "none", "DataParallel"),
    (4, "all_gather", "zigzag", 4, "full", "fully_shard"),
    (4, "ulysses", "zigzag", 2, "full", "DataParallel"),
]


def training_differs() -> dict[str, list[str]]:
    """On a rank: what differs from one process, by way of training."""
    found, groups, alone = {}, {n: group_of(n) for n in (2, 3, 4)}, group_of(1)
    for n, method, order, kv_heads, recompute, how in WAYS:
        of, group = config(kv_heads, tied=n == 4), groups[n]
        model = meta_model(of) if how == "fully_shard" else whole_model(of)
        apply_context_parallel(model, group, method, order)
        RECOMPUTE[recompute](model, group)

        def own(whole: torch.Tensor, group=group, order=order) -> torch.Tensor:
            return shard_sequence(whole, group, order)

        ours = in_replicas(how, model, group, alone, own, **BATCHES)
        found[f"{n} {method} {order} {recompute} {how}"] = not_as(ours, one_process(of, **BATCHES))
    return found


def test_training_is_that_of_one_process(ranks):
    """Losses, gradients, norms, weights after 3 clipped steps; an odd batch, targets uneven over the ranks."""
    for found in ranks(training_differs):
        assert len(found) == len(WAYS)
        assert not any(found.values()), {way: wrong for way, wrong in found.items() if wrong}


def all_together(how: str, method: str, order: str) -> list[str]:
    """On one of 2 x 2 ranks: what differs from one process where 2 share the sequence, and 2 the matrices."""
    of = config(2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    cp, tp = mesh["cp"].get_group(), mesh["tp"].get_group()
    model = apply_tensor_parallel(meta_model(of) if how == "fully_shard" else whole_model(of), tp)
    apply_sequence_parallel(model, tp, reduce_group=dist.group.WORLD)
    apply_context_parallel(model, cp, method, order)
    RECOMPUTE["full" if method == "ulysses" else "none"](model, tp)
    ours = in_replicas(how, model, cp, tp, lambda whole: shard_sequence(whole, cp, order), **BATCHES)
    return not_as(ours, one_process(of, **BATCHES))


@pytest.mark.parametrize(
    "how, method, order",
    [
        ("DataParallel", "ring", "zigzag"),
        ("ZeRO stage 2", "ulysses", "zigzag"),
        ("fully_shard", "all_gather", "contiguous"),
    ],
)
def test_with_tensor_and_sequence_parallelism(ranks, how, method, order):
    assert ranks(all_together, how, method, order) == [[]] * 4


# Inputs, memory, blocks.


def other_uses() -> dict[str, object]:
    """On a rank: what is wrong, by use."""
    of, group, found, called = config(4), dist.group.WORLD, {}, []
    whole, inputs = whole_model(of), batches(0, seq=SEQ)[0]
    positions = torch.randint(50, inputs.shape, generator=torch.Generator().manual_seed(1))
    for method, order in itertools.product(METHODS, ORDERS):
        model, x = apply_context_parallel(whole_model(of), group, method, order), shard_sequence(inputs, group, order)
        own, mine = local_positions(x.shape[1], group, order), shard_sequence(positions, group, order)
        expected = shard_sequence(whole(inputs), group, order)
        elsewhere = shard_sequence(whole(inputs, positions), group, order)
        for name, logits, theirs in (
            ("filled in", model(x), expected),
            ("None", model(x, None), expected),
            ("None by keyword", model(x, positions=None), expected),
            ("by keyword", model(x=x), expected),
            ("own", model(x, own), expected),
            ("others", model(x, mine), elsewhere),
            ("others by keyword", model(x=x, positions=mine), elsewhere),
        ):
            found[f"{method} {order} {name}"] = differing({"it": logits}, {"it": theirs})
        with torch.no_grad():
            model.eval()
            found[f"{method} {order} eval"] = differing({"it": model(x)}, {"it": expected})
        first, last = (apply_context_parallel(whole_model(of), group, method, order) for _ in range(2))
        first.head, last.embedding, last.blocks = None, None, nn.ModuleList()
        hidden = first(x)
        found[f"{method} {order} stages"] = differing({"it": last(hidden, own)}, {"it": expected})
        for name, call in {"stage": lambda: last(hidden), "None": lambda: last(hidden, positions=None)}.items():
            text = "ValueError: hidden states without positions: pass the positions of all tokens"
            found[f"{method} {order} {name} without positions"] = [] if said(call).startswith(text) else [said(call)]

    def forward(*given):
        called.append("forward")
        return PLAIN_BLOCK.forward(*given)

    def backward(*given):
        called.append("backward")
        return PLAIN_BLOCK.backward(*given)

    for method in METHODS:
        called.clear()
        model = apply_context_parallel(whole_model(of), group, method, attention=AttentionBlock(forward, backward))
        model(shard_sequence(inputs, group)).sum().backward()
        blocks = of.layers * (1 if method == "ulysses" else 4)
        found[f"{method} block"] = [called] * (called != ["forward"] * blocks + ["backward"] * blocks)
    return found


def test_positions_stages_and_a_block_of_ones_own(ranks):
    for found in ranks(other_uses):
        assert not any(found.values()), {use: wrong for use, wrong in found.items() if wrong}


def kept(n: int) -> list[str]:
    """On a rank: what is wrong with the bytes that the model and its loss keep for backward."""
    of, group, wrong = config(4), group_of(n), []
    if group.size() < n:
        return wrong
    inputs, targets = (shard_sequence(x, group) for x in batches(0, seq=SEQ))
    tokens = inputs.numel()
    for method, recompute in itertools.product(METHODS, ("none", "full")):
        if method == "ulysses" and n == 3:
            continue
        model = RECOMPUTE[recompute](apply_context_parallel(whole_model(of), group, method), group)
        with kept_storages(but=model.parameters()) as storages:
            loss(model(inputs), targets)
        formula = activation_bytes(of, len(inputs), SEQ, 4, recompute, fused_norm=False, cp=n) / tokens
        if method == "ulysses" and recompute == "none":  # out for attention, and once more as the tokens of o_proj
            formula += 4 * of.hidden * of.layers
        off = sum(storages.values()) / tokens - formula
        wrong += [f"{n} {method} {recompute}: {off:+.1f} bytes a token beyond {formula:.1f}"] * (abs(off) > 2)
    return wrong


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_what_is_kept_falls_with_the_ranks(ranks, n):
    """memory.activation_bytes with cp, within 2 bytes a token; with Ulysses attention's output is there twice."""
    for wrong in ranks(kept, n):
        assert not wrong, wrong


# Mistakes.


def refused() -> dict[str, tuple[str, bool]]:
    """On a rank: what is said of models that can't be made context parallel, and whether they are as before."""
    group, found = dist.group.WORLD, {}
    cases = {
        "method": (whole_model(config(4)), {"method": "striped"}),
        "order": (whole_model(config(4)), {"order": "random"}),
        "heads": (whole_model(config(6)), {"method": "ulysses"}),
        "split heads": (apply_tensor_parallel(whole_model(config(12)), group), {"method": "ulysses"}),
        "twice": (apply_context_parallel(whole_model(config(4))), {"method": "all_gather"}),
        "recomputed": (RECOMPUTE["selective"](apply_context_parallel(whole_model(config(4))), group), {}),
    }
    for name, (model, chosen) in cases.items():
        before = str([vars(module) for module in model.modules()])
        text = said(lambda: apply_context_parallel(model, group, **chosen))
        found[name] = text, str([vars(module) for module in model.modules()]) == before
    model, inputs = apply_context_parallel(whole_model(config(4))), batches(0, seq=SEQ)[0]
    found["odd"] = said(lambda: model(inputs[:, :3])), True
    return found


def test_what_cannot_be_context_parallel_is_one_line_and_stays_as_it_is(ranks):
    for found in ranks(refused):
        known = "methods are ring, all_gather, ulysses, orders zigzag, contiguous"
        assert found == {
            "method": (f"ValueError: method 'striped', order 'zigzag': {known}", True),
            "order": (f"ValueError: method 'ring', order 'random': {known}", True),
            "heads": ("ValueError: ulysses: 4 ranks can't share 12 heads and 6 K/V heads", True),
            "split heads": ("ValueError: ulysses: 4 ranks can't share 3 heads and 3 K/V heads", True),
            "twice": ("ValueError: the model is context parallel already", True),
            "recomputed": ("ValueError: the model is context parallel already", True),
            "odd": ("ValueError: a sequence of 12 tokens cannot be split into 8 equal shards", True),
        }


def test_exchange_ratio():
    """One step of a ring by hand: bytes over bandwidth, and operations over the peak, of a zig-zag's half block."""
    tokens, heads, kv_heads, d, bandwidth, peak = 4096, 32, 8, 128, 50e9, 400e12
    sent = 2 * tokens * kv_heads * d * 2 / bandwidth
    work = 4 * tokens**2 * heads * d / peak
    assert exchange_ratio(tokens, heads, kv_heads, bandwidth, peak) == pytest.approx(sent / (work / 2))
    assert exchange_ratio(tokens, heads, kv_heads, bandwidth, peak, 4, causal=False) == pytest.approx(2 * sent / work)


# The program.


ARGUMENTS = ["--preset", "debug", "--steps", "2", "--seq", "16"]


def trained(argv: list[str]) -> list[float]:
    with short_corpus():
        return [record["loss"] for record in main(argv)]


@functools.cache
def of_one_process() -> torch.Tensor:
    with short_corpus():
        alone = single_gpu.main([*ARGUMENTS, "--batch", "8", "--dtype", "fp32"])
    return torch.tensor([record["loss"] for record in alone])


def test_main_trains_as_one_process_for_each_degree(ranks):
    """The same global batch of 8; what each set of ranks has of it goes with their number."""
    expected = of_one_process()
    for batch, more in (
        ("8", []),
        ("4", ["--cp", "2", "--method", "all_gather", "--order", "contiguous", "--micro-batch", "3"]),
        ("8", ["--cp", "2", "--tp", "2", "--method", "ulysses", "--recompute", "full"]),
        ("8", ["--tp", "2", "--micro-batch", "2", "--order", "contiguous"]),
        ("8", ["--cp", "1", "--tp", "4", "--recompute", "full"]),
        ("2", ["--cp", "1", "--micro-batch", "1"]),
    ):
        argv = [*ARGUMENTS, "--batch", batch, "--dtype", "fp32", *more]
        for found in ranks(trained, argv):
            torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=0, msg=lambda m: f"{argv}: {m}")


def made_one_by_one(argv: list[str]) -> list:
    """On a rank: the lists of groups that no mesh makes: each of these groups splits the communicator once more."""
    plain = dist.new_subgroups_by_enumeration
    with mock.patch.object(dist, "new_subgroups_by_enumeration", wraps=plain) as made:
        trained(argv)
    return [call.args[0] for call in made.call_args_list]


def test_mains_groups_come_from_a_mesh(ranks):
    argv = [*ARGUMENTS, "--steps", "1", "--batch", "4", "--dtype", "fp32", "--cp", "2", "--tp", "2"]
    assert ranks(made_one_by_one, argv) == [[]] * 4


def test_main_trains_in_bfloat16(ranks):
    expected = of_one_process()
    for method in METHODS:
        for found in ranks(trained, [*ARGUMENTS, "--batch", "8", "--dtype", "bf16", "--method", method]):
            torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-2, atol=0)  # 8 significant bits


def impossible(argv: list[str]) -> str:
    with short_corpus():
        return said(lambda: main([*ARGUMENTS, "--dtype", "fp32", "--batch", "2", *argv]))


def test_main_says_in_one_line_what_it_cannot_do(ranks, capsys):
    for argv, text in (
        (["--cp", "3"], "ValueError: --cp 3 times --tp 1 does not divide the 4 ranks"),
        (["--cp", "4", "--tp", "2"], "ValueError: --cp 4 times --tp 2 does not divide the 4 ranks"),
        (["--seq", "12"], "ValueError: a sequence of 12 tokens cannot be split into 8 equal shards"),
        (["--seq", "18", "--tp", "4"], "ValueError: a sequence of 18 tokens cannot be split into 4 equal shards"),
        (["--preset", "SmolLM-135M", "--method", "ulysses"], "ValueError: ulysses: 4 ranks can't share 9 heads"),
    ):
        assert all(found.startswith(text) for found in ranks(impossible, argv)), (argv, ranks(impossible, argv))
    for argv in (
        ["--cp", "0"],
        ["--tp", "0"],
        ["--tp", "3"],
        ["--batch", "2", "--micro-batch", "3"],
        ["--micro-batch", "0"],
        ["--method", "striped"],
        ["--order", "random"],
        ["--recompute", "selective"],
    ):
        with pytest.raises(SystemExit) as stopped:
            options([*ARGUMENTS, *argv])
        assert stopped.value.code == 2, argv
        assert "error: " in capsys.readouterr().err.splitlines()[-1]
