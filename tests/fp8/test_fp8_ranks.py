"""course_lib.fp8.program on two and four ranks against one process; recomputation; saved states. CPU, gloo.

Most of it in float64. FP8 rounds to few numbers, so a difference in the last bit of a float32 sum, made in another
order, flips a rounding now and then; from there on everything differs a little. Sums in float64 differ too, 10^-16 of
them: far less than the distance to the next tie, so that roundings agree, and results do to 10^-12.
"""

import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from course_lib.collectives.traffic import count_traffic
from course_lib.five_d.layouts import Layout
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import parallelize
from course_lib.fp8.gather import Fp8Gather
from course_lib.fp8.program import apply_fp8, update_scales
from course_lib.single_gpu.placement import placement_of
from course_lib.tensor_parallel.shards import gather_state_dict
from course_lib.zero.full_sharding import FullyShard
from course_lib.zero.sharded_models import full_state_dict, fully_shard, load_full_state_dict
from fp8_models import (
    BATCH,
    ODD,
    SEQ,
    SGD,
    STEPS,
    WHOLE_BLOCKS,
    batches,
    config_for,
    error_of,
    in_tensor_parallel,
    mean_loss,
    not_the_same,
    one_process,
    plain_model,
    recipe,
    sharing_the_batch,
    split_fp8,
)
from split_models import RECOMPUTE

EXACT = 1e-12  # float64


# Tensor parallelism.


@pytest.mark.parametrize(
    "how, recompute", [("current", "selective"), ("delayed", "full"), ("blocks", "none"), ("delayed", "matmuls")]
)
def test_tensor_parallelism_is_one_process(two, how, recompute):
    """Losses, gradients, norms, the weights after 3 steps and the histories of amax, by the same names."""
    of = config_for(how)
    expected = one_process(of, how, torch.float64)
    for found in two(in_tensor_parallel, of, how, torch.float64, recompute):
        assert found.keys() == expected.keys()
        assert not not_the_same(found, expected, EXACT)
    assert any(name.endswith("q_proj.quantizers.input.history") for name in expected) == (how == "delayed")


def test_fp8_is_not_what_it_is_compared_to(two):
    """The same comparison tells FP8 from float64, and one recipe from another."""
    exact, current = (one_process(ODD, how, torch.float64) for how in (None, "current"))
    delayed = one_process(ODD, "delayed", torch.float64)
    assert 0.01 < error_of(current["gradient 0 head.weight"], exact["gradient 0 head.weight"]) < 0.3
    assert not_the_same({"loss 0": delayed["loss 0"]}, current, EXACT) == []  # no history yet
    assert not_the_same({"loss 2": delayed["loss 2"]}, current, 1e-6)


def assert_errors_alike(found: dict, expected: dict, exact: dict) -> None:
    """The first gradients' errors: all together within a tenth of each other, each within a half."""
    names = [name for name in exact if name.startswith("gradient 0")]
    errors = {name: (error_of(found[name], exact[name]), error_of(expected[name], exact[name])) for name in names}
    assert not {name: pair for name, pair in errors.items() if pair[0] > 1.5 * pair[1]}
    ours, theirs = torch.tensor(list(errors.values())).square().mean(0).sqrt()
    assert 0.01 < ours < 1.1 * theirs


@pytest.mark.parametrize("how", ["current", "blocks"])
def test_with_fewer_kv_heads_than_ranks_copies_round_their_own_part_of_a_gradient(two, how):
    """The forward is exact, and so is what backward makes before it gets to keys and values. Their gradient is a sum
    over the ranks that have copies; each rounds its summand. The error, against float64, is that of one process.
    """
    of = dataclasses.replace(config_for(how), kv_heads=1)
    exact, expected = one_process(of, None, torch.float64), one_process(of, how, torch.float64)
    for found in two(in_tensor_parallel, of, how, torch.float64):
        last = f"blocks.{of.layers - 1}"
        before = ("norm.weight", "head", f"{last}.mlp", f"{last}.attention.o_proj", f"{last}.attention.q_proj")
        names = [f"gradient 0 {name}" for name in before]
        early = {name: found[name] for name in found if name == "loss 0" or name.startswith(tuple(names))}
        assert len(early) == 9 and not not_the_same(early, expected, EXACT)
        assert not_the_same({name: found[name] for name in found if name.startswith("gradient 0")}, expected, 1e-3)
        assert_errors_alike(found, expected, exact)


def test_blocks_that_cross_ranks_are_cut_there(two):
    """96 rows of a matrix on each rank, where a block has 128: each rank scales by what it has. The numbers are others,
    and as near to the exact ones; the loss within 1%.
    """
    of = dataclasses.replace(WHOLE_BLOCKS, hidden=192, ffn_hidden=192)
    exact, expected = one_process(of, None, torch.float64), one_process(of, "blocks", torch.float64)
    for found in two(in_tensor_parallel, of, "blocks", torch.float64):
        assert not_the_same({"loss 0": found["loss 0"]}, expected, 1e-9)
        assert not not_the_same({"loss 0": found["loss 0"]}, expected, 1e-2)
        assert_errors_alike(found, expected, exact)


@pytest.mark.parametrize("how", ["current", "blocks"])
def test_in_float32_roundings_flip(two, how):
    """A flipped rounding moves an element by a unit of 8 bits, 1/16 to 1/4 of it: one of a first gradient's elements
    then differs by up to 5% of the largest, a loss by 2% after two steps, and the errors against float64 are alike.
    """
    of = config_for(how)
    exact, expected = (one_process(of, *way) for way in ((None, torch.float64), (how, torch.float32)))
    for found in two(in_tensor_parallel, of, how, torch.float32):
        losses = {name: found[name] for name in found if name.startswith("loss")}
        gradients = {name: found[name] for name in found if name.startswith("gradient 0")}
        assert not not_the_same(losses, expected, 0.02) and not not_the_same(gradients, expected, 0.05)
        assert not not_the_same({"loss 0": found["loss 0"]}, expected, 1e-5)
        assert_errors_alike(found, expected, exact)


def amax_reductions(how: str) -> list[list]:
    """On a rank: what is sent as one number (4 bytes on two ranks), in forward, backward and update_scales of a second
    step; and how one layer of a pair does alone.
    """
    of = config_for(how)
    model, found = split_fp8(of, how, torch.float32), []
    inputs, targets = batches(0)
    for _ in range(2):
        with count_traffic() as forward:
            loss = mean_loss(model(inputs), targets)
        with count_traffic() as backward:
            loss.backward()
        with count_traffic() as update:
            update_scales(model)
    for traffic in (forward, backward, update):
        calls = [record.bytes for record in traffic.select("all_reduce").records]
        found.append([size for size in calls if size < 1000])
    layer, x = model.blocks[0].attention.k_proj, torch.ones(5, of.hidden, requires_grad=True)
    layer(x).sum().backward()
    return [*found, list(x.grad.shape)]


def test_an_amax_is_one_number_for_each_matrix_that_is_split(two):
    """A layer's forward: 7 weights, the inputs of o and down. Its backward: the gradients of q, k, v, gate, up. Delayed
    scaling sends the same 14 numbers, after a step and as one message. Blocks that one rank has need nothing.
    """
    for how, expected in {
        "current": [[4] * 9 * 2, [4] * 5 * 2, []],
        "delayed": [[], [], [4 * 14 * 2]],
        "blocks": [[], [], []],
    }.items():
        for found in two(amax_reductions, how):
            assert found == [*expected, [5, config_for(how).hidden]], how


# Ranks that share the batch.


def shared(how: str, way: str, dtype: torch.dtype, recompute: str) -> dict:
    """On a rank: training of a whole model whose scales are those of the whole batch."""
    group = dist.group.WORLD
    model = apply_fp8(plain_model(config_for(how)).to(dtype), recipe(how), group)
    return sharing_the_batch(RECOMPUTE[recompute](model, group), way, group)


@pytest.mark.parametrize(
    "how, way, recompute",
    [
        ("current", "DataParallel", "none"),
        ("delayed", "DataParallel", "selective"),
        ("blocks", "DataParallel", "none"),
        ("delayed", "ZeRO-1", "none"),
        ("delayed", "ZeRO-3", "full"),
        ("current", "FP8 gather", "matmuls"),
        ("delayed", "FP8 gather", "none"),
        ("blocks", "FP8 gather", "full"),
    ],
)
def test_ranks_that_share_a_batch_are_one_process(two, how, way, recompute):
    """With batch_group: half of the batch on each rank, 128 tokens, so that no block of 128 is on both."""
    assert BATCH * SEQ == 2 * 128
    expected = one_process(config_for(how), how, torch.float64)
    for found in two(shared, how, way, torch.float64, recompute):
        gradients = [name for name in found if name.startswith("gradient")]
        assert len(gradients) == (0 if way == "ZeRO-1" else STEPS * (9 * config_for(how).layers + 3))
        assert not not_the_same(found, expected, EXACT)


def in_both(how: str) -> dict:
    """On one of 2 x 2 ranks: tensor parallelism, then ZeRO stage 3 with the FP8 gather over the other axis."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"].get_group(), mesh["tp"].get_group()
    model = split_fp8(config_for(how), how, torch.float64, tp, dp)
    shards = {name: placement_of(p).tensor_shard for name, p in model.named_parameters()}
    found = sharing_the_batch(model, "FP8 gather", dp)
    whole = {}
    for name, value in found.items():
        shard = shards.get(name.split()[-1]) if name.startswith(("gradient", "end")) else None
        whole[name] = shard.gather(value) if shard else value
    return whole


def test_tensor_parallelism_and_the_fp8_gather_are_one_process(ranks, how="delayed"):
    expected = one_process(config_for(how), how, torch.float64)
    for found in ranks(in_both, how):
        assert found.keys() == expected.keys() and not not_the_same(found, expected, EXACT)


# Recomputation, in one process.


@pytest.mark.parametrize("mode", [mode for mode in RECOMPUTE if mode != "partitioned"])
@pytest.mark.parametrize("how", ["delayed", "blocks"])
def test_recomputation_changes_no_bit(how, mode):
    """float32; histories of amax too: the replay records the same maximum once more."""
    expected, found = (one_process(config_for(how), how, torch.float32, each, 2) for each in ("none", mode))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    histories = [value for name, value in found.items() if name.endswith("history")]
    assert len(histories) == (2 * 7 * 3 if how == "delayed" else 0) and all(value.all() for value in histories)


# Saved states.


def saved_and_loaded(how: str) -> dict[str, torch.Tensor]:
    """On a rank: losses of a third step of a split and of a sharded model, then with their states elsewhere."""
    of, group, inputs, targets = config_for(how), dist.group.WORLD, *batches(2)

    def sharded_fp8() -> FullyShard:
        return fully_shard(apply_fp8(plain_model(of).double(), recipe(how)), group, encode=Fp8Gather())

    trained = {"split": split_fp8(of, how, torch.float64), "sharded": sharded_fp8()}
    for model in trained.values():
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        for step in range(2):
            mean_loss(model(batches(step)[0]), batches(step)[1]).backward()
            if isinstance(model, FullyShard):
                model.finish()
            optimizer.step()
            optimizer.zero_grad()
            update_scales(model)
    states = {"split": gather_state_dict(trained["split"]), "sharded": full_state_dict(trained["sharded"])}
    whole, split = apply_fp8(plain_model(of).double(), recipe(how)), split_fp8(of, how, torch.float64)
    sharded, found = sharded_fp8(), {}
    with torch.no_grad():
        for name, state in states.items():
            sharded(inputs)  # has scales of other weights
            load_full_state_dict(sharded, state)
            whole.load_state_dict(state)
            parts = {
                n: placement_of(p).tensor_shard.cut(state[n])
                for n, p in split.named_parameters()
                if placement_of(p).tensor_shard
            }
            split.load_state_dict(state | parts)
            for i, model in enumerate((trained[name], whole, split, sharded)):
                found[f"{name} {i}"] = mean_loss(model(inputs), targets)
    return found


@pytest.mark.parametrize("how", ["delayed", "current"])
def test_a_saved_state_goes_on_anywhere(two, how):
    """Of a split and of a sharded model: in one process, split, and in ZeRO stage 3 with the FP8 gather. Histories too,
    or the scales would be others.
    """
    expected = one_process(config_for(how), how, torch.float64)["loss 2"]
    for found in two(saved_and_loaded, how):
        assert len(found) == 8 and not not_the_same(found, dict.fromkeys(found, expected), EXACT)


# With everything else.


def in_a_pipeline(words: str, how: str) -> list[float]:
    """On a rank: losses and norms of two steps of a model from the meta device, in float32."""
    layout, found = Layout.parse(words), []
    extra = [functools.partial(apply_fp8, recipe=recipe(how))]
    parallel = parallelize(config_for(how), layout, build_mesh(layout), extra, optimizer_cls=torch.optim.SGD, lr=1e-3)
    for step in range(2):
        found += [number.item() for number in parallel.step(*batches(step))]
        for stage in parallel.stages.values():
            update_scales(stage)
    return found


def test_a_verb_of_parallelize(two):
    """Stages from the meta device start with empty histories; a backward in two halves records no amax twice."""
    plain = two(in_a_pipeline, "pp2", "delayed")[0]
    current = two(in_a_pipeline, "pp2", "current")[0]
    assert plain[:2] == current[:2] and plain[2] != current[2]
    for words in ("pp2,zb-h1", "pp2,zb-h1,full"):
        assert two(in_a_pipeline, words, "delayed")[0] == pytest.approx(plain, rel=1e-5)
