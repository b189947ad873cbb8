"""course_lib.tensor_parallel.regions on four ranks: f, f* and the gather against autograd, randomness by region. CPU,
gloo.
"""

import contextlib
import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from course_lib.collectives.traffic import count_traffic
from course_lib.tensor_parallel import regions
from course_lib.tensor_parallel.regions import copy_to_group, gather_from_group, local_rng, sum_over_group
from course_lib.tensor_parallel.shards import TensorShard
from split_models import RECOMPUTE, batches, config, drifted, group_of, split_loss, split_model


def pair_differs(n: int) -> list[str]:
    """On a rank: what is wrong with the borders, by themselves."""
    group, wrong = group_of(n), []
    rank, size = group.rank(), group.size()
    values = [torch.arange(6.0).view(2, 3) + 10 * r for r in range(size)]

    def check(name: str, out, gradient, expected, expected_gradient, traffic, calls: tuple) -> None:
        sent = tuple(sum(r.collective == c for r in traffic.records) for c in ("all_reduce", "all_gather"))
        wrong.extend([f"{name}: output"] * (not torch.equal(out, expected)))
        wrong.extend([f"{name}: gradient"] * (not torch.equal(gradient, expected_gradient)))
        wrong.extend([f"{name}: sends {sent}"] * (sent != calls))

    x, given = values[rank].clone().requires_grad_(), values[rank] * 2
    with count_traffic() as traffic:
        out = copy_to_group(x, group)
        forward = traffic.calls
        out.backward(given)
    check("f", out.detach(), x.grad, values[rank], 2 * sum(values), traffic, (int(size > 1), 0))
    wrong += ["f sends in forward"] * forward
    wrong += ["f has changed the gradient that it was given"] * (not torch.equal(given, values[rank] * 2))

    x = values[rank].clone().requires_grad_()
    with count_traffic() as traffic:
        out = sum_over_group(x, group)
        out.backward(values[0])
    check("f*", out.detach(), x.grad, sum(values), values[0], traffic, (int(size > 1), 0))
    wrong += ["f* has changed its input"] * (not torch.equal(x, values[rank]))

    for whole, dim in ((7, 0), (8, 1), (5, -1)):
        shard = TensorShard.of(whole, group, dim)
        shape = [3, 3]
        shape[dim] = whole
        tensor = torch.randn(shape, generator=torch.Generator().manual_seed(whole))
        x, given = shard.cut(tensor).clone().requires_grad_(), torch.randn_like(tensor)
        with count_traffic() as traffic:
            out = gather_from_group(x, shard)
            out.backward(given)
        check(f"gather {whole} {dim}", out.detach(), x.grad, tensor, shard.cut(given), traffic, (0, 1))
        wrong += ["full_shape"] * (shard.full_shape(x) != list(tensor.shape))

    x = values[rank].t().clone().requires_grad_()  # an input and a gradient that do not lie row by row
    (sum_over_group(copy_to_group(x.t(), group), group) * values[0]).sum().backward()
    wrong += ["transposed"] * (not torch.equal(x.grad, size * values[0].t()))
    y = values[0].clone().requires_grad_()  # f, own work, f*: the gradient is that of one process
    sum_over_group(copy_to_group(y, group) * (rank + 1), group).sum().backward()
    wrong += ["f and f*"] * (not torch.equal(y.grad, torch.full_like(y, sum(range(1, size + 1)))))
    return wrong


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_pair_and_the_gather(ranks, n):
    assert ranks(pair_differs, n) == [[]] * 4


# Random numbers.


def draw() -> torch.Tensor:
    return torch.rand(500)


def drawn() -> dict[str, torch.Tensor]:
    """On a rank: what is drawn outside and inside."""
    torch.manual_seed(7)
    all_ranks, pair = dist.group.WORLD, group_of(2)
    found = {"before": draw()}
    with local_rng():
        found["inside 1"] = draw()
        with local_rng(pair):
            found["inside, nested"] = draw()
        found["inside 2"] = draw()
    found["between"] = draw()
    found["inside, decorated 1"] = local_rng(all_ranks)(draw)()
    decorated = local_rng(all_ranks)(draw)
    found["inside, decorated 2"], found["inside, decorated 3"] = decorated(), decorated()
    with contextlib.suppress(ZeroDivisionError), local_rng(all_ranks):
        found["inside, error"] = draw()
        1 / 0
    found["after an error"] = draw()
    with local_rng(pair):
        found["by pair"] = draw()
    found["after"] = draw()
    torch.manual_seed(8)
    with local_rng(all_ranks):
        found["inside, other seed"] = draw()
    return found


def test_ranks_draw_their_own_inside_and_the_same_outside(ranks):
    results = ranks(drawn)
    for name in results[0]:
        numbers = [found[name] for found in results]
        same = [[torch.equal(a, b) for b in numbers] for a in numbers]
        expected = [[a == b or not name.startswith("inside") for b in range(4)] for a in range(4)]
        if name == "by pair":  # two groups that draw alike, since they come alike
            expected = [[a % 2 == b % 2 for b in range(4)] for a in range(4)]
        assert same == expected, name
    for found in results:  # nothing is drawn twice, however one comes to it
        everything = [number for numbers in found.values() for number in numbers.tolist()]
        assert len(set(everything)) > 0.99 * len(everything)


def with_dropout(recompute: str) -> tuple[list, float, list[str], list[int]]:
    """On a rank: gradients of two steps with dropout in and outside of split work; what has drifted; masks of heads."""
    of, group = dataclasses.replace(config(2), dropout=0.3), dist.group.WORLD
    model, masks = split_model(of, group), []

    def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
        scores = torch.einsum("bsad,btad->bast", q, k) / q.shape[-1] ** 0.5
        future = torch.full(scores.shape[-2:], -torch.inf).triu(1)
        dropped = F.dropout((scores + future).softmax(-1), 0.3)
        masks.append((dropped[:, 0, -1] > 0).flatten().tolist())
        return torch.einsum("bast,btad->bsad", dropped, v)

    for block in model.blocks:
        block.attention.core = local_rng(group)(core)
    RECOMPUTE[recompute](model, group)
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found, losses = [], []
    for step in range(2):
        optimizer.zero_grad()
        step_loss = split_loss(model, *batches(step), group)
        step_loss.backward()
        found += [p.grad for p in model.parameters()]
        losses.append(step_loss.item())
        optimizer.step()
    return found, losses, drifted(model, group), masks


def test_dropout_in_and_outside_of_split_work(ranks):
    """Heads drop on their own, all that is whole stays the same on all ranks, and a recomputed layer drops alike."""
    plain = ranks(with_dropout, "none")
    assert all(losses == plain[0][1] and drift == [] for _, losses, drift, _ in plain)
    for number in range(4):  # 2 layers, 2 steps
        masks = [masks[number] for _, _, _, masks in plain]
        assert all(a != b for i, a in enumerate(masks) for b in masks[:i]), number
    for how in ("full", "partitioned"):
        for (gradients, losses, drift, _), expected in zip(ranks(with_dropout, how), plain, strict=True):
            assert losses == expected[1] and drift == []
            assert all(map(torch.equal, gradients, expected[0])), how


def test_a_gpu_that_is_not_in_use_is_left_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "default_generators", ())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert regions.generators() == [torch.default_generator]
    other = torch.Generator()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", (other,))
    assert regions.generators() == [torch.default_generator, other]


def one_seed_is_a_fault() -> list[str]:
    """On a rank: replicas that have drifted apart where each rank drops in its own way outside of split work."""
    of, group = dataclasses.replace(config(4), dropout=0.3), dist.group.WORLD
    model = split_model(of, group)
    torch.manual_seed(dist.get_rank())
    split_loss(model, *batches(0), group).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= p.grad
    return drifted(model, group)


def test_another_seed_on_each_rank_is_found(ranks):
    """The check above is one that can fail."""
    for names in ranks(one_seed_is_a_fault):
        assert "norm.weight" in names
