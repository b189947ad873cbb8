"""course_lib.pipeline.runner on four ranks against one process: every schedule, also with other axes. CPU, gloo."""

import contextlib
import dataclasses
import functools
import io
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from calls import Operations, peak_bytes, said, short_corpus
from course_lib.collectives.traffic import count_traffic
from course_lib.data_parallel.replicas import DataParallel, find_diverged_params
from course_lib.expert_parallel.mixture import apply_moe
from course_lib.expert_parallel.model import apply_expert_parallel
from course_lib.expert_parallel.router import routers_of
from course_lib.pipeline import tied_weights
from course_lib.pipeline.actions import validate
from course_lib.pipeline.norm import clip_grad_norm_, gradients_of
from course_lib.pipeline.program import main, options
from course_lib.pipeline.runner import PipelineRunner, Step, pipeline_ratio
from course_lib.pipeline.schedules import (
    SCHEDULES,
    dualpipe,
    interleaved,
    num_stages,
    one_f_one_b,
    schedule_by_name,
    zero_bubble_h1,
    zero_bubble_v,
)
from course_lib.pipeline.search import search
from course_lib.pipeline.stages import split_stages
from course_lib.pipeline.tied_weights import final_backwards, owner_ranks
from course_lib.pipeline.transfers import find_transfers
from course_lib.recompute.modes import IGNORED, accumulate, apply_recompute
from course_lib.sequence_parallel.model import apply_sequence_parallel
from course_lib.single_gpu import training as single_gpu
from course_lib.single_gpu.model import ModelConfig, Transformer, init_parameter, loss
from course_lib.tensor_parallel.linear import new_disjoint_subgroups
from course_lib.tensor_parallel.model import apply_tensor_parallel
from course_lib.tensor_parallel.shards import materialize
from course_lib.tensor_parallel.vocabulary import vocab_parallel_cross_entropy
from course_lib.zero.optimizer import ZeroOptimizer
from split_models import (
    MAX_NORM,
    OPTIMIZERS,
    STEPS,
    batches,
    group_of,
    meta_model,
    not_as,
    one_process,
    stored,
    whole_gradients,
    whole_model,
)

OF = ModelConfig(layers=6, hidden=16, heads=4, kv_heads=2, ffn_hidden=20, vocab=97)  # embedding, head: 8 stages
TIED = dataclasses.replace(OF, tied=True)
SEQ, EVEN = 5, 6
FULL = {"zb-h2": 8, "dualpipe": 8}  # micro-batches that 4 stages take to be busy at once; the others need 4
# (schedule, p, m, tied, recompute, targets that are ignored, optimizer); on two ranks there are two pipelines
WAYS = [
    ("naive", 4, 4, False, "none", "few", "SGD"),
    ("naive", 2, 3, True, "full", "few", "AdamW"),
    ("afab", 4, 5, True, "selective", "first third", "AdamW"),
    ("afab", 2, 4, False, "full", "few", "SGD"),
    ("1f1b", 4, 6, True, "none", "few", "AdamW"),
    ("1f1b", 4, 5, False, "full", "first third", "SGD"),
    ("1f1b", 2, 6, False, "selective", "few", "SGD"),
    ("1f1b", 2, 1, True, "none", "few", "SGD"),
    ("interleaved", 4, 8, True, "none", "few", "SGD"),
    ("interleaved", 2, 4, False, "full", "few", "AdamW"),
    ("interleaved", 2, 6, True, "none", "first third", "SGD"),
    ("breadth first", 4, 5, True, "none", "few", "SGD"),
    ("zb-h1", 4, 6, True, "full", "few", "SGD"),
    ("zb-h1", 2, 5, False, "none", "few", "AdamW"),
    ("zb-h2", 4, 8, False, "selective", "first third", "AdamW"),
    ("zb-h2", 2, 4, True, "none", "few", "SGD"),
    ("zb-v", 4, 8, True, "none", "few", "AdamW"),
    ("zb-v", 4, 4, False, "full", "few", "SGD"),
    ("zb-v", 2, 5, True, "selective", "first third", "SGD"),
    ("dualpipe", 4, 8, True, "none", "few", "SGD"),
    ("dualpipe", 4, 8, False, "full", "first third", "AdamW"),
    ("dualpipe", 2, 4, True, "none", "few", "AdamW"),
    ("dualpipe", 2, 6, False, "none", "few", "SGD"),
    ("search", 4, 4, True, "none", "few", "SGD"),
]


def schedule_of(name: str, p: int, m: int):
    if name == "search":
        return search(p, m, [1, 2, 3, 1], [2, 1, 1, 3], [1, 1, 2, 2])
    return interleaved(p, m, 2, run=m) if name == "breadth first" else schedule_by_name(name, p, m, 2)


def model_of(tied: bool, schedule) -> ModelConfig:
    """As deep as its stages need; of fewer than 8, some have more blocks than others."""
    layers = {2: 3, 4: 3, 8: 6}[num_stages(schedule)]
    return dataclasses.replace(OF, layers=layers, tied=tied)


class Notes(PipelineRunner):
    """Notes what is run, in order, and how many micro-batches are held at most."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.ran, self.held = [], 0

    def run(self, action, step) -> None:
        super().run(action, step)
        self.ran.append(action)
        self.held, self.last_step = max(self.held, len(step.passes)), step


def left_in(step: Step) -> list:
    return [*step.passes, *step.p2p.incoming, *step.p2p.outgoing]


def own_stages(stages: list, schedule, group) -> dict[int, nn.Module]:
    """Those of this rank alone, by number."""
    return {action.stage: stages[action.stage] for action in schedule[group.rank()]}


def by_name(runner: PipelineRunner, of: ModelConfig) -> dict[str, nn.Parameter]:
    """This rank's parameters by their names in the whole model; a tied one by its first."""
    named = {name: p for stage in runner.stages.values() for name, p in stage.named_parameters()}
    return {"embedding.weight" if of.tied and name == "head.weight" else name: p for name, p in named.items()}


def drifted(runner: PipelineRunner) -> list[str]:
    """Names of copies that are not alike to the bit. Collective over each copy's group."""
    return [
        "a copy has drifted"
        for p, group in runner.tied_weights.groups.items()
        if find_diverged_params(nn.ParameterList([p]), group)
    ]


def trained(runner, of: ModelConfig, optimizer: str, m: int, ignored: str) -> dict[str, torch.Tensor]:
    """3 clipped steps: losses, gradients, norms and weights, by name. Ranks without an end get no inputs or targets."""
    found, rank, schedule = {}, runner.group.rank(), runner.schedule
    stages = {action.stage for action in schedule[rank]}
    stepper = OPTIMIZERS[optimizer](list(runner.stages.parameters()))
    for step in range(STEPS):
        stepper.zero_grad()
        inputs, targets = batches(step, m, SEQ, ignored)
        part = runner.step(inputs if 0 in stages else None, targets if runner.last in stages else None)
        dist.all_reduce(part, group=runner.group)
        found[f"loss {step}"] = part
        found |= {f"gradient {step} {name}": p.grad.clone() for name, p in by_name(runner, of).items()}
        found[f"norm {step}"] = clip_grad_norm_(runner, MAX_NORM)
        stepper.step()
    return found | {f"weight {name}": p.detach() for name, p in by_name(runner, of).items()}


def of_one_process(ways: list[tuple]) -> list[dict]:
    """Once for all ranks. NumPy's arrays are pickled far sooner than tensors."""
    found = []
    for name, p, m, tied, _, ignored, optimizer in ways:
        of = model_of(tied, schedule_of(name, p, m))
        expected = one_process(of, optimizer, SEQ, m, ignored)
        found.append({name: tensor.numpy() for name, tensor in expected.items()})
    return found


def pipelines_differ(ways: list[tuple], of_all_expected: list[dict]) -> list[dict]:
    """On a rank, for each way: what differs from one process, which parameters it has, and what it noted."""
    of_all = []
    for (name, p, m, tied, recompute, ignored, optimizer), arrays in zip(ways, of_all_expected, strict=True):
        group, schedule = group_of(p), schedule_of(name, p, m)
        of, expected = model_of(tied, schedule), {name: torch.from_numpy(array) for name, array in arrays.items()}
        stages = split_stages(whole_model(of), num_stages(schedule))
        for stage in stages:
            apply_recompute(stage, recompute)
        runner = Notes(own_stages(stages, schedule, group), schedule, group)
        found = trained(runner, of, optimizer, m, ignored)
        actions = schedule[group.rank()]
        wrong = not_as(found, expected) + drifted(runner)
        wrong += ["another order"] * (runner.ran != STEPS * actions)
        wrong += [f"holds {runner.held}"] * (runner.held != validate(schedule)[group.rank()])
        wrong += ["something is left"] * bool(left_in(runner.last_step))
        missing = {"weight head.weight"} if tied else set()  # in a state_dict by both names
        of_all.append({"wrong": wrong, "names": sorted(found), "all": sorted(expected.keys() - missing)})
    return of_all


def test_every_schedule_trains_as_one_process(ranks):
    """Losses, gradients, norms and weights after 3 clipped steps, within 1e-5; in the order of the schedule, with as
    many micro-batches alive as validate says.
    """
    of_ranks = ranks(pipelines_differ, WAYS, of_one_process(WAYS))
    for number, way in enumerate(WAYS):
        assert [found[number]["wrong"] for found in of_ranks] == [[]] * 4, way
        for first in range(0, 4, way[1]):
            names = set().union(*(found[number]["names"] for found in of_ranks[first : first + way[1]]))
            assert sorted(names) == of_ranks[0][number]["all"], (way, "a parameter is on no rank")
    assert {way[0] for way in WAYS} >= {*SCHEDULES, "interleaved", "search"}


def in_bfloat16(names: list[str]) -> dict[str, list[str]]:
    """On a rank: what is not as in one process with autocast and the same micro-batches."""
    wrong = {}
    for name in names:
        m = FULL.get(name, 4)
        group, schedule = dist.group.WORLD, schedule_of(name, 4, m)
        of = model_of(True, schedule)
        model = whole_model(of)
        inputs, targets = batches(0, m, SEQ)
        expected = accumulate(model, list(zip(inputs.split(1), targets.split(1), strict=True)), torch.bfloat16)
        wanted = {name: p.grad.clone() for name, p in model.named_parameters()} | {"loss": expected}
        runner = PipelineRunner(split_stages(whole_model(of), num_stages(schedule)), schedule, group)
        part = runner.step(inputs, targets, torch.bfloat16)
        dist.all_reduce(part)
        found = {name: p.grad for name, p in by_name(runner, of).items()} | {"loss": part}
        wrong[name] = not_as(found, wanted, 0.02)
        wrong[name] += ["not in float32"] * any(each.dtype != torch.float32 for each in found.values())
        hidden = {dtype for _, dtype in next(iter(runner.shapes.values()))[1:]}
        wrong[name] += [f"{hidden} travel"] * (hidden != {torch.float32})  # the residual stream stays in float32
    return wrong


def test_autocast_to_bfloat16(ranks):
    """Within 2 % of the largest element of each gradient: 8 significant bits, the sums in another order."""
    for found in ranks(in_bfloat16, ["1f1b", "interleaved", "zb-v", "dualpipe"]):
        assert len(found) == 4 and not any(found.values()), found


# What is sent.


class Watched(PipelineRunner):
    """Counts, after each action, the passes that still have what they have sent."""

    keep = 0

    def run(self, action, step):
        super().run(action, step)
        self.keep += sum(done.out is not None for done in step.passes.values())


def sent(names: list[str]) -> dict[str, list]:
    """On a rank: of the first and the second step the bytes sent by collective; and of the second the order."""
    found, hidden = {}, torch.empty(2, SEQ, 16).nbytes
    for name in names:
        m = FULL.get(name, 4)
        schedule = schedule_of(name, 4, m)
        model = whole_model(model_of(False, schedule))
        runner = Watched(split_stages(model, num_stages(schedule)), schedule)
        logs = []
        for step in range(2):
            with count_traffic() as traffic:
                runner.step(*batches(step, 2 * m, SEQ))
            logs.append(traffic)
        first, second = ({r.collective for r in log.records} for log in logs)
        own = [t for _, _, t in find_transfers(schedule) if t.source == dist.get_rank()]
        records = logs[1].select("send").records
        found[name] = {
            "first": first,
            "second": second,
            "states": logs[1].select("send").bytes / hidden,
            "peers": [r.peer for r in records] == [t.target for t in own],
            "keep": runner.keep,
        }
    return found


def test_a_step_sends_hidden_states_and_nothing_else(ranks):
    """2 (p - 1) m of them, 2 (p v - 1) m; where a V turns none. Shapes are agreed on in the first step alone. No
    pass keeps its output until its backward.
    """
    boundaries = {"afab": 3, "1f1b": 3, "zb-h1": 3, "zb-h2": 3, "interleaved": 7, "breadth first": 7, "zb-v": 6}
    boundaries |= {"dualpipe": 3}
    of_ranks = ranks(sent, list(boundaries))
    for name, count in boundaries.items():
        found = [each[name] for each in of_ranks]
        assert sum(each["states"] for each in found) == 2 * count * FULL.get(name, 4), name
        assert all(each["peers"] for each in found), name
        assert not any(each["keep"] for each in found), name
        copies = {"all_reduce"} if name == "dualpipe" else set()
        for each in found:
            assert each["second"] == {"send", "recv"} | copies, (name, each)
            assert "broadcast" in each["first"]


# With data parallelism.


def dp_groups():
    """On one of 2 x 2 ranks: the pipeline's, and the one over which gradients are averaged."""
    lists = torch.arange(4).view(2, 2)
    return [dist.new_subgroups_by_enumeration(each.tolist())[0] for each in (lists, lists.t())]


def sums_of(traffic) -> list:
    """The records of sums over ranks; none where nothing is counted."""
    return [r for r in traffic.records if r.collective in ("all_reduce", "reduce_scatter")] if traffic else []


def in_replicas(ways: list[tuple]) -> list[dict]:
    """On a rank: what differs from one process, and how many sums over dp a step has."""
    of_all = []
    for name, m, tied, zero, recompute in ways:
        schedule, (group, dp_group) = schedule_of(name, 2, m), dp_groups()
        of = dataclasses.replace(OF, layers={2: 3, 4: 6}[num_stages(schedule)], tied=tied)  # a block in each stage
        stages = split_stages(whole_model(of), num_stages(schedule))
        for stage in stages:
            apply_recompute(stage, recompute)
        runner = PipelineRunner(own_stages(stages, schedule, group), schedule, group, dp_group=dp_group)
        if zero:
            options = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1}
            stepper = wrapped = ZeroOptimizer(runner.stages, torch.optim.SGD, dp_group, bucket_mb=0.002, **options)
        else:
            wrapped = DataParallel(runner.stages, dp_group, bucket_mb=0.002)
            stepper = OPTIMIZERS["SGD"](list(runner.stages.parameters()))
        found, counts = {}, []
        for step in range(STEPS):
            stepper.zero_grad()
            inputs, targets = batches(step, 2 * m, SEQ)
            tokens = (targets != IGNORED).sum() / 2
            mine = [each.chunk(2)[dp_group.rank()] for each in (inputs, targets)]
            with count_traffic() if step else contextlib.nullcontext() as traffic:  # counting takes a third of a step
                part = runner.step(*mine, tokens=tokens, no_sync=wrapped.no_sync)
                before = len(sums_of(traffic))
                wrapped.finish()
            if step:
                buckets = wrapped.gradients if zero else wrapped.reducer.buckets
                sums = sums_of(traffic)
                counts.append((len(sums), len(buckets), before, sum(r.bytes for r in sums)))
            dist.all_reduce(part)
            found[f"loss {step}"] = part / 2
            if not zero:
                found |= {f"gradient {step} {n}": p.grad.clone() for n, p in by_name(runner, of).items()}
                found[f"norm {step}"] = clip_grad_norm_(runner, 1e9)
            stepper.step()
        if zero:
            stepper.wait()
        found |= {f"weight {n}": p.detach() for n, p in by_name(runner, of).items()}
        of_all.append({"wrong": not_as(found, unclipped(of, 2 * m)) + drifted(runner), "counts": counts})
    return of_all


@functools.cache
def unclipped(of: ModelConfig, batch: int) -> dict[str, torch.Tensor]:
    """As split_models.one_process, where the norm is measured and nothing clipped."""
    with mock.patch("split_models.MAX_NORM", 1e9):
        return one_process.__wrapped__(of, "SGD", SEQ, batch)


DP_WAYS = [
    ("1f1b", 4, True, False, "none"),
    ("interleaved", 4, False, False, "full"),
    ("zb-h2", 4, True, False, "none"),
    ("zb-v", 4, True, False, "none"),
    ("dualpipe", 4, True, False, "none"),
    ("1f1b", 4, True, True, "none"),
    ("interleaved", 4, True, True, "none"),
    ("zb-v", 4, True, True, "full"),
    ("dualpipe", 4, True, True, "none"),
    ("dualpipe", 4, False, True, "none"),
]


def test_with_data_parallelism_and_zero(ranks):
    """As one process, tied embeddings and DualPipe's copies too; each bucket is summed once a step, and some before the
    last backward has ended (where the last layers' gradients, which go first, are not among the last ones).
    """
    of_ranks = ranks(in_replicas, DP_WAYS)
    for number, way in enumerate(DP_WAYS):
        for rank, found in enumerate(each[number] for each in of_ranks):
            assert found["wrong"] == [], (way, rank)
            for sums, buckets, before, _ in found["counts"]:
                assert sums == buckets > 2, (way, rank, found["counts"])
                assert before > 0 or way[0] in ("zb-v", "dualpipe"), (way, rank, "all sums wait for finish()")


# With tensor parallelism, and with mixtures.


def with_tensor_parallelism(ways: list[tuple]) -> list[list[str]]:
    """On one of 2 x 2 ranks: what differs from one process in 3 steps; matrices are split over two neighbours."""
    wrong = []
    for name, m, tied, recompute, kv_heads, sequence in ways:
        schedule = schedule_of(name, 2, m)
        of = dataclasses.replace(model_of(tied, schedule), kv_heads=kv_heads)
        tp, group = dp_groups()
        model = apply_tensor_parallel(whole_model(of), tp)
        if sequence:
            apply_sequence_parallel(model, tp)
        stages = split_stages(model, num_stages(schedule))
        for stage in stages:
            apply_recompute(stage, recompute)

        def loss_of(logits, targets, tp=tp):
            return vocab_parallel_cross_entropy(logits, targets, tp, 97, "sum")

        runner = PipelineRunner(own_stages(stages, schedule, group), schedule, group, loss_of)
        stepper, found = OPTIMIZERS["SGD"](list(runner.stages.parameters())), {}
        for step in range(STEPS):
            stepper.zero_grad()
            part = runner.step(*batches(step, m, EVEN), positions=torch.arange(EVEN) if sequence else None)
            dist.all_reduce(part, group=group)
            found[f"loss {step}"] = part
            for stage in runner.stages.values():
                found |= {f"gradient {step} {name}": whole for name, whole in whole_gradients(stage).items()}
            found[f"norm {step}"] = clip_grad_norm_(runner, MAX_NORM)
            stepper.step()
        found = {name.replace("head", "embedding") if tied else name: each for name, each in found.items()}
        wrong.append(not_as(found, one_process(of, "SGD", EVEN, m)) + drifted(runner))
    return wrong


def test_with_tensor_parallelism(ranks):
    """2 x 2 ranks, every layer's matrices split, the sequence too, K/V heads in copies, some backwards in halves."""
    ways = [
        ("1f1b", 4, True, "none", 2, True),
        ("zb-h1", 4, False, "full", 2, False),
        ("zb-v", 4, True, "none", 1, False),
    ]
    ways += [("dualpipe", 4, True, "none", 2, False), ("interleaved", 4, False, "selective", 2, False)]
    ways += [("zb-h1", 4, False, "none", 1, True), ("zb-v", 4, False, "none", 2, True)]  # W communicates
    for found in ranks(with_tensor_parallelism, ways):
        assert found == [[]] * len(ways)


MIXTURE = (("experts", 4), ("top_k", 2), ("ffn_hidden", 16), ("aux_loss_coeff", 0.3), ("z_loss_coeff", 0.02))


def with_a_mixture(names: list[str]) -> list[list[str]]:
    """On a rank: what differs from one process with the same micro-batches; the balance loss is of each of them."""
    wrong = []
    for name in names:
        m = FULL.get(name, 4)
        schedule = schedule_of(name, 4, m)
        model = whole_model(model_of(False, schedule), MIXTURE)
        for router in routers_of(model):
            router.loss_weight = 1 / m
        stages = split_stages(model, num_stages(schedule))
        inputs, targets = batches(0, m, SEQ)
        parts = zip(inputs.split(1), targets.split(1), strict=True)
        wanted = {"loss": accumulate(model, parts)} | {n: p.grad for n, p in model.named_parameters()}
        for p in model.parameters():
            p.grad = None
        runner = PipelineRunner(stages, schedule)
        part = runner.step(inputs, targets)
        dist.all_reduce(part)
        wrong.append(not_as({n: p.grad for n, p in by_name(runner, OF).items()} | {"loss": part}, wanted))
    return wrong


def test_with_a_mixture_of_experts(ranks):
    names = ["1f1b", "interleaved", "zb-h2", "zb-v", "dualpipe"]
    for found in ranks(with_a_mixture, names):
        assert found == [[]] * len(names)


# What a rank holds, and copies.


def built() -> dict[str, object]:
    """On a rank: the peak of building its stages from a model on the meta device, and what it keeps."""
    of = ModelConfig(layers=14, hidden=48, heads=4, kv_heads=2, ffn_hidden=60, vocab=31)
    schedule, kept = zero_bubble_v(4, 4), []

    def build() -> None:
        own = own_stages(split_stages(meta_model(of), 8), schedule, dist.group.WORLD)
        fill = functools.partial(init_parameter, config=of)
        kept.append(materialize(nn.ModuleList(own.values()), lambda name, p: fill(name.split(".", 1)[1], p)))
        kept.append(PipelineRunner(own, schedule))

    peak = peak_bytes(build)
    whole, wrong = dict(Transformer(of).named_parameters()), []
    for name, p in by_name(kept[1], of).items():
        wrong += [name] * (not torch.equal(p, whole[name]))
    return {"wrong": wrong, "peak": peak, "own": stored(kept[0].parameters()), "whole": stored(whole.values())}


def test_no_rank_ever_holds_the_whole_model(ranks):
    """A quarter of it each, with the values that it has in one process."""
    of_ranks = ranks(built)
    for found in of_ranks:
        assert found["wrong"] == []
        assert found["own"] <= found["peak"] <= found["own"] + 20_000 < found["whole"] / 2, found
    assert sum(found["own"] for found in of_ranks) == of_ranks[0]["whole"]


def copies() -> dict[str, object]:
    """On a rank that begins with weights of its own: what its copies are afterwards, and its norm."""
    schedule, model = dualpipe(4, 8), whole_model(TIED)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(dist.get_rank())
    before = {name: p.clone() for name, p in model.named_parameters()}
    splits = []  # the lists of ranks of which groups are made
    noted = lambda lists: splits.append(lists) or new_disjoint_subgroups(lists)  # noqa: E731
    with mock.patch.object(tied_weights, "new_disjoint_subgroups", noted):
        runner = PipelineRunner(split_stages(model, 4), schedule)
    near = min(dist.get_rank(), 3 - dist.get_rank())
    named = by_name(runner, TIED)
    moved = {n: (p - before[n]).mean().item() + dist.get_rank() for n, p in named.items()}
    ranks_of = {n: runner.tied_weights.owner_ranks[p] for n, p in named.items()}
    return {"near": near, "first": moved, "owner_ranks": ranks_of, "drifted": drifted(runner), "splits": splits}


def test_copies_begin_with_the_values_of_the_first_rank_that_has_them(ranks):
    for found in ranks(copies):
        assert found["drifted"] == []
        assert found["splits"] == [[(0, 3), (1, 2)]], "groups that do not overlap are one split of the communicator"
        for name, first in found["first"].items():
            assert first == pytest.approx(found["near"], abs=1e-5), name
            assert found["owner_ranks"][name] == (found["near"], 3 - found["near"])


def test_holders_and_final_backwards():
    assert owner_ranks(one_f_one_b(4, 4), (0, 3)) == (0, 3)
    assert owner_ranks(zero_bubble_v(4, 4), (0, 7)) == (0,), "the V's first and last stage are on one rank"
    assert owner_ranks(dualpipe(4, 8), (1,)) == (1, 2)
    for schedule in (one_f_one_b(2, 4), zero_bubble_h1(2, 4), interleaved(2, 4, 2), zero_bubble_v(2, 4)):
        for of in (OF, TIED):
            stages = split_stages(Transformer(of), num_stages(schedule))
            for actions in schedule:
                own = nn.ModuleDict({str(a.stage): stages[a.stage] for a in actions})
                found = final_backwards(own, actions)
                whole = [i for i, a in enumerate(actions) if a.kind in "BW"]
                last = {s: max(i for i in whole if actions[i].stage == s) for s in {a.stage for a in actions}}
                shared = of.tied and {0, num_stages(schedule) - 1} <= last.keys()
                first_of_shared = min(last[0], last[num_stages(schedule) - 1]) if shared else None
                assert found == set(last.values()) - {first_of_shared}, schedule


def clipped() -> list[float]:
    """On a rank: norms of a large and a small limit, and that of the gradients afterwards."""
    runner = PipelineRunner(split_stages(whole_model(TIED), 4), one_f_one_b(4, 4))
    runner.step(*batches(0, 4, SEQ))
    return [clip_grad_norm_(runner, limit).item() for limit in (1e9, 0.01, 1e9)]


def test_clipping_is_of_all_stages_together(ranks):
    model, (inputs, targets) = whole_model(TIED), batches(0, 4, SEQ)
    loss(model(inputs), targets).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    for found in ranks(clipped):
        assert found == pytest.approx([norm, norm, 0.01], rel=1e-4)


def operations_of_clipping(layers: int) -> tuple[int, int]:
    """On a rank: how many operations it takes to clip a stage's gradients, and how many of these there are."""
    runner = PipelineRunner(split_stages(whole_model(dataclasses.replace(TIED, layers=layers)), 4), one_f_one_b(4, 4))
    runner.step(*batches(0, 4, SEQ))
    with Operations() as operations:
        clip_grad_norm_(runner, 0.01)
    return operations.count.total(), len(gradients_of(runner))


def test_clipping_takes_as_few_launches_for_many_gradients_as_for_few(ranks):
    few, many = (ranks(operations_of_clipping, layers) for layers in (4, 12))
    for (launches, gradients), (as_many, more) in zip(few, many, strict=True):
        assert more > gradients + 10 and launches == as_many < 16, (launches, as_many)


def other_batches() -> dict[str, object]:
    """On a rank: of batches of several sizes, one after the other, whether the losses are those of one process; of two
    steps whether gradients add up; and of targets of which none counts.
    """
    runner, model = PipelineRunner(split_stages(whole_model(OF), 4), one_f_one_b(4, 2)), whole_model(OF)
    wrong = []
    for batch, seq in ((2, 5), (6, 3), (2, 5), (4, 9)):
        inputs, targets = batches(0, batch, seq)
        part = runner.step(inputs, targets)
        dist.all_reduce(part)
        expected = loss(model(inputs), targets)
        expected.backward()
        wrong += not_as({"loss": part}, {"loss": expected})
    named = dict(model.named_parameters())
    wrong += not_as({n: p.grad for n, p in by_name(runner, OF).items()}, {n: p.grad for n, p in named.items()})
    wrong += [f"{len(runner.shapes)} shapes"] * (len(runner.shapes) != 3)
    for p in runner.stages.parameters():
        p.grad = None
    runner.use(one_f_one_b(4, 4))  # a batch of the shape that it knows, in smaller micro-batches
    part = runner.step(inputs, torch.full_like(targets, IGNORED))
    wrong += ["not 0"] * any(p.grad.any().item() for p in runner.stages.parameters()) + ["loss"] * (part.item() != 0)
    return wrong


def test_batches_of_several_sizes_one_after_the_other(ranks):
    assert ranks(other_batches) == [[]] * 4


def added_up(names: list[str]) -> list[list[str]]:
    """On a rank: after two steps without zero_grad, and with a frozen norm, what differs from twice one process's."""
    wrong = []
    for name in names:
        model, schedule = whole_model(TIED), schedule_of(name, 4, 8)
        inputs, targets = batches(0, 8, SEQ)
        (2 * loss(model(inputs), targets)).backward()
        wanted = {n: p.grad for n, p in model.named_parameters()}
        runner = PipelineRunner(split_stages(whole_model(TIED), num_stages(schedule)), schedule)
        frozen = [
            p for stage in runner.stages.values() for n, p in stage.named_parameters() if n.endswith("mlp_norm.weight")
        ]
        for p in frozen:
            p.requires_grad_(False)
        runner = PipelineRunner({int(s): stage for s, stage in runner.stages.items()}, schedule)
        for _ in range(2):
            runner.step(inputs, targets)
        found = {n: p.grad for n, p in by_name(runner, TIED).items() if p.requires_grad}
        wrong.append(not_as(found, wanted) + ["frozen"] * any(p.grad is not None for p in frozen))
    return wrong


def test_gradients_of_two_steps_add_up_and_what_is_frozen_has_none(ranks):
    names = ["1f1b", "zb-v", "dualpipe"]
    for found in ranks(added_up, names):
        assert found == [[]] * len(names)


def clipped_by_parts() -> list[float]:
    """On a rank: the norms where some stages have experts, spread over two ranks, and some have none."""
    ep, group = dp_groups()
    with torch.device("meta"):
        model = apply_moe(Transformer(OF), **dict(MIXTURE))
    for block in list(model.blocks)[:3]:  # the first stage is dense
        block.mlp = Transformer(OF).blocks[0].mlp.to("meta")
    apply_expert_parallel(model, ep)
    stages = split_stages(model, 2)
    own = own_stages(stages, one_f_one_b(2, 2), group)
    materialize(nn.ModuleList(own.values()), lambda name, tensor: nn.init.normal_(tensor, std=0.1))
    runner = PipelineRunner(own, one_f_one_b(2, 2), group)
    inputs, targets = batches(0, 4, SEQ)
    runner.step(*(each.chunk(2)[ep.rank()] for each in (inputs, targets)))
    return [clip_grad_norm_(runner, limit).item() for limit in (1e9, 0.01, 1e9)]


def test_stages_of_several_kinds_are_clipped_together(ranks):
    found = ranks(clipped_by_parts)
    assert all(norms[0] > 0 and norms[1] == norms[0] and norms[2] == pytest.approx(0.01, rel=1e-4) for norms in found)
    assert found[0] == found[2] and found[1] == found[3], "the two ranks of a pipeline agree"


# Mistakes.


def replaced(runner: PipelineRunner) -> PipelineRunner:
    """The runner, its stages' weights being new ones."""
    for stage in runner.stages.values():
        stage.load_state_dict({name: tensor.clone() for name, tensor in stage.state_dict().items()}, assign=True)
    return runner


def refused() -> dict[str, str]:
    """On a rank: what is said of things that do not fit."""
    stages, schedule = split_stages(whole_model(OF), 4), one_f_one_b(4, 4)
    rank, pair = dist.get_rank(), group_of(2)
    wrong = [list(actions) for actions in schedule]
    wrong[1].pop()
    runner = PipelineRunner(stages, schedule)
    return {
        "group": said(lambda: PipelineRunner(stages, schedule, pair)),
        "schedule": said(lambda: PipelineRunner(stages, wrong)),
        "missing": said(lambda: PipelineRunner({5: stages[0]}, schedule)),
        "too few": said(lambda: PipelineRunner(stages[:rank], schedule)),
        "meta": said(lambda: PipelineRunner(split_stages(meta_model(OF), 4), schedule)),
        "batch": said(lambda: runner.step(*batches(0, 6, SEQ))),
        "targets": said(lambda: runner.step(batches(0, 4, SEQ)[0], batches(0, 5, SEQ)[1])),
        "no gradients": said(lambda: torch.no_grad()(runner.step)(*batches(0, 4, SEQ))),
        "replaced": said(lambda: replaced(runner).step(*batches(0, 4, SEQ))),
    }


def test_mistakes_are_told_in_one_line(ranks):
    for rank, found in enumerate(ranks(refused)):
        assert found == {
            "group": "ValueError: the schedule is for 4 ranks, the group has 2",
            "schedule": "ValueError: stage 1, micro-batch 3 of 4: has F, not F and B, or F, I and W",
            "missing": f"ValueError: rank {rank} of the pipeline has no stage {rank}: it has [5]",
            "too few": f"ValueError: rank {rank} of the pipeline has no stage {rank}: it has {list(range(rank))}",
            "meta": f"ValueError: stage {rank} is on the meta device: materialize the stages that this rank has",
            "batch": "ValueError: a batch of 6 sequences does not divide into 4 equal micro-batches",
            "targets": "ValueError: a batch of 5 sequences does not divide into 4 equal micro-batches",
            "no gradients": "RuntimeError: a step makes gradients: call it outside of torch.no_grad()",
            "replaced": "RuntimeError: weights have been replaced (assign=True, materialize): create the "
            "PipelineRunner afterward",
        }


def test_pipeline_ratio():
    """By hand: a hidden state of h numbers over 2 FLOPs for each of 16 h² weights a layer, for each token."""
    hidden, layers, bandwidth, peak = 4096, 4, 50e9, 1e15
    sent_s, computed_s = 2 * hidden / bandwidth, 2 * 16 * hidden**2 * layers / peak
    assert pipeline_ratio(hidden, layers, bandwidth, peak) == pytest.approx(sent_s / computed_s)
    assert pipeline_ratio(hidden, layers, bandwidth, peak, 4) == pytest.approx(2 * sent_s / computed_s)


# The program.


ARGUMENTS = ["--preset", "debug", "--steps", "2", "--seq", "16", "--batch", "8", "--dtype", "fp32"]


def losses(argv: list[str]) -> list[float]:
    with short_corpus():
        return [record["loss"] for record in main(argv)]


def all_losses(argvs: list[list[str]]) -> list[list[float]]:
    with contextlib.redirect_stdout(io.StringIO()):
        return [losses(argv) for argv in argvs]


def test_main_trains_as_one_process_with_each_schedule(ranks):
    """The same global batch; tied embeddings; four stages of the debug preset are all that it has."""
    ways = [["--schedule", name] for name in ("1f1b", "afab", "zb-h1", "dualpipe")]
    ways += [["--schedule", "zb-h2", "--recompute", "full", "--micro-batches", "4"]]
    pairs = [["--batch", "4", "--pp", "2", "--schedule", name] for name in ("naive", "interleaved", "zb-v", "dualpipe")]
    with short_corpus():
        expected = [record["loss"] for record in single_gpu.run(options(ARGUMENTS))]
    assert expected[-1] != expected[0]  # whether two steps help depends on the text that is found on a machine
    for found in ranks(all_losses, [[*ARGUMENTS, *way] for way in ways + pairs]):
        for way, ours in zip(ways + pairs, found, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0, msg=lambda m: f"{way}: {m}")


def test_main_trains(ranks):
    """Eight steps in bfloat16: the loss falls; rank 0 alone prints a line a step."""
    argv = [*ARGUMENTS, "--steps", "8", "--dtype", "bf16", "--schedule", "zb-h1", "--lr", "0.01"]
    for found in ranks(all_losses, [argv]):
        assert found[0][-1] < 0.9 * found[0][0]
    first, *others = ranks(written, argv)
    assert len([line for line in first.splitlines() if line.startswith("step ")]) == 8 and not any(others)


def written(argv: list[str]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        losses(argv)
    return printed.getvalue()


def impossible(argv: list[str]) -> str:
    return said(lambda: losses([*ARGUMENTS, *argv]))


def test_main_says_in_one_line_what_it_cannot_do(ranks, capsys):
    for argv, expected in (
        (["--pp", "3"], "ValueError: --pp 3 does not divide the 4 ranks"),
        (["--schedule", "zb-v"], "ValueError: 2 layers, an embedding and a head do not fill 8 stages"),
        (["--schedule", "dualpipe", "--micro-batches", "4"], "ValueError: dualpipe: p = 4 and m = 4 must be even"),
    ):
        assert all(found.startswith(expected) for found in ranks(impossible, argv)), (argv, ranks(impossible, argv))
    for argv in (
        ["--schedule", "pipedream"],
        ["--micro-batches", "3"],
        ["--micro-batches", "0"],
        ["--pp", "2", "--schedule", "dualpipe", "--micro-batches", "2"],
        ["--pp", "4", "--schedule", "interleaved"],
        ["--pp", "2", "--schedule", "interleaved", "--run", "3"],
        ["--pp", "0"],
        ["--pp", "5"],
        ["--virtual", "0", "--pp", "2", "--schedule", "interleaved"],
        ["--recompute", "matmuls"],
    ):
        with pytest.raises(SystemExit) as stopped:
            options([*ARGUMENTS, *argv])
        assert stopped.value.code == 2, argv
        assert "error: " in capsys.readouterr().err.splitlines()[-1]
