"""Check of exercise 06.7: a split embedding against a full one: values, gradients, dtype, traffic, memory."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from course_kit.checks.tensor_parallel.cases import CLOSE, all_cases, counted, in_case
from course_kit.checks.tensor_parallel.memory import AtOnce, retained_by, saved_as_attributes, saved_for_backward
from course_kit.labs.tensor_parallel.models import in_groups, relative_error
from course_kit.ranks import shared
from course_kit.typed import grad_of, override
from course_lib.collectives.traffic import Traffic, count_traffic
from course_lib.tensor_parallel import vocabulary

WIDTH = 24  # of the hidden states
TABLES: dict[
    int, list[tuple]
] = {  # by number of ranks: tokens of the vocabulary, dtype of the rows, shape of the tokens
    2: [(97, torch.float32, (33,))],
    4: [(97, torch.float32, (3, 11)), (400, torch.bfloat16, (1, 3, 11))],
}


class RankResult(NamedTuple):
    """A rank's report on a split embedding."""

    error: float
    grad_error: float
    dtype: torch.dtype  # of the output
    forward: Traffic
    backward: Traffic
    retained: int  # bytes of the layer
    left: float  # of its output where f* makes zeros
    held: int  # bytes for backward, or on the layer, beside its rows
    large: int  # tensors as large as the local rows that forward has at once


def embedding_trial(group: dist.ProcessGroup, vocab: int, dtype: torch.dtype, shape: tuple[int, ...]) -> RankResult:
    """Look up 33 tokens, of which two are outside the vocabulary."""
    torch.manual_seed(7)
    full, given = nn.Embedding(vocab, WIDTH, dtype=dtype), torch.randn(*shape, WIDTH).to(dtype)
    tokens = torch.cat([torch.tensor([-1, vocab]), torch.randint(vocab, (31,))]).view(shape)  # two are no tokens
    layer, retained = retained_by(lambda: vocabulary.VocabParallelEmbedding(copy.deepcopy(full), group))
    with in_case(f"tokens of {counted(len(shape), 'dimension')}, {dtype}"):
        with count_traffic() as forward, AtOnce(layer.weight.nbytes) as tables:
            out, held = saved_for_backward(lambda: layer(tokens), tokens, layer.weight)
        held += saved_as_attributes(layer)
        with count_traffic() as backward:
            out.backward(given)
    outside = (tokens < 0) | (tokens >= vocab)
    expected = full(tokens.masked_fill(outside, 0)).masked_fill(outside[..., None], 0.0)
    expected.backward(given)
    errors = (
        relative_error(out, expected),
        relative_error(grad_of(layer.weight), layer.shard.cut(grad_of(full.weight))),
    )
    override(layer, output_reduce=lambda summand, group: torch.zeros_like(summand))
    return RankResult(
        *errors, out.dtype, forward, backward, retained, layer(tokens).abs().max().item(), held, tables.most
    )


def check() -> None:
    """Judge the forward of VocabParallelEmbedding on 2 and 4 ranks."""
    ranks = shared(4)
    with ranks.within(20):
        for n, cases in TABLES.items():
            for rank, trials in enumerate(ranks(in_groups, n, all_cases, embedding_trial, cases)):
                for (vocab, dtype, _), result in zip(cases, trials, strict=True):
                    judge(n, rank, vocab, dtype, result)


def judge(n: int, rank: int, vocab: int, dtype: torch.dtype, result: RankResult) -> None:
    """Judge one table on one rank."""
    where = f"{vocab} tokens, {n} ranks, rank {rank}, {dtype}"
    assert result.error < CLOSE[dtype], (
        f"{where}: not the full embedding's output; tokens of other ranks, or of no rank, give zeros"
    )
    assert result.grad_error < CLOSE[dtype], f"{where}: the gradient of the local rows is not one process's"
    assert result.dtype == dtype, f"{where}: the output is {result.dtype}: keep the dtype of the rows"
    enough, forward = 2 * 33 * WIDTH * dtype.itemsize * (n - 1) // n, result.forward
    assert (forward.calls, forward.bytes) == (1, enough), (
        f"{where}: {forward.bytes} bytes in {counted(forward.calls, 'call')}; one all-reduce of {enough} is enough"
    )
    assert result.backward.calls == 0, f"{where}: backward has nothing to send"
    enough = dtype.itemsize * WIDTH * -(-vocab // n)
    assert result.retained <= enough, (
        f"{where}: the layer keeps {result.retained} bytes; its own rows, as a copy, are {enough} at most"
    )
    assert result.left == 0, f"{where}: call f* as self.output_reduce"
    enough = 33 * (2 * 8 + 2)  # two numbers and two bits of each token
    assert result.held <= enough, (
        f"{where}: {result.held} bytes are held for backward, {enough} are enough: which row each token has, and "
        "whether it is another rank's; no hidden states, and nothing of the vocabulary's size for each token"
    )
    assert dtype == torch.float32 or not result.large, (
        f"{where}: forward makes a tensor as large as the local rows: look rows up, no copy of the table, no matmul"
    )
