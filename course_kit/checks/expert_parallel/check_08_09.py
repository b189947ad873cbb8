"""Check of exercise 08.9: the routers' gradients and counts, as trained and with losses that are added by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from course_kit.checks.expert_parallel import formulas
from course_kit.labs.expert_parallel.models import TINY, batch_of
from course_kit.labs.tensor_parallel.models import relative_error
from course_lib.expert_parallel import router as router_module
from course_lib.expert_parallel.mixture import apply_moe
from course_lib.expert_parallel.router import Router, routers_of
from course_lib.recompute.modes import apply_recompute
from course_lib.single_gpu.model import Transformer, loss

CASES: tuple[tuple[int, str, dict], ...] = (  # micro-batches, recompute, routing
    (1, "none", {"aux_loss_coeff": 0.3, "z_loss_coeff": 0.1}),
    (2, "none", {"aux_loss_coeff": 0.3}),
    (2, "full", {"aux_loss_coeff": 0.3, "z_loss_coeff": 0.1}),
    (1, "none", {}),
)
RouterResults = tuple[list, list]  # by router: gradient or None, counts or None


def as_trained(micro_batches: int, recompute: str, routing: dict) -> RouterResults:
    """Return gradients and counts of the routers over some micro-batches."""
    model, (inputs, targets) = apply_recompute(apply_moe(Transformer(TINY), 8, 2, **routing), recompute), batch_of()
    routers: list = routers_of(model)
    for local, right in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
        part = loss(model(local), right) / micro_batches
        for router in routers:
            router.loss_weight = 1 / micro_batches  # as late as it may be set
        part.backward()
    return [r.weight.grad for r in routers], [None if r.counts is None else r.counts.tolist() for r in routers]


def by_formula(micro_batches: int, routing: dict) -> RouterResults:
    """Return the same for a model whose routers add nothing (as in evaluation), with their losses added to the
    model's.
    """
    model, (inputs, targets) = apply_moe(Transformer(TINY), 8, 2).eval(), batch_of()
    extras, counts = [], []

    def add_up(router, arguments, gates):
        logits, seen = F.linear(arguments[0], router.weight), (gates != 0).flatten(0, 1).sum(0)
        counts.append(seen)
        extra = routing.get("aux_loss_coeff", 0) * formulas.balance_loss(logits.softmax(-1), seen)
        extras.append((extra + routing.get("z_loss_coeff", 0) * formulas.z(logits)) / micro_batches)

    routers: list = routers_of(model)
    for router in routers:
        router.register_forward_hook(add_up)
    for local, right in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
        extras.clear()
        part = loss(model(local), right) / micro_batches
        (part + sum(extras)).backward()
    layers = TINY.layers
    gradients = [router.weight.grad for router in routers]
    return gradients, [sum(counts[layer::layers]).tolist() for layer in range(layers)]


def check() -> None:
    """Judge RouterLoss."""
    gates = torch.rand(4, 8, requires_grad=True)
    extra = torch.zeros((), requires_grad=True)
    first: Router = routers_of(apply_moe(Transformer(TINY), 8, 2))[0]
    same = router_module.RouterLoss.apply(gates, extra, torch.zeros(8), first)
    assert same.data_ptr() == gates.data_ptr(), "the gates are returned unchanged: a view, no copy"
    for micro_batches, recompute, routing in CASES:
        (mine, counted), (right, wanted) = (
            as_trained(micro_batches, recompute, routing),
            by_formula(micro_batches, routing),
        )
        where = f"{micro_batches} micro-batches, recompute {recompute}, {routing}"
        for layer in range(TINY.layers):
            assert mine[layer] is not None, f"{where}: the router has no gradient"
            error, factor = relative_error(mine[layer], right[layer]), mine[layer].norm() / right[layer].norm()
            assert error < 1e-4, (
                f"{where}: the router's gradient is off by {error:.1%}, its norm is {factor:.2f} times the formula's"
            )
            assert counted[layer] == wanted[layer], (
                f"{where}: counts are {counted[layer]}, the choices were {wanted[layer]}"
            )
