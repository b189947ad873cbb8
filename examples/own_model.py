"""Use the library in your own program: train another model on several ranks and on one, and compare the losses.

    torchrun --nproc-per-node 2 examples/own_model.py data-parallel        # with .venv's torchrun, or PYTHONPATH=.
    torchrun --nproc-per-node 2 examples/own_model.py ring-attention --recompute

`prepare` has the calls that you need. For GPUs, add `torch.cuda.set_device(local_rank)` and `.to("cuda")`.
"""

import argparse
import copy
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib.context_parallel import ring_attention, zigzag_shard
from course_lib.data_parallel import DataParallel
from course_lib.recompute import apply_recompute
from course_lib.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from course_lib.zero import ZeroOptimizer, fully_shard

WAYS = "data-parallel", "zero-2", "zero-3", "tensor-parallel", "ring-attention"
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)


def causal_attention(q, k, v):  # each [b, s, a, d]
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


class Layer(nn.Module):
    """A transformer layer with LayerNorm, biases and GELU. x: [b, s, h]."""

    def __init__(self, h: int, heads: int):
        super().__init__()
        self.heads, self.attend = heads, causal_attention
        self.norm_1, self.qkv, self.out = nn.LayerNorm(h), nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.norm_2, self.up, self.down = nn.LayerNorm(h), nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(self.norm_1(x)).chunk(3, -1))
        x = x + self.out(self.attend(q, k, v).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Mine(nn.Module):
    """Tokens and their positions, each [b, s], to logits [b, s, v]."""

    def __init__(self, vocab: int = 97, h: int = 32, heads: int = 4, layers: int = 3, longest: int = 64):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, h), nn.Embedding(longest, h)
        self.layers = nn.ModuleList(Layer(h, heads) for _ in range(layers))
        self.head = nn.Linear(h, vocab)

    def forward(self, tokens, positions):
        x = self.tokens(tokens) + self.positions(positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def rows_of_rank(tensor):  # this rank's sequences
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def prepare(way: str, model: nn.Module) -> tuple:
    """Return the model, its optimizer, a function for a rank's shard of a [b, s], and one to call after backward."""
    if way == "tensor-parallel":  # each rank sees all of the batch, and has 1/n of these matrices
        for layer in model.layers:
            layer.up = ColumnParallelLinear(layer.up, dist.group.WORLD)
            layer.down = RowParallelLinear(layer.down, dist.group.WORLD)
        return model, ADAMW(model.parameters()), lambda tensor: tensor, lambda: None
    if way == "ring-attention":  # each rank sees 1/n of the tokens of each sequence
        for layer in model.layers:
            layer.attend = ring_attention
        model = DataParallel(model)
        return model, ADAMW(model.parameters()), zigzag_shard, model.finish
    if way == "zero-2":
        return model, ZeroOptimizer(model, torch.optim.AdamW, stage=2, lr=0.01), rows_of_rank, lambda: None
    model = fully_shard(model) if way == "zero-3" else DataParallel(model)
    return model, ADAMW(model.parameters()), rows_of_rank, model.finish


def train(model, optimizer, shard=lambda tensor: tensor, after_backward=lambda: None, steps: int = 5) -> torch.Tensor:
    """Train on the same batches for every method; return each step's loss, averaged over this rank's tokens."""
    losses = []
    for text in torch.randint(97, (steps, 8, 33), generator=torch.Generator().manual_seed(1)):
        tokens, positions, targets = map(shard, (text[:, :-1], torch.arange(32).expand(8, 32), text[:, 1:]))
        loss = F.cross_entropy(model(tokens, positions).flatten(0, 1), targets.flatten())
        loss.backward()
        after_backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def compare(way: str, recompute: bool) -> tuple[list[float], list[float]]:
    """Return the losses of the ranks, averaged, and the losses of one process."""
    torch.manual_seed(0)
    model = copy.deepcopy(alone := Mine())
    if recompute:
        apply_recompute(model.layers, "full")
    parallel = train(*prepare(way, model))
    dist.all_reduce(parallel, dist.ReduceOp.AVG)
    return parallel.tolist(), train(alone, ADAMW(alone.parameters())).tolist()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--recompute", action="store_true", help="keep only the inputs of the layers for backward")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    for step, (loss, expected) in enumerate(zip(*compare(**vars(args)), strict=True), 1):
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.6f}, on one process {expected:.6f}, difference {loss - expected:+.0e}")
    dist.destroy_process_group()
