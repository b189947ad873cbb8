"""course_lib.kernels.program.use_kernels with tensor, sequence and data parallelism on two ranks, against one process
of PyTorch's operations. CPU, gloo, interpreted.
"""

import pytest
import torch
from torch import nn

from course_kit.gpu.launches import record_launches
from course_lib.data_parallel.replicas import DataParallel
from course_lib.kernels.fused_loss import defer_head, linear_cross_entropy
from course_lib.kernels.fused_norm import FusedRMSNorm
from course_lib.kernels.program import FusedBlock, use_kernels
from course_lib.recompute.modes import IGNORED, apply_recompute
from course_lib.sequence_parallel.model import SequenceParallelNorm, apply_sequence_parallel
from course_lib.tensor_parallel.model import apply_tensor_parallel
from course_lib.tensor_parallel.shards import gather_state_dict, materialize
from course_lib.zero.shards import clip_grad_norm_
from split_models import (
    MAX_NORM,
    OPTIMIZERS,
    STEPS,
    batches,
    config,
    differing,
    group_of,
    init,
    meta_model,
    one_process,
    split_loss,
    whole_gradients,
    whole_model,
)

SIZES = {"batch": 2, "seq": 4}


def split_with_kernels(how: str, of, group) -> nn.Module:
    """Kernels first, then the other verbs in the order of notebook 10; tensor parallelism on the meta device, and with
    full recomputation.
    """
    if how == "sequence":
        return apply_sequence_parallel(apply_tensor_parallel(use_kernels(whole_model(of)), group), group)
    model = apply_recompute(apply_tensor_parallel(use_kernels(meta_model(of)), group), "full")
    return materialize(model, lambda name, tensor: init(name, tensor, of))


def trained(model: nn.Module, loss_of, gradients_of=whole_gradients) -> dict[str, torch.Tensor]:
    """Losses, gradients, norms and the weights after the last step, by name. Collective."""
    found, optimizer = {}, OPTIMIZERS["SGD"](model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        step_loss = loss_of(model, step)
        found[f"loss {step}"] = step_loss.detach()
        found |= {f"gradient {step} {name}": whole for name, whole in gradients_of(model).items()}
        found[f"norm {step}"] = clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return found | {f"weight {name}": tensor for name, tensor in gather_state_dict(model).items()}


def split_training(how: str) -> dict[str, object]:
    """On a rank: what differs from one process; the launches of each kernel in a forward; the norms in a layer."""
    of, group = config(2), group_of(2)

    def loss_of(model, step):
        step_loss = split_loss(model, *batches(step, **SIZES), group)
        step_loss.backward()
        return step_loss

    model = split_with_kernels(how, of, group)
    differs = differing(trained(model, loss_of), one_process(of, **SIZES))
    with record_launches() as launches, torch.no_grad():
        model(batches(0, **SIZES)[0])
    names = [launch.name for launch in launches]
    block = model.blocks[0]
    return {
        "differs": differs,
        "launches": {name: names.count(name) for name in ("rope_kernel", "swiglu_forward_kernel")},
        "all": len(names),
        "layer": (type(block), type(block.attention_norm), type(block.mlp_norm)),
    }


@pytest.mark.parametrize("how", ["tensor", "sequence"])
def test_training_is_that_of_one_process(ranks, how):
    """Losses, gradients, norms, weights after 3 clipped steps, within 1e-5; the kernels run on each rank's heads and
    columns. Sequence parallelism puts its own norms in the place of the kernels' and sums the residual apart.
    """
    layers = config(2).layers
    norm, norms = (SequenceParallelNorm, 0) if how == "sequence" else (FusedRMSNorm, 2 * layers + 1)
    for found in ranks(split_training, how):
        assert not found["differs"], found["differs"]
        assert found["launches"] == {"rope_kernel": 2 * layers, "swiglu_forward_kernel": layers}
        assert found["all"] == 3 * layers + norms and found["layer"] == (FusedBlock, norm, norm)


def replicated_training() -> list[str]:
    """On a rank: what differs from one process where ranks have the halves of a batch, with the loss's kernel too."""
    of, group = config(2, tied=True), group_of(2)
    model = DataParallel(defer_head(use_kernels(whole_model(of))), group)

    def loss_of(module, step):
        inputs, targets = (part.chunk(2)[group.rank()] for part in batches(step, **SIZES))
        count = (batches(step, **SIZES)[1] != IGNORED).sum()
        own = linear_cross_entropy(model(inputs), module.head.weight, targets, reduction="sum") / count
        (own * group.size()).backward()
        model.finish()
        whole = own.detach().clone()
        torch.distributed.all_reduce(whole, group=group)
        return whole

    def gradients_of(module):
        return {name: p.grad.clone() for name, p in module.named_parameters()}

    return differing(trained(model.module, loss_of, gradients_of), one_process(of, **SIZES))


def test_data_parallel_training_is_that_of_one_process(ranks):
    """A tied weight's two gradients, from the embedding and from the loss, arrive as one and are averaged once."""
    assert ranks(replicated_training) == [[]] * 4
