"""course_lib.zero.shards in one process, with groups that have only a rank and a size. Any machine."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from calls import Operations
from course_lib.zero.shards import FlatLayout, GradientBuffer, clip_grad_norm_, global_norm, norm_group

GATHER, SCATTER = "course_lib.zero.shards.all_gather_into_tensor", "course_lib.zero.shards.reduce_scatter_tensor"


class Group:
    """As much of a process group as a layout wants to know."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = lambda: rank, lambda: size


def layouts(tensors: list[torch.Tensor], world_size: int) -> list[FlatLayout]:
    """That of each rank."""
    return [FlatLayout(tensors, Group(rank, world_size)) for rank in range(world_size)]


def counted(shapes: list[tuple], dtype=torch.float32) -> list[torch.Tensor]:
    """Tensors whose elements are 1, 2, 3 … over all of them."""
    numels = [torch.Size(shape).numel() for shape in shapes]
    numbers = torch.arange(1, sum(numels) + 1, dtype=dtype)
    return [part.view(shape) for part, shape in zip(numbers.split(numels), shapes, strict=True)]


def shape_lists() -> list[list[tuple]]:
    """Shapes of all kinds: fixed ones that hurt, and 60 random lists of them."""
    generator = torch.Generator().manual_seed(0)

    def number(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    random = [[tuple(number(6) for _ in range(number(4))) for _ in range(1 + number(7))] for _ in range(60)]
    return [[()], [(1,)], [(0,)], [(), (), ()], [(0, 3), (2,), (0,)], [(3, 5), (), (7,), (2, 2, 2)], *random]


SHAPES, SIZES = shape_lists(), (1, 2, 3, 4, 7, 8, 64)


@pytest.mark.parametrize("world_size", SIZES)
def test_the_ranks_own_every_element_once_and_in_order(world_size):
    for shapes in SHAPES:
        tensors = counted(shapes)
        ranks = layouts(tensors, world_size)
        numel = sum(tensor.numel() for tensor in tensors)
        for layout in ranks:
            assert layout.numel == numel and layout.padded == layout.shard_numel * world_size
            assert 0 <= layout.padded - numel < world_size
        for i, tensor in enumerate(tensors):
            spans = [layout.span(i) for layout in ranks]
            owned = [place for first, last in spans for place in range(first, last)]
            assert owned == list(range(tensor.numel())), (shapes, world_size, i)
            assert all(type(edge) is int and 0 <= edge <= tensor.numel() for span in spans for edge in span)
        assert all(sum(b - a for a, b in map(each.span, range(len(shapes)))) <= each.shard_numel for each in ranks)


@pytest.mark.parametrize("world_size", SIZES)
def test_pieces_and_views_point_into_their_buffer_and_agree(world_size):
    for shapes in SHAPES:
        tensors = counted(shapes)
        for layout in layouts(tensors, world_size):
            whole = torch.zeros(layout.padded)
            views = layout.views(whole)
            for view, tensor in zip(views, tensors, strict=True):
                assert view.shape == tensor.shape and view.stride() == tensor.stride()
                view.copy_(tensor)
            assert whole.tolist() == [*range(1, layout.numel + 1), *[0] * (layout.padded - layout.numel)]
            own = layout.local_shard(whole)
            assert own.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            pieces = layout.local_views(own)
            assert [len(piece) for piece in pieces] == [b - a for a, b in map(layout.span, range(len(shapes)))]
            for i, (piece, tensor) in enumerate(zip(pieces, tensors, strict=True)):
                assert piece.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
                assert torch.equal(piece, layout.local_elements(i, tensor))
                piece.fill_(-1)  # writes through
            assert (whole == -1).sum() == sum(map(len, pieces))


@pytest.mark.parametrize("world_size", SIZES)
def test_cutting_and_putting_together_are_inverse(world_size, monkeypatch):
    for shapes in SHAPES:
        tensors = counted(shapes, torch.float64)
        ranks = layouts(tensors, world_size)
        shards = [layout.shard_of(tensors) for layout in ranks]
        assert all(shard.dtype == torch.float64 and len(shard) == ranks[0].shard_numel for shard in shards)
        monkeypatch.setattr(GATHER, lambda out, own, group: out.copy_(torch.cat(shards)))
        for layout, shard in zip(ranks, shards, strict=True):
            assert all(map(torch.equal, layout.gather(shard), tensors))


def odd_strides() -> list[torch.Tensor]:
    """Tensors that do not lie row by row; the last one has the same memory for all of its rows."""
    image = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    return [image, torch.rand(5, 3).t(), torch.rand(4, 6)[:, ::2], torch.rand(3).expand(4, 3), torch.rand(2, 3, 4).mT]


@pytest.mark.parametrize("world_size", SIZES)
def test_tensors_of_other_strides_keep_them_and_their_values(world_size, monkeypatch):
    tensors = odd_strides()
    ranks = layouts(tensors, world_size)
    shards = [layout.shard_of(tensors) for layout in ranks]
    monkeypatch.setattr(GATHER, lambda out, own, group: out.copy_(torch.cat(shards)))
    for tensor, whole in zip(tensors, ranks[-1].gather(shards[-1]), strict=True):
        assert torch.equal(tensor, whole) and whole.stride() == torch.empty_like(tensor).stride()
    assert ranks[0].gather(shards[0])[0].is_contiguous(memory_format=torch.channels_last)
    buffer = torch.full((ranks[0].padded + 2,), -7.0)
    for tensor, view in zip(tensors, ranks[0].views(buffer[1:-1]), strict=True):
        view.copy_(tensor)
    numel = ranks[0].numel
    assert torch.equal(buffer[1 : numel + 1], torch.cat(shards)[:numel])
    assert buffer[0] == -7 and (buffer[numel + 1 :] == -7).all()
    contiguous = [
        layout.local_elements(0, tensors[0].contiguous()) for layout in ranks
    ]  # of other strides than the layout's
    assert torch.equal(torch.cat(contiguous), torch.cat([layout.local_elements(0, tensors[0]) for layout in ranks]))


def test_a_shard_of_missing_tensors_has_zeros_there():
    tensors = counted([(3,), (2, 2), (5,)])
    for layout in layouts(tensors, 3):
        whole = torch.cat([tensors[0], torch.zeros(4), tensors[2]])
        shard = layout.shard_of([tensors[0], None, tensors[2]])
        assert torch.equal(shard, layout.local_shard(whole)) and shard.shape == (4,)


# Gradients on their way.


class Sent(list):
    """Stands for reduce_scatter_tensor: keeps a copy of what was sent."""

    def __call__(self, shard, whole, group, async_op):
        assert async_op and whole.numel() == group.size() * shard.numel()
        self.append(whole.clone())
        return "work"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("given", [(0, 1, 2, 3), (0, 2), (3,), ()])
def test_a_gradient_buffer_sends_zeros_for_what_is_missing_and_writes_nowhere_else(world_size, given, monkeypatch):
    """The buffer is larger than it need be, full of NaN, and lies between guards."""
    monkeypatch.setattr(SCATTER, sent := Sent())
    shapes = [(3, 5), (), (7,), (0, 2)]
    parameters = [nn.Parameter(value) for value in counted(shapes)]
    layout = FlatLayout(parameters, Group(world_size - 1, world_size))
    guarded = torch.full((layout.padded + 15,), torch.nan)
    guarded[:5], guarded[-5:] = 77, 78
    gradients = GradientBuffer(parameters, layout)
    gradients.attach(guarded[5:-5])
    for i, times in itertools.product(given, (1, 2)):
        parameters[i].grad = torch.full(shapes[i], 10.0 * times)
        gradients.store(parameters[i])
        assert parameters[i].grad is None
    assert gradients.send(torch.empty(layout.shard_numel)) == "work"
    values = [30.0 * (i in given) for i, p in enumerate(parameters) for _ in range(p.numel())]
    assert sent[0].tolist() == values + [0.0] * (layout.padded - layout.numel)
    assert (guarded[:5] == 77).all() and (guarded[-5:] == 78).all() and guarded[layout.padded + 5 : -5].isnan().all()


def test_a_new_buffer_begins_without_gradients(monkeypatch):
    monkeypatch.setattr(SCATTER, sent := Sent())
    parameters = [nn.Parameter(torch.ones(3))]
    layout = FlatLayout(parameters, Group(0, 2))
    gradients = GradientBuffer(parameters, layout)
    assert gradients.buffer is None
    for value in (1.0, 2.0):
        gradients.attach(torch.full((4,), 50.0))
        parameters[0].grad = torch.full((3,), value)
        gradients.store(parameters[0])
        gradients.send(torch.empty(2))
    assert [each.tolist() for each in sent] == [[1, 1, 1, 0], [2, 2, 2, 0]]


def test_a_gradient_of_another_dtype_is_converted_and_added_in_the_buffers(monkeypatch):
    """bfloat16 has 8 bits: 256 + 1 is 256 there, and 257 in the float32 buffer."""
    monkeypatch.setattr(SCATTER, sent := Sent())
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    gradients = GradientBuffer([parameter], FlatLayout([parameter], Group(0, 1)))
    gradients.attach(torch.zeros(2))
    for value in (256.0, 1.0):
        parameter.grad = torch.full_like(parameter, value)
        gradients.store(parameter)
    gradients.send(torch.empty(2))
    assert sent[0].tolist() == [257, 257]


# The norm.


def test_the_global_norm_is_that_of_one_vector(monkeypatch):
    """Parts of a group are summed over its ranks, once for each group; the others are counted here alone."""
    reduced = []

    def all_reduce(square, group):
        reduced.append(group)
        square.mul_(group.size())  # as if all ranks had the same

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    two, three = Group(0, 2), Group(1, 3)
    parts = [(torch.full((2, 2), 3.0), None), (torch.full((5,), 1.0), two), (torch.tensor(2.0), two)]
    parts += [(torch.tensor([4.0]), three), (torch.empty(0), three)]
    norm = global_norm(parts)
    assert (
        norm.shape == () and norm.dtype == torch.float32 and sorted(map(id, reduced)) == sorted(map(id, [two, three]))
    )
    assert norm.item() == pytest.approx((4 * 9 + 2 * (5 + 4) + 3 * 16) ** 0.5)


def test_the_global_norm_of_bfloat16_is_computed_in_float32():
    parts = [(torch.ones(100_000, dtype=torch.bfloat16), None)] * 3
    assert global_norm(parts).item() == pytest.approx(300_000**0.5, rel=1e-5)


def test_the_group_of_a_norm_is_the_outer_one_unless_others_say_who_has_the_rest(monkeypatch):
    """A part that is sharded over a subgroup counts once a rank of the whole group; with outer groups, once a shard."""
    monkeypatch.setattr(dist, "get_process_group_ranks", {"all": [0, 1, 2, 3], "pair": [0, 2], "other": [3, 5]}.get)
    assert norm_group("all", "pair") == "all" and norm_group("all", "all") == "all"
    assert norm_group("all", "pair", ("tp",)) == "pair" and norm_group("all", "all", ("tp",)) == "all"
    assert norm_group("all", "other") == norm_group("all", "other", ("tp",)) == "other"


def test_clipping_scales_all_gradients_in_one_launch():
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(20)]
    for parameter in parameters[1:]:  # the first was not used
        parameter.grad = torch.full((3,), 2.0)
    with Operations() as operations:
        norm = clip_grad_norm_(parameters, 1.0)
    assert norm == pytest.approx(2 * (3 * 19) ** 0.5) and parameters[0].grad is None
    assert all(torch.allclose(p.grad, torch.full((3,), 2 / norm.item())) for p in parameters[1:])
    assert operations.count["_foreach_mul_"] == 1 and operations.count["mul_"] == 0, operations.count
