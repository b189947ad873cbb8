"""course_lib.tensor_parallel.partitioned_checkpoints on two to four ranks against full recomputation: bits, bytes,
traffic. CPU.
"""

import contextlib
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.collectives.traffic import Traffic, count_traffic
from course_lib.recompute.modes import apply_recompute, retained_bytes
from course_lib.tensor_parallel.partitioned_checkpoints import PartitionedCheckpoint, apply_partitioned_recompute
from split_models import batches, config, group_of, split_loss, split_model


class Summed:
    """The sum of a tensor, under way in a copy of it."""

    def __init__(self, work, tensor: torch.Tensor, copy: torch.Tensor):
        self.work, self.tensor, self.copy = work, tensor, copy

    def wait(self) -> None:
        self.work.wait()
        self.tensor.copy_(self.copy.view_as(self.tensor))


@contextlib.contextmanager
def summed_elsewhere(room: torch.Tensor):
    """Inside, all_reduce sums copies in `room`, memory from before: gloo's threads hold what they have summed until it
    is their turn, and it would count as kept.
    """
    plain, used = dist.all_reduce, 0

    def all_reduce(tensor: torch.Tensor, *args, async_op: bool = False, **kwargs):
        nonlocal used
        copy = room[used:][: tensor.numel()].copy_(tensor.flatten())
        used += tensor.numel()
        work = Summed(plain(copy, *args, async_op=True, **kwargs), tensor, copy)
        return work if async_op else work.wait()

    dist.all_reduce = all_reduce
    try:
        yield
    finally:
        dist.all_reduce = plain


def step(model, inputs, targets, group) -> tuple[list[torch.Tensor], Traffic, int]:
    """Gradients of a step, its traffic, and bytes kept after a forward."""
    model.zero_grad()
    hidden = model.config.hidden * inputs.numel()
    with summed_elsewhere(torch.empty((1 + 2 * model.config.layers) * hidden, dtype=next(model.parameters()).dtype)):
        kept = retained_bytes(model, lambda: model(inputs))
    with count_traffic() as traffic:
        split_loss(model, inputs, targets, group).backward()
    return [p.grad.clone() for p in model.parameters()], traffic, kept


def compared(n: int, batch: int, seq: int, chunks: int, dtype: torch.dtype) -> dict[str, object]:
    """On a rank: what differs between checkpoints in parts and whole ones."""
    of, group = config(12), group_of(n)
    model, (inputs, targets) = split_model(of, group, chunks=chunks).to(dtype), batches(0, batch, seq)
    apply_recompute(model, "full")
    full = step(model, inputs, targets, group)
    returned = apply_partitioned_recompute(model, group)
    parts = step(model, inputs, targets, group)
    numel, size = batch * seq * of.hidden, dtype.itemsize
    own = min(-(-numel // group.size()), max(0, numel - group.rank() * -(-numel // group.size())))
    found = {"returned": returned is model, "bits": all(map(torch.equal, full[0], parts[0]))}
    found["kept"] = full[2] - parts[2] == of.layers * size * (numel - own)
    gathered = parts[1].select("all_gather")
    each = (group.size() - 1) * size * -(-numel // group.size())
    members = tuple(dist.get_process_group_ranks(group))
    found["gathered"] = [(r.group, r.bytes) for r in gathered.records] == [(members, each)] * of.layers
    others = Counter(r[:4] for r in parts[1].records if r.collective != "all_gather")
    found["nothing else"] = others == Counter(r[:4] for r in full[1].records)
    apply_recompute(model, "none")
    undone = step(model, inputs, targets, group)
    found["undone"] = undone[1].select("all_gather").calls == 0 and "forward" not in model.blocks[0].__dict__
    found["as without"] = all(map(torch.equal, undone[0], parts[0]))
    apply_partitioned_recompute(apply_recompute(model, "selective"), group)
    found["replaces"] = not isinstance(model.blocks[0].attention.core, PartitionedCheckpoint.__mro__[1])
    with torch.no_grad(), count_traffic() as traffic:
        found["no grad"] = not model(inputs).requires_grad and traffic.select("all_gather").calls == 0
    return found


@pytest.mark.parametrize(
    "n, batch, seq, chunks, dtype",
    [
        (2, 2, 5, 1, torch.float32),
        (3, 1, 7, 2, torch.float32),
        (4, 1, 2, 3, torch.float32),
        (4, 3, 5, 1, torch.bfloat16),
    ],
)
def test_gradients_are_those_of_full_recomputation_for_an_nth_of_its_bytes(ranks, n, batch, seq, chunks, dtype):
    """The same bits; what is kept less is what other ranks have; one all-gather a layer more, and nothing else."""
    for rank, found in enumerate(ranks(compared, n, batch, seq, chunks, dtype)):
        assert all(found.values()), (rank, found)


class Odd(nn.Module):
    """A layer of 7 numbers, whose size goes into no number of ranks, with an argument that is no tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor, scale: float, mask: torch.Tensor) -> torch.Tensor:
        return x + scale * torch.tanh(self.linear(x)) * mask


def odd_arguments() -> dict[str, bool]:
    """On a rank: other arguments than tensors of a size that divides; positions [b, s]; nothing kept without grad."""
    group, found = dist.group.WORLD, {}
    torch.manual_seed(0)
    layer, mask = Odd(), torch.rand(7) > 0.3
    for shape in ((7,), (1, 7), (3, 5, 7)):
        x = torch.randn(shape, requires_grad=True)
        run = PartitionedCheckpoint(layer.forward, group)
        gradients = []
        for function in (layer.forward, run):
            layer.zero_grad()
            x.grad = None
            y = x * 1.0
            function(function(y, 0.5, mask), 2.0, mask).square().sum().backward()
            gradients.append([x.grad, *(p.grad.clone() for p in layer.parameters())])
        found[f"odd {shape}"] = all(map(torch.equal, *gradients))
    transposed = torch.randn(7, 7, requires_grad=True)
    gradients = []
    for function in (layer.forward, PartitionedCheckpoint(layer.forward, group)):
        transposed.grad = None
        function((transposed * 1.0).t(), 0.5, mask).square().sum().backward()
        gradients.append(transposed.grad)
    found["transposed"] = torch.allclose(*gradients)  # another layout, another order of summation

    of, (inputs, _) = config(2), batches(0)
    model = split_model(of, group, gather_logits=True)
    positions = torch.randint(50, inputs.shape, generator=torch.Generator().manual_seed(1))
    gradients = []
    for change in (lambda: apply_recompute(model, "full"), lambda: apply_partitioned_recompute(model, group)):
        change()
        model.zero_grad()
        model(inputs, positions).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    found["positions [b, s]"] = all(map(torch.equal, *gradients))
    model.embedding.requires_grad_(False)  # the first layer's input wants no gradient: it is kept as it is
    with count_traffic() as traffic:
        model.zero_grad()
        model(inputs).square().sum().backward()
    found["embedding without gradient"] = traffic.select("all_gather").calls == of.layers - 1 + 1  # and the logits
    saved = []
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
        model(inputs)
    found["nothing is kept without grad"] = not saved
    return found


def test_odd_arguments(ranks):
    for rank, found in enumerate(ranks(odd_arguments)):
        assert all(found.values()), (rank, found)
