"""Tensor parallelism in one process: degrees, options, formulas, and parts on ranks that are not there. Any machine."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from calls import as_rank
from course_lib.expert_parallel.mixture import apply_moe
from course_lib.single_gpu.hugging_face import from_hf, to_hf
from course_lib.single_gpu.memory import activation_bytes, param_count
from course_lib.single_gpu.model import PRESETS, ModelConfig, Transformer, init_parameter
from course_lib.single_gpu.placement import placement_of
from course_lib.tensor_parallel import linear
from course_lib.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, as_autocast, replicas_of
from course_lib.tensor_parallel.model import all_reduce_ratio, apply_tensor_parallel, check_degree, options
from course_lib.tensor_parallel.shards import TensorShard, materialize, shard_init, shard_parameter

SMALL = ModelConfig(layers=2, hidden=48, heads=12, kv_heads=4, ffn_hidden=60, vocab=97)
GATHER = "course_lib.tensor_parallel.shards.all_gather_into_tensor"


class Group:
    """As much of a process group as a shard wants to know."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = lambda: rank, lambda: size


@pytest.mark.parametrize("rank", [0, 37, 1023])
@pytest.mark.parametrize("regular", [True, False])
def test_all_groups_of_copies_are_two_splits_of_the_communicator(rank, regular, monkeypatch):
    """1,024 ranks, of which each 16 share 8 K/V heads: two for 640 groups; and where the last 16 ranks are in fours."""
    groups, made, splits = [(list(range(i, i + 16)), 2) for i in range(0, 1024, 16)], [], []
    if not regular:
        groups[-1:] = [(list(range(i, i + 4)), 1) for i in range(1008, 1024, 4)]
    of_all = [group for group in groups for _ in group[0]]
    members, copies = of_all[rank]
    monkeypatch.setattr(
        dist, "all_gather_object", lambda found, said, group=None: found.__setitem__(slice(None), of_all)
    )
    monkeypatch.setattr(dist.distributed_c10d, "new_group", lambda ranks, **options: made.append(ranks))
    monkeypatch.setattr(dist, "split_group", lambda split_ranks: splits.append(split_ranks))
    with as_rank(rank, 1024) as world:
        world.bound_device_id = torch.device("cuda", 0)  # the communicator is there, and can be split
        replicas_of(world, copies)
    assert not made and len(splits) == 2
    for split in splits:
        assert sorted(one for ranks in split for one in ranks) == list(range(1024))
    place = rank - members[0]
    start = place // copies * copies
    assert [list(ranks) for split in splits for ranks in split if rank in ranks] == [
        members[start : start + copies],
        members[place % copies :: copies],
    ]


def test_degrees_that_fit():
    for tp in (1, 2, 4):
        check_degree(SMALL, tp)
    for name, degrees in {"debug": (1, 2, 4), "small": (1, 2, 4, 8), "llama3-8B": (1, 2, 4, 8, 16, 32)}.items():
        for tp in degrees:
            check_degree(PRESETS[name], tp)


@pytest.mark.parametrize(
    "change, tp, message",
    [
        ({}, 5, "tp 5 does not divide heads, which is 12"),
        ({"ffn_hidden": 61}, 2, "tp 2 does not divide ffn_hidden, which is 61"),
        ({}, 6, "tp 6 and kv_heads, which is 4: neither divides the other"),
        ({"kv_heads": 6}, 4, "tp 4 and kv_heads, which is 6: neither divides the other"),
        ({"vocab": 3}, 4, "tp 4 leaves a rank without a token of vocab, which is 3"),
        ({}, 12, "tp 12 leaves a rank without a token of vocab, which is 97"),  # 9 for each of 11 ranks are 99
    ],
)
def test_degrees_that_do_not_fit_are_one_line_with_the_number(change, tp, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_degree(dataclasses.replace(SMALL, **change), tp)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16])
def test_shards_are_all_of_a_tensor_once_and_in_order(size):
    for whole in (0, 1, 3, 4, 5, 13, 97):
        for dim in (0, 1, -1):
            tensor = torch.arange(2 * whole if dim else whole * 3)
            tensor = tensor.view(2, whole) if dim else tensor.view(whole, 3)
            shards = [TensorShard.of(whole, Group(rank, size), dim) for rank in range(size)]
            parts = [shard.cut(tensor) for shard in shards]
            assert torch.equal(torch.cat(parts, dim), tensor)
            per_rank = -(-whole // size)
            assert all(shard.size == per_rank or shard.start + shard.size == whole for shard in shards)
            for shard, part in zip(shards, parts, strict=True):
                assert part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr(), "a view"
                assert shard.full_shape(part) == list(tensor.shape) and part.shape[dim] == shard.size
            assert all(a.start + a.size == b.start for a, b in zip(shards, shards[1:], strict=False))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_gather_is_the_inverse_of_cut(size, monkeypatch):
    for whole, shape, dim in ((13, (13, 3), 0), (13, (2, 13), 1), (4, (2, 3, 4), -1), (5, (5,), 0)):
        tensor = torch.randn(shape)
        shards = [TensorShard.of(whole, Group(rank, size), dim) for rank in range(size)]
        sent = []
        monkeypatch.setattr(GATHER, lambda out, own, group: sent.append(own))
        for shard in shards:
            shard.gather(shard.cut(tensor))
        monkeypatch.setattr(GATHER, lambda out, own, group: out.copy_(torch.cat(sent)))
        for shard in shards:
            assert torch.equal(shard.gather(shard.cut(tensor)), tensor)
        assert len({own.shape for own in sent}) == 1, "all send as much"


def test_a_split_parameter_has_memory_of_its_own_and_says_what_it_is_part_of():
    group, whole = Group(1, 2), nn.Parameter(torch.arange(12.0).view(3, 4), requires_grad=False)
    for dim, values in ((0, [[8.0, 9, 10, 11]]), (1, [[2.0, 3], [6, 7], [10, 11]])):
        part = shard_parameter(whole, TensorShard.of(whole.shape[dim], group, dim))
        assert part.tolist() == values and part.is_contiguous() and not part.requires_grad
        assert part.untyped_storage().nbytes() == 4 * part.numel()
        assert (
            placement_of(part).norm_groups == (group,)
            and placement_of(part).tensor_shard.group is group
            and placement_of(part).tensor_shard.dim == dim
        )
    meta = shard_parameter(nn.Parameter(torch.empty(3, 4, device="meta")), TensorShard.of(3, group))
    assert meta.is_meta and meta.shape == (1, 4) and meta.requires_grad


def parts_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_filled_model_is_slices_of_the_whole_one(size):
    """Every rank's, one after the other; together they are all of it."""
    whole, found = parts_of(Transformer(SMALL, seed=3)), {}
    for rank in range(size):
        with as_rank(rank, size) as group:
            with torch.device("meta"):
                model = Transformer(SMALL)
            assert apply_tensor_parallel(model, group) is model
            assert all(p.is_meta for p in model.parameters())
            init = lambda name, tensor: init_parameter(name, tensor, SMALL, 3)  # noqa: E731
            assert materialize(model, init) is model
            assert sum(p.numel() for p in model.parameters()) <= param_count(SMALL, size) + 2 * SMALL.hidden * size
            for name, part in parts_of(model).items():
                found.setdefault(name, []).append((placement_of(model.get_parameter(name)).tensor_shard, part))
            filled = torch.full_like(model.blocks[0].mlp.down_proj.weight, torch.nan)
            shard_init(model, init)("blocks.0.mlp.down_proj.weight", filled)
            assert torch.equal(filled, model.blocks[0].mlp.down_proj.weight)
    for name, parts in found.items():
        shard = parts[0][0]
        if shard is None:
            assert "norm" in name and all(torch.equal(part, whole[name]) for _, part in parts)
        else:
            assert torch.equal(torch.cat([part for _, part in parts], shard.dim), whole[name]), name


class Scaled(nn.Module):
    """A model with a buffer of its own and one inside."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        self.linear.register_buffer("bias_sum", torch.zeros(3))
        self.register_buffer("scale", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("nothing", None)


def test_buffers_of_a_meta_model_are_filled_by_their_names():
    """Those that are there already stay."""
    with torch.device("meta"):
        model = Scaled()
    there = model.linear.there = nn.Buffer(torch.ones(2))
    names = []

    def init(name: str, tensor: torch.Tensor) -> None:
        names.append(name)
        tensor.fill_(len(name))

    assert materialize(model, init) is model
    assert sorted(names) == ["linear.bias_sum", "linear.weight", "scale"]
    assert model.linear.bias_sum.tolist() == [15.0] * 3 and model.scale.tolist() == [5.0] * 4
    assert model.scale.dtype == torch.float64 and model.nothing is None and model.linear.there is there
    assert set(model.state_dict()) == {"linear.weight", "linear.bias_sum", "linear.there", "scale"}


def test_a_mixtures_shared_expert_is_split_and_its_routed_ones_are_not():
    """A mixture without one has no MLP to split."""
    for shared in (0, 2):
        with as_rank(1, 2) as group:
            model = apply_moe(Transformer(SMALL), 4, 2, 20, shared=shared)
            whole = {name: list(p.shape) for name, p in model.named_parameters()}
            apply_tensor_parallel(model, group)
            parts = {name: list(p.shape) for name, p in model.named_parameters() if ".mlp." in name}
            for name, shape in parts.items():
                dim = ("down_proj" in name) if ".shared." in name else None
                expected = [size // (1 + (place == dim)) for place, size in enumerate(whole[name])]
                assert shape == expected and (placement_of(model.get_parameter(name)).tensor_shard is not None) == (
                    dim is not None
                )
            assert all(isinstance(block.attention.o_proj, RowParallelLinear) for block in model.blocks)
            for block in model.blocks if shared else []:
                assert isinstance(block.mlp.shared.down_proj, RowParallelLinear)
                assert block.mlp.shared.project_layers is linear.project_together


def test_weights_from_hugging_face_are_split_like_any():
    pytest.importorskip("transformers")
    whole = Transformer(SMALL)
    theirs = to_hf(whole)
    for rank in range(2):
        with as_rank(rank, 2) as group:
            model = apply_tensor_parallel(from_hf(theirs), group)
            for name, p in model.named_parameters():
                expected = parts_of(whole)[name]
                expected = placement_of(p).tensor_shard.cut(expected) if placement_of(p).tensor_shard else expected
                assert torch.equal(p, expected), name


def test_biases_are_split_by_columns_and_whole_by_rows():
    linear = nn.Linear(6, 8)
    with as_rank(1, 2) as group:
        column, row = ColumnParallelLinear(linear, group), RowParallelLinear(linear, group)
        assert torch.equal(column.bias, linear.bias[4:]) and torch.equal(column.weight, linear.weight[4:])
        assert torch.equal(row.bias, linear.bias) and torch.equal(row.weight, linear.weight[:, 3:])
        assert not placement_of(row.bias).tensor_shard


def test_autocast_alone_changes_dtypes():
    x, weight = torch.ones(2), torch.ones(2, requires_grad=True)
    assert as_autocast(x, weight) == (x, weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert [each.dtype for each in as_autocast(x, weight)] == [torch.bfloat16] * 2
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert as_autocast(x)[0] is x


def test_all_reduce_ratio_is_that_of_the_two_times():
    hidden, tp, tokens, peak, bandwidth = 4096, 8, 1000, 989.5e12, 450e9
    products = 2 * 12 * hidden**2 * tokens / tp / peak
    sums = 2 * 2 * (tp - 1) / tp * 2 * hidden * tokens / bandwidth
    assert all_reduce_ratio(hidden, tp, bandwidth, peak) == pytest.approx(sums / products)
    assert all_reduce_ratio(hidden, 1, bandwidth, peak) == 0
    llama = PRESETS["llama3-8B"]
    layer = (param_count(llama) - 2 * llama.vocab * llama.hidden - llama.hidden) // llama.layers
    shorter = all_reduce_ratio(hidden, tp, bandwidth, peak, layer)
    assert shorter == pytest.approx(sums / (2 * layer * tokens / tp / peak)) and layer > 12 * hidden**2
    assert all_reduce_ratio(hidden, tp, bandwidth, peak, element_bytes=4) == pytest.approx(2 * sums / products)
    # By hand: 2 bytes x 2 all-reduces x h x (tp - 1) / (12 h^2) x 2199 operations a byte
    assert all_reduce_ratio(hidden, tp, bandwidth, peak) == pytest.approx(4 * 7 / (12 * 4096) * 2198.9, rel=1e-3)


def test_what_every_rank_keeps_whole_stays_with_the_degree():
    """The formula that the ranks are measured against: 1/t of what is split, all of the rest."""
    kept = {tp: activation_bytes(SMALL, 2, 16, tp=tp) for tp in (1, 2, 4)}
    split = 2 * (kept[1] - kept[2])
    assert kept[4] == pytest.approx(kept[1] - 3 / 4 * split) and 0 < split < kept[1]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--tp", "0"], "--chunks and --tp must be 1 or more"),
        (["--chunks", "0"], "--chunks and --tp must be 1 or more"),
        (["--preset", "debug", "--tp", "3"], "tp 3 does not divide heads, which is 4"),
        (["--preset", "debug", "--tp", "8"], "tp 8 does not divide heads, which is 4"),
        (["--micro-batch", "9", "--batch", "8"], "--micro-batch must be 1 or more, and no more than --batch"),
        (["--micro-batch", "0"], "--micro-batch must be 1 or more, and no more than --batch"),
        (["--recompute", "some"], "--recompute"),
        (["--steps", "0"], "--steps, --batch and --seq must be 1 or more"),
    ],
)
def test_bad_options_end_with_one_line(argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        options(argv)
    assert ended.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]


def test_options_touch_nothing_and_fill_in_what_is_missing():
    chosen = options(["--preset", "debug", "--batch", "6"])
    assert (chosen.tp, chosen.chunks, chosen.micro_batch, chosen.recompute) == (None, 1, 6, "none")
    assert not dist.is_initialized()


@pytest.mark.parametrize("device", [torch.device("cuda", 3), None])
def test_a_communicator_that_knows_its_device_is_split_once_for_all_groups(device, monkeypatch):
    """With NCCL each communicator made by itself is a meeting of the whole world: 640 of them for tp 16 on 1,024."""
    calls = []

    def noted(name, answer):
        return lambda *given, **named: calls.append((name, given, named)) or answer

    group = SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=device))
    made = {"split_group": noted("split", "own"), "new_subgroups_by_enumeration": noted("each", ("own", "all"))}
    monkeypatch.setattr(linear, "dist", SimpleNamespace(group=group, **made))
    lists = [(0, 2), (1, 3)]
    assert linear.new_disjoint_subgroups(lists) == "own"
    assert calls == [("split", (), {"split_ranks": lists}) if device else ("each", (lists,), {})]
