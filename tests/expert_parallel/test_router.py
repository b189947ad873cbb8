"""course_lib.expert_parallel.router: gates, losses, biases, capacity and nodes, against plain Python and transformers.
CPU.
"""

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from calls import said
from course_lib.expert_parallel.mixture import apply_moe
from course_lib.expert_parallel.router import (
    Router,
    RouterLoss,
    balance_loss,
    routers_of,
    take_counts,
    top_k_gates,
    update_bias,
    within_capacity,
    within_nodes,
    z_loss,
)
from course_lib.recompute.modes import apply_recompute, keep_matmuls
from course_lib.single_gpu.model import ModelConfig, Transformer, loss

HIDDEN, EXPERTS = 12, 8
TINY = ModelConfig(layers=2, hidden=12, heads=2, kv_heads=1, ffn_hidden=16, vocab=23)


def router(top_k: int = 2, experts: int = EXPERTS, seed: int = 0, **routing) -> Router:
    made = Router(HIDDEN, experts, top_k, **routing)
    with torch.no_grad():
        made.weight.normal_(generator=torch.Generator().manual_seed(seed))
    return made


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed))


# Gates.


def gates_by_hand(logits, bias, k: int, score: str, scale: float) -> list[float]:
    """Of one token, in Python's numbers."""
    if score == "softmax":
        total = sum(math.exp(z) for z in logits)
        scores = [math.exp(z) / total for z in logits]
    else:
        scores = [1 / (1 + math.exp(-z)) for z in logits]
    chosen = sorted(range(len(logits)), key=lambda e: scores[e] + bias[e])[-k:]
    total = sum(scores[e] for e in chosen) if k > 1 else 1
    return [scale * scores[e] / total if e in chosen else 0.0 for e in range(len(logits))]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("k", [1, 2, 3, EXPERTS])
def test_gates_are_those_made_by_hand(score, k):
    """The bias ranks and is in no gate; scale comes last."""
    made, x = router(k, score=score, scale=2.5), tokens(3, 5)
    made.bias.copy_(torch.randn(EXPERTS, generator=torch.Generator().manual_seed(2)))
    logits = (x @ made.weight.t()).detach().flatten(0, 1).tolist()
    expected = [gates_by_hand(row, made.bias.tolist(), k, score, 2.5) for row in logits]
    torch.testing.assert_close(made(x), torch.tensor(expected).view(3, 5, EXPERTS), rtol=1e-5, atol=1e-7)


def test_ties_and_numbers_too_small_leave_k_experts():
    """The choices are known by their number: always k, whatever the scores."""
    for scores in (torch.full((4, 5), 0.2), torch.tensor([[1.0, 1e-45, 0, 0, 0]]), torch.tensor([[1.0, 0, 0, 0, 0]])):
        for k in range(1, 6):
            gates = top_k_gates(scores, scores, k)
            assert ((gates > 0).sum(-1) == k).all() and gates.isfinite().all(), (scores, k)
            assert k == 1 or torch.allclose(gates.sum(-1), torch.ones(len(scores)))


def test_scores_that_are_all_zero_still_make_gates():
    """A sigmoid of less than -104 is 0 in float32."""
    scores = torch.zeros(1, 4, requires_grad=True)
    gates = top_k_gates(scores, scores.detach(), 2)
    gates.sum().backward()
    assert ((gates > 0).sum(-1) == 2).all() and gates.isfinite().all() and scores.grad.isfinite().all()


def test_gates_of_bfloat16_scores():
    scores = torch.rand(6, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    gates = top_k_gates(scores, scores, 3)
    assert gates.dtype == torch.bfloat16 and ((gates > 0).sum(-1) == 3).all()
    torch.testing.assert_close(gates.float().sum(-1), torch.ones(6), rtol=2e-2, atol=0)


def test_the_gradient_of_gates_is_that_of_plain_numbers():
    """gradcheck in float64, and none for what is not chosen."""
    scores = torch.rand(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    for k in (1, 2, 6):
        assert torch.autograd.gradcheck(lambda s: top_k_gates(s, s.detach(), k), scores)
        (gradient,) = torch.autograd.grad((top_k_gates(scores, scores.detach(), k) * torch.arange(6)).sum(), scores)
        assert ((gradient != 0) <= (top_k_gates(scores, scores, k) > 0)).all()


def test_autocast_keeps_logits_in_float32():
    made, x = router(aux_loss_coeff=0.1, z_loss_coeff=0.1), tokens(40)
    with torch.autocast("cpu", torch.bfloat16):
        gates = made(x)
        of_half = made(x.bfloat16())
    assert torch.equal(gates, made(x)) and gates.dtype == of_half.dtype == torch.float32
    assert torch.equal(of_half, made(x.bfloat16().float()))
    half = router().bfloat16()  # a model in bfloat16 too
    assert half(x.bfloat16()).dtype == torch.float32


def test_mixtrals_router():
    """Equal for k > 1; of one expert Mixtral's gate is always 1, ours its score (Switch)."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    for k in (1, 2, 3):
        config = MixtralConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=k)
        theirs, ours, x = MixtralTopKRouter(config), router(k), tokens(50)
        theirs.weight = ours.weight
        _, gates, chosen = theirs(x)
        expected = torch.zeros(50, EXPERTS).scatter(1, chosen, gates)
        found = ours(x) if k > 1 else (ours(x) > 0).float()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("k, nodes, limit", [(8, 8, 4), (4, 4, 2), (4, 1, 1), (7, 8, 4)])
def test_deepseek_v3s_router(k, nodes, limit):
    """n_group and topk_group are our nodes and node_limit. DeepSeek takes the best 2 of each group always, ours
    ceil(k / node_limit): 2 in all of these.
    """
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        n_routed_experts=32,
        num_experts_per_tok=k,
        n_group=nodes,
        topk_group=limit,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    theirs, x = DeepseekV3TopkRouter(config), tokens(200)
    ours = router(k, 32, score="sigmoid", scale=2.5, nodes=nodes, node_limit=limit)
    ours.bias.copy_(torch.randn(32, generator=torch.Generator().manual_seed(3)))
    theirs.weight, theirs.e_score_correction_bias = ours.weight, ours.bias
    _, gates, chosen = theirs(x)
    torch.testing.assert_close(ours(x), torch.zeros(200, 32).scatter(1, chosen, gates), rtol=1e-5, atol=1e-7)


# The losses.


def test_the_balance_loss_is_one_for_even_shares_and_that_of_mixtral():
    """transformers divides by the tokens, we by the choices: theirs is k times ours."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    even = torch.full((8, 4), 0.25)
    assert balance_loss(even, torch.tensor([4, 4, 4, 4])).item() == pytest.approx(1)
    one_hot = torch.eye(4)[torch.zeros(8, dtype=torch.long)]
    assert balance_loss(one_hot, torch.tensor([8, 0, 0, 0])).item() == pytest.approx(4)
    made, x = router(3), tokens(2, 30)
    logits = x @ made.weight.t()
    counts = (made(x) > 0).flatten(0, 1).sum(0)
    ours = balance_loss(logits.softmax(-1), counts)
    theirs = load_balancing_loss_func((logits.flatten(0, 1),), EXPERTS, 3)
    torch.testing.assert_close(3 * ours, theirs)
    (gradient,) = torch.autograd.grad(ours, made.weight, retain_graph=True)
    torch.testing.assert_close(3 * gradient, torch.autograd.grad(theirs, made.weight)[0])
    sigmoid = torch.tensor([[0.2, 0.6], [0.5, 0.5]])  # scores that do not add up to 1 count by their shares
    assert balance_loss(sigmoid, torch.tensor([1, 3])).item() == pytest.approx(2 * (0.25 * 0.375 + 0.75 * 0.625))


def test_z_loss():
    logits = torch.tensor([[[0.0, 0.0]], [[1.0, 3.0]]])
    expected = (math.log(2) ** 2 + math.log(math.e + math.e**3) ** 2) / 2
    assert z_loss(logits).item() == pytest.approx(expected)
    assert z_loss(torch.zeros(7, 1)).item() == 0


def mixture(**routing) -> Transformer:
    model = apply_moe(Transformer(TINY), 6, 2, **routing)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model


LOSSES = {"aux_loss_coeff": 0.3, "z_loss_coeff": 0.2}


def gradients_with_losses_added(weight: float, parts: int, **routing) -> tuple[dict, torch.Tensor]:
    """By name, where the routers' losses are simply added to the model's; and its loss."""
    model, extras, plain = mixture(**LOSSES, **routing), [], RouterLoss.apply
    RouterLoss.apply = lambda gates, extra, counts, router: extras.append(extra) or gates
    try:
        total = 0
        for inputs, targets in batch(parts):
            extras.clear()
            own = loss(model(inputs), targets) / parts
            (own + weight * sum(extras)).backward()
            total = total + own.detach()
    finally:
        RouterLoss.apply = plain
    return {name: p.grad for name, p in model.named_parameters()}, total


def batch(parts: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs, targets = torch.randint(TINY.vocab, (2, 4, 9), generator=torch.Generator().manual_seed(0))
    return list(zip(inputs.chunk(parts), targets.chunk(parts), strict=True))


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("parts", [1, 2])
def test_the_losses_join_the_gradient_and_not_the_loss(mode, parts):
    """As if they had been added, whatever is computed again, and each choice is counted once."""
    expected, expected_loss = gradients_with_losses_added(1 / parts, parts)
    model, total = apply_recompute(mixture(**LOSSES), mode), 0
    for each in routers_of(model):
        each.loss_weight = 1 / parts
    for inputs, targets in batch(parts):
        own = loss(model(inputs), targets) / parts
        own.backward()
        total = total + own.detach()
    torch.testing.assert_close(total, expected_loss)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-5, atol=1e-6, msg=lambda m: f"{name}: {m}")
    counts = take_counts(model)
    assert counts.shape == (2, 6) and (counts.sum(1) == 4 * 9 * 2).all()
    assert not take_counts(model).any()
    quiet = mixture()
    loss(quiet(batch(1)[0][0]), batch(1)[0][1]).backward()
    off = [(p.grad - expected[name]).norm() / p.grad.norm() for name, p in quiet.named_parameters() if "router" in name]
    assert min(off) > 1e-2, "the losses are too small to be seen"


def test_nothing_is_counted_or_lost_where_nothing_is_learnt():
    model, (inputs, targets) = mixture(**LOSSES), batch(1)[0]
    with torch.no_grad():
        model(inputs)
    model(inputs)  # forward alone
    assert not take_counts(model).any()
    model.eval()
    loss(model(inputs), targets).backward()
    quiet = mixture()
    loss(quiet(inputs), targets).backward()
    for (name, p), other in zip(model.named_parameters(), quiet.parameters(), strict=True):
        assert torch.equal(p.grad, other.grad), name
    assert not take_counts(model).any() and take_counts(quiet).any()


# Biases, capacity, nodes.


def test_biases_even_the_loads_out():
    """With no gradient; each step moves every bias by the rate, or not at all."""
    model = nn.ModuleList([router(2, seed=seed, score="sigmoid") for seed in (0, 1)])
    x = tokens(500) + tokens(1, seed=5)  # tokens alike: some experts get most of them

    def load() -> torch.Tensor:
        for each in routers_of(model):
            each(x).sum().backward()
        return take_counts(model)

    counts = first = load()
    for _ in range(80):
        before = [each.bias.clone() for each in routers_of(model)]
        update_bias(model, counts, 0.01)
        for each, old, row in zip(routers_of(model), before, counts.float(), strict=True):
            torch.testing.assert_close(each.bias - old, 0.01 * (row.mean() - row).sign(), rtol=1e-4, atol=1e-7)
        counts = load()
    even = 500 * 2 / EXPERTS
    assert (first.max(1).values > 1.8 * even).all() and (counts.max(1).values < 1.3 * even).all(), (first, counts)
    assert all(not each.bias.requires_grad for each in routers_of(model))


def test_update_bias_leaves_even_loads_alone():
    model = nn.ModuleList([router(2, 4)])
    update_bias(model, torch.tensor([[5, 5, 5, 5]]), 0.1)
    assert not model[0].bias.any()


def test_capacity_drops_later_tokens():
    made, x = router(2, capacity=0.5), tokens(3, 20)
    free = router(2)(x).detach()
    gates, seen, expected = made(x), [0] * EXPERTS, free.clone()
    for row in expected.view(60, EXPERTS):
        for e in range(EXPERTS):
            seen[e] += row[e].item() != 0
            if seen[e] > 8:
                row[e] = 0
    assert made.routing.slots(60) == 8 and router(2).routing.slots(60) == 60  # ceil(0.5 · 60 · 2 / 8)
    torch.testing.assert_close(gates, expected)
    assert (gates != free).any() and ((gates != 0).flatten(0, 1).sum(0) <= 8).all()
    gates.sum().backward()
    assert made.counts.sum() == 120  # what was chosen, dropped or not
    assert torch.equal(within_capacity(free, 60), free)


def test_a_token_goes_to_experts_of_few_nodes():
    x = tokens(300)
    for nodes, limit, k in ((4, 1, 2), (4, 2, 3), (4, 3, 4), (8, 2, 2), (2, 1, 4)):
        gates = router(k, nodes=nodes, node_limit=limit)(x)
        reached = (gates.unflatten(-1, (nodes, -1)) != 0).any(-1).sum(-1)
        assert reached.max() == limit and ((gates != 0).sum(-1) == k).all(), (nodes, limit, k)
    assert torch.equal(router(nodes=4, node_limit=4)(x), router()(x))


def test_the_best_nodes_have_the_best_sums():
    ranking = torch.tensor([[9.0, 0, 5, 5, 6, 3]])  # three nodes of two
    for limit, k, kept in ((1, 1, [0]), (1, 2, [1]), (2, 2, [0, 2]), (2, 4, [1, 0]), (3, 4, [0, 1, 2])):
        found = within_nodes(ranking, 3, limit, k)
        assert sorted(kept) == found.view(3, 2).isfinite().all(-1).nonzero().flatten().tolist(), (limit, k)
        assert torch.equal(found[found.isfinite()], ranking[found.isfinite()])


@pytest.mark.parametrize(
    "top_k, routing, words",
    [
        (0, {}, "top_k 0: it must be 1 to 8, the number of experts"),
        (9, {}, "top_k 9"),
        (2, {"score": "relu"}, "score 'relu': it is one of softmax, sigmoid"),
        (2, {"nodes": 3}, "nodes 3, node_limit 1: nodes must divide experts (8)"),
        (2, {"nodes": 4, "node_limit": 0}, "nodes 4, node_limit 0: nodes must divide"),
        (2, {"nodes": 4, "node_limit": 5}, "nodes 4, node_limit 5: nodes must divide"),
        (3, {"nodes": 4, "node_limit": 1}, "node_limit 1: on so many nodes are fewer than top_k 3 experts"),
        (2, {"capacity": 0.0}, "capacity 0.0: it must be above 0, or None"),
        (2, {"nodes": 0}, "nodes 0, node_limit 1: nodes must divide"),
    ],
)
def test_what_does_not_fit_together_is_one_line(top_k, routing, words):
    text = said(lambda: router(top_k, **routing))
    assert text.startswith("ValueError: ") and words in text and "\n" not in text, text


@pytest.mark.parametrize("mode", [("none",), ("selective", keep_matmuls), ("full",)], ids=lambda mode: mode[0])
def test_a_recomputed_forward_does_not_send_its_counts_again(mode):
    """Backward has those of the first: a second all-reduce in each mixture would be for nothing."""
    model, sent = apply_recompute(mixture(**LOSSES), *mode), []
    for each in routers_of(model):
        each.batch_group = object()
    with mock.patch.object(dist, "all_reduce", lambda counts, **_: sent.append(counts.sum().item()) or mock.Mock()):
        inputs, targets = batch(1)[0]
        loss(model(inputs), targets).backward()
    assert sent == [4 * 9 * 2] * 2, "one for each of two layers"


def test_a_reentrant_checkpoint_sends_its_counts_in_the_replay():
    """Its first forward has no graph: the replay is the only one."""
    gradients, sent = [], []
    all_reduce = lambda counts, **_: sent.append(counts.sum().item()) or mock.Mock()  # noqa: E731
    for forward in (lambda made, x: made(x), lambda made, x: checkpoint(made, x, use_reentrant=True)):
        made, x = router(aux_loss_coeff=0.3), tokens(5, 7).requires_grad_()
        made.batch_group = object()
        with mock.patch.object(dist, "all_reduce", all_reduce):
            forward(made, x).square().sum().backward()
        gradients.append((x.grad, made.weight.grad))
    assert sent == [5 * 7 * 2] * 2
    assert all(torch.equal(plain, again) for plain, again in zip(*gradients, strict=True))


def test_forward_does_not_wait_for_the_counts_of_other_ranks():
    """They are on their way until backward, which takes them for the gradient of the balance loss."""
    group, others, happened = object(), torch.arange(EXPERTS), []

    def all_reduce(counts, group=None, async_op=False):
        assert group is made.batch_group and async_op, "the rank would wait here"
        happened.append("sent")

        def wait():
            counts.add_(others)  # not there before
            happened.append("waited")

        return mock.Mock(wait=wait)

    made, x = router(aux_loss_coeff=0.3), tokens(5, 7)
    made.batch_group = group
    with mock.patch.object(dist, "all_reduce", all_reduce):
        gates = made(x)
        assert happened == ["sent"]
        gates.sum().backward()
    assert happened == ["sent", "waited"]

    weight = made.weight.detach().clone().requires_grad_()
    scores = (x @ weight.t()).softmax(-1)
    kept = top_k_gates(scores, scores.detach(), 2)
    own = (kept.detach() != 0).flatten(0, -2).sum(0)
    (kept.sum() + 0.3 * balance_loss(scores, own + others)).backward()
    torch.testing.assert_close(made.weight.grad, weight.grad)
    assert torch.equal(made.counts, own), "take_counts adds up those of all ranks"
