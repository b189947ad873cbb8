"""course_lib.five_d with a dtype of 16 bits on 4 ranks: one set of numbers whatever the ZeRO stage, one cast of a
weight a step, hidden states in 16 bits on their way, and gradients in 32. CPU, gloo.
"""

import contextlib
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from course_kit.checks.watchers import NoHostReads
from course_lib.collectives.traffic import count_traffic
from course_lib.five_d.gather_once import GatherOncePerStep
from course_lib.five_d.layouts import Layout
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import full_weights, parallelize
from course_lib.single_gpu.model import ModelConfig, init_parameter

OF = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=44, vocab=97, tied=True)
MOE = {"experts": 4, "top_k": 2, "ffn_hidden": 12, "aux_loss_coeff": 0.02}
SEQ, SEQUENCES, STEPS = 16, 8, 2
ADAM = {"lr": 1e-3, "eps": 1e-4}  # a gradient's rounding error must not become a whole step


def parallel_of(words: str, moe: bool = False, **more):
    layout = Layout.parse(words)
    return parallelize(OF, layout, build_mesh(layout), moe=MOE if moe else None, dtype=torch.bfloat16, **ADAM, **more)


def local_batch(parallel, step: int) -> list[torch.Tensor]:
    """What this rank's dp place has of a step's inputs and targets."""
    tokens = torch.randint(97, (SEQUENCES, SEQ + 1), generator=torch.Generator().manual_seed(step))
    return [each.chunk(parallel.layout.dp)[parallel.mesh.dp.rank()] for each in (tokens[:, :-1], tokens[:, 1:])]


# Layouts that differ in their ZeRO stage alone: the same products on the same ranks.
ALIKE = [
    ("dp4", "dp4,zero1", "dp4,zero2", "dp4,zero3"),
    ("dp2,pp2", "dp2,pp2,zero1", "dp2,pp2,zero3,keep", "dp2,pp2,zb-h1", "dp2,pp2,zb-v,zero3,keep"),
    ("dp2,cp2,full", "dp2,cp2,full,zero1", "dp2,cp2,full,zero3"),
    ("dp2,tp2,sp", "dp2,tp2,sp,zero2", "dp2,tp2,sp,zero3"),
    ("dp2,tp2,ep2,sp", "dp2,tp2,ep2,sp,zero1", "dp2,tp2,ep2,sp,zero3"),
]


def numbers() -> dict[str, list[float]]:
    """On a rank: of each layout the losses and norms of its steps."""
    found = {}
    for words in (each for alike in ALIKE for each in alike):
        parallel = parallel_of(words, moe="ep2" in words)
        found[words] = [x.item() for step in range(STEPS) for x in parallel.step(*local_batch(parallel, step), 0.5)]
    return found


def test_the_zero_stage_does_not_change_the_numbers(ranks):
    """The first step differs in the order of float32 sums alone; then a weight here and there is rounded otherwise."""
    for of_rank in ranks(numbers):
        for plain, *others in ALIKE:
            for words in others:
                (loss, norm, *later), (its_loss, its_norm, *its_later) = of_rank[plain], of_rank[words]
                assert math.isclose(its_loss, loss, rel_tol=1e-6) and math.isclose(its_norm, norm, rel_tol=2e-4), words
                assert all(map(lambda a, b: math.isclose(a, b, rel_tol=2e-3), its_later, later)), (words, later)


class Casts(TorchDispatchMode):
    """Elements of these tensors' memory that operations have made 16 bits of."""

    def __init__(self, weights: list[torch.Tensor]):
        super().__init__()
        self.memory, self.elements = {each.untyped_storage().data_ptr() for each in weights}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[0] if function is torch.ops.aten._to_copy.default else args[1]
            if out.dtype == torch.bfloat16 and source.untyped_storage().data_ptr() in self.memory:
                self.elements += source.numel()
        return out


@contextlib.contextmanager
def backward_in_a_thread(mode: TorchDispatchMode):
    """Inside, each backward runs in another thread, as on a GPU. That thread is outside of the step's autocast."""
    backward = torch.autograd.backward

    def under_mode(*args, **more) -> None:
        with mode:
            backward(*args, **more)

    here = threading.get_ident()
    with ThreadPoolExecutor(1) as thread:

        def elsewhere(*args, **more) -> None:
            if threading.get_ident() != here:  # a hook of a backward that is there already
                return backward(*args, **more)
            return thread.submit(under_mode, *args, **more).result()

        with mock.patch.object(torch.autograd, "backward", elsewhere):
            yield


def casts(layouts: list[str], threads: bool = False) -> dict[str, tuple[int, int]]:
    """On a rank, of each layout: elements of float32 weights that a step casts, and those that this rank has."""
    found = {}
    for words in layouts:
        parallel = parallel_of(words, moe="ep2" in words)
        parallel.step(*local_batch(parallel, 0))
        inner = getattr(parallel.optimizer, "optimizer", parallel.optimizer)
        own = list(dict.fromkeys(p for group in inner.param_groups for p in group["params"]))
        assert all(each.dtype == torch.float32 for each in own), words
        units = [*parallel.sharding.units, parallel.sharding.root] if parallel.layout.zero_stage == 3 else []
        flat = [part.shard for unit in units for part in unit.flat_params] or own
        with Casts(flat) as counted, backward_in_a_thread(counted) if threads else contextlib.nullcontext():
            parallel.step(*local_batch(parallel, 1))
        found[words] = counted.elements, sum(each.numel() for each in flat)
    return found


def test_a_weight_is_cast_once_a_step(ranks):
    """Whatever uses it, in 4 micro-batches, recomputed or not. Under autocast, some are cast 4 and 8 times."""
    layouts = ["dp2,tp2,sp,full", "pp2,tp2,zb-h1", "dp2,pp2,ep2", "dp2,pp2,zb-v", "dp2,cp2,full,zero1", "dp2,tp2,zero2"]
    for found in ranks(casts, [*layouts, "dp2,pp2,zero3,keep", "dp2,pp2,ep2,zero3,keep,zb-h1"]):
        for words, (cast, own) in found.items():
            assert cast == own > 0, (words, cast, own)


def test_a_weight_is_cast_once_a_step_on_a_backward_thread(ranks):
    """If a replayed forward entered and left autocast there, it would clear the cache of casts of all threads."""
    for found in ranks(casts, ["dp2,tp2,sp,full", "dp2,pp2,full", "dp2,cp2,full,zero1"], True):
        for words, (cast, own) in found.items():
            assert cast == own > 0, (words, cast, own)


def sent(words: str) -> tuple[dict[str, int], dict[str, int], int]:
    """On a rank: bytes of a step over the pipeline and the replicas, by collective; elements of its weights."""
    parallel = parallel_of(words)
    parallel.step(*local_batch(parallel, 0))
    with count_traffic() as traffic:
        parallel.step(*local_batch(parallel, 1))
        parallel.sharding.wait() if parallel.layout.zero_stage in (1, 2) else None
    groups = [tuple(dist.get_process_group_ranks(group)) for group in (parallel.mesh.pp, parallel.mesh.replicas)]
    kinds = ("send", "all_gather", "reduce_scatter", "all_reduce")
    of_groups = [{kind: traffic.select(kind, group=group).bytes for kind in kinds} for group in groups]
    flat = [shard.values for shard in parallel.sharding.shards] if parallel.layout.zero_stage in (1, 2) else []
    return *of_groups, sum(each.numel() for each in flat)


def test_bytes_on_the_way(ranks):
    """Hidden states and gathered weights have 2 bytes, gradients 4, in stages 0 to 3."""
    for words in ("dp2,pp2", "dp2,pp2,zero1", "dp2,pp2,zero3,keep"):
        for pipeline, _, _ in ranks(sent, words):
            assert pipeline["send"] == 2 * SEQUENCES // 2 * SEQ * OF.hidden, (words, pipeline)  # of half the sequences
    for words in ("dp4,zero1", "dp4,zero2"):
        for _, replicas, weights in ranks(sent, words):
            assert replicas["all_gather"] == 3 / 4 * 2 * weights, (words, replicas)
            rounds = SEQUENCES // 4 if words.endswith("zero2") else 1
            assert replicas["reduce_scatter"] == rounds * 3 / 4 * 4 * weights, (words, replicas)


def before_finish(words: str) -> tuple[int, int]:
    """On a rank: how many reduce-scatters of a step begin before finish(), and how many there are."""
    parallel, early = parallel_of(words), []
    parallel.step(*local_batch(parallel, 0))
    finish = GatherOncePerStep.finish

    def noted(kept) -> None:
        early.append(traffic.select("reduce_scatter").calls)
        finish(kept)

    with count_traffic() as traffic, mock.patch.object(GatherOncePerStep, "finish", noted):
        parallel.step(*local_batch(parallel, 1))
    return early[0], traffic.select("reduce_scatter").calls


def test_kept_units_are_sent_while_the_last_backward_runs(ranks):
    """A block's; those of the tied embedding, which is of two stages, and of what is gathered with it come later."""
    for words in ("dp2,pp2,zero3,keep", "dp2,pp2,zero3,keep,zb-h1"):
        for early, all_of_them in ranks(before_finish, words):
            assert early == 1 and all_of_them in (2, 3), (words, early, all_of_them)


def sums(words: str) -> tuple[int, set[torch.dtype]]:
    """On a rank: gradients that a step's backwards have made; what holds their sums: a .grad of 16 bits, or more."""
    parallel, taken, take = parallel_of(words), [], GatherOncePerStep.add_gradient

    def noted(kept, weight, unit, part) -> None:
        take(kept, weight, unit, part)
        sum_of = part.gradients.buffer if weight.grad is None else weight.grad
        taken.extend([] if sum_of is None else [sum_of.dtype])  # None: it was the last, and all have been sent

    with mock.patch.object(GatherOncePerStep, "add_gradient", noted):
        parallel.step(*local_batch(parallel, 0))
    return len(taken), set(taken)


def test_kept_gradients_add_up_in_float32(ranks):
    """Each micro-batch's, as it comes: 16 bits would lose a part of a small one beside the sum of all before it."""
    for found in ranks(sums, "dp2,pp2,zero3,keep"):
        assert found[0] > SEQUENCES // 2 and found[1] == {torch.float32}, found


def steps_without_reading(layouts: list[str]) -> None:
    for words in layouts:
        parallel = parallel_of(words, fused=True)  # others read the number of their step, which is on the host
        parallel.step(*local_batch(parallel, 0))  # stages tell each other the shapes that they send
        with NoHostReads():
            parallel.step(*local_batch(parallel, 1))


def test_a_step_is_not_read_on_the_host(ranks):
    """Neither loss nor norm nor whether they are finite: the program reads them when it says something."""
    ranks(steps_without_reading, ["dp4", "dp2,tp2,sp,zero1", "dp2,cp2,full,zero2", "dp2,pp2,zb-h1", "dp4,zero3"])


def begun(words: list[str]) -> list[bool]:
    """On a rank, of each layout: whether weights begin with float32 values to the bit, as init_parameter makes them."""
    found = []
    for each in words:
        whole = full_weights(parallel_of(each))
        expected = {name: torch.empty_like(value) for name, value in whole.items()}
        for name, value in expected.items():
            init_parameter("embedding.weight" if name == "head.weight" else name, value, OF)
        found.append(all(torch.equal(whole[name].view_as(value), value) for name, value in expected.items()))
    return found


def test_all_layouts_begin_with_the_same_float32_weights(ranks):
    layouts = ["dp4", "dp4,zero1", "dp2,tp2,zero2", "dp2,pp2,zero3,keep"]
    assert ranks(begun, layouts) == [[True] * 4] * 4
