"""`evaluate` gives one number in every layout, for 7 sequences, which no layout divides evenly; and a training with an
evaluation between its steps is the same, bit for bit. On 1, 2 and 4 ranks, CPU, gloo.
"""

import dataclasses
import functools
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from course_lib.expert_parallel.mixture import apply_moe
from course_lib.expert_parallel.router import routers_of
from course_lib.five_d.layouts import Layout, schedule_of
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import full_weights, parallelize
from course_lib.pipeline.actions import validate
from course_lib.recompute.modes import IGNORED
from course_lib.single_gpu.model import ModelConfig, Transformer, init_parameter
from course_lib.train.evaluation import eval_mode, evaluate, schedule_for
from course_lib.train.loss import apply_chunked_loss

OF = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=44, vocab=97, tied=True)
MOE = {"experts": 4, "top_k": 2, "ffn_hidden": 12, "shared": 1, "aux_loss_coeff": 0.02, "z_loss_coeff": 0.01}
SEQ = 16
WORDS = {
    2: ["dp2", "dp2,zero1", "dp2,zero2,mb2", "dp2,zero3", "tp2", "tp2,sp,full", "cp2,zigzag", "cp2,ulysses,contiguous"]
    + ["pp2", "pp2,zb-v,mb2", "pp2,dualpipe", "pp2,interleaved,zero1", "dp2,ep2,zero2"],
    4: ["dp2,pp2,zero3,keep", "dp2,tp2,sp,zero3", "pp2,cp2,afab", "dp4,zero3,rep2,mb3", "dp2,ep2,tp2,sp", "pp4,zb-h2"],
}
STATES = [("dp2", "bfloat16"), ("dp2,zero3", "float32"), ("pp2,zb-h1", "bfloat16"), ("dp2,zero1", "float32")]


@dataclasses.dataclass
class Held:
    """Held-out sequences; positions: whether each row has its own, as packed documents have."""

    count: int
    positions: bool = False

    def sequences(self, first: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        tokens = torch.randint(97, (self.count, SEQ + 1), generator=torch.Generator().manual_seed(9))
        inputs, targets = torch.zeros(n, SEQ, dtype=torch.long), torch.full((n, SEQ), IGNORED)
        rows = tokens[first : first + n]
        inputs[: len(rows)], targets[: len(rows)] = rows[:, :-1], rows[:, 1:]
        targets[:, ::5] = IGNORED
        numbers = torch.arange(first, first + n)[:, None]
        positions = (torch.arange(SEQ) + 3 * numbers) % 11 if self.positions else None
        return inputs, targets, positions


def larger(name: str, parameter: torch.Tensor, config: ModelConfig, seed: int = 0) -> None:
    """init_parameter, with matrices with which attention and experts change the loss."""
    init_parameter(name, parameter, config, seed)
    with torch.no_grad():
        parameter.mul_(4 if parameter.dim() > 1 else 1)


@functools.cache
def one_process(moe: bool) -> float:
    """The mean loss of the initial model, without any of the code under test."""
    model = Transformer(OF)
    if moe:
        apply_moe(model, **MOE)
    for name, parameter in model.named_parameters():
        larger(name, parameter, OF)
    inputs, targets, _ = Held(7).sequences(0, 7)
    return F.cross_entropy(model(inputs).double().flatten(0, 1), targets.flatten()).item()


def parallel_of(word: str, dtype: str = "float32", chunked: bool = True, dropout: float = 0.0):
    layout = Layout.parse(word)
    config = dataclasses.replace(OF, layers=6 if layout.pp == 4 else 2, dropout=dropout)
    extra, moe = [apply_chunked_loss] * chunked, MOE if layout.ep > 1 else None
    with mock.patch("course_lib.five_d.model.init_parameter", larger):
        return parallelize(config, layout, build_mesh(layout), extra, moe=moe, dtype=getattr(torch, dtype), lr=1e-2)


def evaluated(words: list[str]) -> list[tuple[float, float, float, float]]:
    """On a rank, by layout: the loss by the chunked loss, with positions, by stored logits, and with one sequence."""
    results = []
    for word in words:
        parallel = parallel_of(word)
        found = [evaluate(parallel, each).item() for each in (Held(7), Held(7, True), Held(1))]
        results.append((found[0], evaluate(parallel_of(word, chunked=False), Held(7)).item(), *found[1:]))
    return results


def check(of_ranks: list[list[tuple]], words: list[str]) -> None:
    assert all(results == of_ranks[0] for results in of_ranks)
    dense, deeper, experts = [], [], []
    for word, results in zip(words, of_ranks[0], strict=True):
        layout = Layout.parse(word)
        kind = deeper if layout.pp == 4 else experts if layout.ep > 1 else dense
        kind.append(results)
        assert abs(results[0] / results[1] - 1) < 1e-6, word
        if kind is not deeper:
            assert abs(results[0] / one_process(layout.ep > 1) - 1) < 1e-6, word
    for kind in (dense, experts):
        for results in kind:
            assert all(abs(a / b - 1) < 1e-6 for a, b in zip(results, kind[0], strict=True)), (words, kind)


def test_two_ranks(two):
    check(two(evaluated, WORDS[2]), WORDS[2])


def test_four_ranks(ranks):
    check(ranks(evaluated, WORDS[4]), WORDS[4])


def train(parallel, evaluates: bool) -> dict[str, torch.Tensor]:
    """On a rank: losses, norms and weights of three steps, with an evaluation before and after each, or without."""
    result, mesh = {}, parallel.mesh
    torch.manual_seed(mesh.dp.rank())
    for step in range(3):
        if evaluates:
            evaluate(parallel, Held(7 + step))
        tokens = torch.randint(97, (8, SEQ + 1), generator=torch.Generator().manual_seed(step))
        local = tokens.chunk(parallel.layout.dp)[mesh.dp.rank()]
        result[f"loss {step}"], result[f"norm {step}"] = parallel.step(local[:, :-1], local[:, 1:])
        counts = [router.counts for router in routers_of(parallel.stages)]
        if evaluates:
            before = [parameter.grad for parameter in parallel.stages.parameters()]
            evaluate(parallel, Held(5))
            after = [parameter.grad for parameter in parallel.stages.parameters()]
            assert all(a is b for a, b in zip(before, after, strict=True)), "the gradients have changed"
        result |= {f"count {step} {i}": each for i, each in enumerate(counts)}
    assert all(module.training for module in parallel.stages.modules())
    return {name: each.clone() for name, each in (result | full_weights(parallel)).items()} | {"rng": torch.rand(3)}


def interfered(cases: list[tuple[str, str]]) -> dict[str, list[str]]:
    """On a rank: what an evaluation changes in the training, by layout."""
    changed = {}
    for word, dtype in cases:
        dropout = 0.0 if "tp" in word else 0.1
        plain, other = (train(parallel_of(word, dtype, dropout=dropout), each) for each in (False, True))
        assert plain.keys() == other.keys()
        changed[f"{word} {dtype}"] = [name for name in plain if not torch.equal(plain[name], other[name])]
    return changed


def test_training_does_not_change_on_two_ranks(two):
    for changed in two(interfered, STATES):
        assert not any(changed.values()), changed


def test_training_does_not_change_on_four_ranks(ranks):
    cases = [("dp2,pp2,zero3,keep", "float32"), ("dp2,pp2,zero3,keep,zb-v", "bfloat16"), ("dp2,ep2,tp2,sp", "float32")]
    for changed in ranks(interfered, [*cases, ("dp4,zero3", "bfloat16")]):
        assert not any(changed.values()), changed


def test_schedules_hold_the_sequences_with_few_micro_batches():
    """(sequences of a dp rank, a training step's micro-batches) to the micro-batches at a time."""
    cases = {"dp1": {(1, 8): 1, (20, 8): 8}, "pp2,mb2": {(7, 8): 4, (40, 8): 8}, "pp2,interleaved": {(3, 8): 4}}
    cases |= {"pp2,dualpipe": {(1, 12): 4, (7, 12): 8, (30, 12): 12}, "pp4,zb-v": {(3, 8): 3}}
    for word, of_sizes in cases.items():
        layout = Layout.parse(word)
        for sizes, expected in of_sizes.items():
            schedule = schedule_for(layout, *sizes)
            validate(schedule, expected)
            assert schedule == schedule_of(layout, expected), (word, sizes)


def test_eval_mode_restores_each_module():
    model = nn.Sequential(nn.Dropout(), nn.Linear(2, 2), nn.Dropout())
    model[0].eval()
    with eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model] == [False, True, True] and model.training
