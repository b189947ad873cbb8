"""course_lib.collectives.traffic: it sees and counts every way to communicate, and changes nothing. Four ranks on the
CPU, gloo.
"""

import subprocess
import sys
import textwrap
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from calls import KEPT, new_group
from course_lib.collectives.into_tensor import all_gather_into_tensor, reduce_scatter_tensor
from course_lib.collectives.rings import ring_all_gather, ring_all_reduce, ring_reduce_scatter, tree_broadcast
from course_lib.collectives.traffic import Record, Traffic, count_traffic, shown

N, EVERYONE, FLOAT = 4, (0, 1, 2, 3), 4


def mine(*shape: int, grad: bool = False) -> torch.Tensor:
    """A tensor of this rank's own."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.rand(shape, generator=generator).requires_grad_(grad)


def each(*shape: int) -> list[torch.Tensor]:
    """A tensor for each rank, to send or to receive into."""
    return list(mine(N, *shape))


def filled(call, out):
    """`out`, after a call has filled it in."""
    call(out)
    return out


def waited(work):
    work.wait()


def gradient(function, *shape: int) -> list[torch.Tensor]:
    """The result and the gradient of an autograd function of one tensor."""
    x = mine(*shape, grad=True)
    result = function(x)
    result = torch.cat(list(result)) if isinstance(result, (list, tuple)) else result
    (result * 2).sum().backward()
    return [result.detach().clone(), x.grad]


class Doubled(torch.autograd.Function):
    """Communicates in backward alone."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return 2 * gradient


def coalesced(*calls):
    with dist.distributed_c10d._coalescing_manager():
        for call in calls:
            call()


def in_a_batch(rank):
    received = torch.empty(3)
    operations = [dist.P2POp(dist.isend, mine(3), (rank + 1) % N), dist.P2POp(dist.irecv, received, (rank - 1) % N)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def to_the_next(rank):
    received = torch.empty(3)
    receiving = dist.irecv(received, (rank - 1) % N)
    dist.isend(mine(3), (rank + 1) % N).wait()
    receiving.wait()
    return received


def from_0_to_1(rank):
    received = torch.zeros(3)
    if rank == 0:
        dist.send(mine(3), 1)
    elif rank == 1:
        dist.recv(received)  # from any
    return received


def scattered(root, rank):
    return filled(lambda out: dist.scatter(out, each(3) if rank == root else None, src=root), torch.empty(3))


def gathered(root, rank):
    return filled(lambda out: dist.gather(mine(3), out or None, dst=root), each(3) if rank == root else [])


def functional(name, *args, **kwargs):
    """The result of a functional collective on `args`, on all ranks."""
    import torch.distributed._functional_collectives as collectives

    if not hasattr(collectives, name):  # an older PyTorch's names
        whole = "all_gather_into_tensor" if "gather" in name and "coalesced" in name else "all_gather_tensor"
        name = name.replace("all_gather_single", whole).replace("reduce_scatter_single", "reduce_scatter_tensor")
    result = getattr(collectives, name)(*args, group=dist.group.WORLD, **kwargs)
    return [collectives.wait_tensor(part) for part in (result if isinstance(result, list) else [result])]


def differentiable(name, *args, **kwargs):
    """The same of an autograd version, as a function of a tensor."""
    return lambda x: functional(name, x, *args, **kwargs)


def older(name, *args):
    """A function of torch.distributed.nn, as a function of a tensor. Its default group is the one of its import."""
    import torch.distributed.nn.functional as functions

    return lambda x: getattr(functions, name)(x, *args, group=dist.group.WORLD)


def sent_if(condition, size: int) -> int:
    return size if condition else 0


def rooted(root: int, *names: str):
    """The expectation for a function with a root, 12 bytes a rank, and for its backward, which goes the other way."""
    size = {"broadcast": 36, "scatter": 36}
    return lambda r: [(name, sent_if((r == root) == (name in size), size.get(name, 12)), root) for name in names]


ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL = (
    (name, size) for name, size in
    (("all_reduce", 18), ("all_gather", 36), ("reduce_scatter", 36), ("all_to_all", 36))
)  # fmt: skip
NEXT = lambda r: [("send", 12, (r + 1) % N), ("recv", 0, (r - 1) % N)]  # noqa: E731

# What a rank calls, which returns all that it computes, and what it must be booked at: (collective, bytes, peer).
# A tensor of a rank has 3 floats, 12 bytes; a long one has 12.
TRIALS = {
    "all_reduce": (lambda r: filled(dist.all_reduce, mine(3)), [ALL_REDUCE]),
    "all_reduce async": (
        lambda r: filled(lambda x: waited(dist.all_reduce(x, async_op=True)), mine(3)), [ALL_REDUCE]),
    "all_reduce max": (lambda r: filled(lambda x: dist.all_reduce(x, dist.ReduceOp.MAX), mine(3)), [ALL_REDUCE]),
    "all_reduce bfloat16": (lambda r: filled(dist.all_reduce, mine(2).bfloat16()), [("all_reduce", 6)]),
    "all_reduce of a transposed view": (lambda r: filled(dist.all_reduce, mine(3, 2).t()), [("all_reduce", 36)]),
    "all_reduce of nothing": (lambda r: filled(dist.all_reduce, mine(0)), [("all_reduce", 0)]),
    "all_reduce in inference mode": (
        lambda r: torch.inference_mode()(lambda: filled(dist.all_reduce, mine(3)).numpy())(), [ALL_REDUCE]),
    "the group's own method": (
        lambda r: filled(lambda x: waited(dist.group.WORLD.allreduce([x])), mine(3)), [ALL_REDUCE]),
    "all_reduce_coalesced": (
        lambda r: filled(dist.all_reduce_coalesced, [mine(3), mine(1)]), [("all_reduce", 24)]),
    "broadcast": (
        lambda r: filled(lambda x: dist.broadcast(x, 2), mine(3)),
        lambda r: [("broadcast", sent_if(r == 2, 36), 2)]),
    "reduce": (
        lambda r: [filled(lambda x: dist.reduce(x, 2), mine(3))][r != 2:],  # elsewhere the result may be anything
        lambda r: [("reduce", sent_if(r != 2, 12), 2)]),
    "all_gather": (lambda r: filled(lambda out: dist.all_gather(out, mine(3)), each(3)), [ALL_GATHER]),
    "all_gather_into_tensor": (
        lambda r: filled(lambda out: all_gather_into_tensor(out, mine(3)), torch.empty(12)), [ALL_GATHER]),
    "all_gather_coalesced": (
        lambda r: filled(lambda out: dist.all_gather_coalesced(out, [mine(1), mine(2)]), [[mine(1), mine(2)] for _ in
                                                                                         range(N)]), [ALL_GATHER]),
    "reduce_scatter": (
        lambda r: filled(lambda out: dist.reduce_scatter(out, each(3)), torch.empty(3)), [REDUCE_SCATTER]),
    "reduce_scatter of uneven pieces": (
        lambda r: filled(lambda out: dist.reduce_scatter(out, [mine(k) for k in range(N)]), torch.empty(r)),
        lambda r: [("reduce_scatter", FLOAT * (6 - r))]),
    "reduce_scatter_tensor": (
        lambda r: filled(lambda out: reduce_scatter_tensor(out, mine(12)), torch.empty(3)), [REDUCE_SCATTER]),
    "gather": (lambda r: gathered(1, r), lambda r: [("gather", sent_if(r != 1, 12), 1)]),
    "scatter": (lambda r: scattered(1, r), lambda r: [("scatter", sent_if(r == 1, 36), 1)]),
    "all_to_all": (lambda r: filled(lambda out: dist.all_to_all(out, each(3)), each(3)), [ALL_TO_ALL]),
    "all_to_all_single": (
        lambda r: filled(lambda out: dist.all_to_all_single(out, mine(12)), torch.empty(12)), [ALL_TO_ALL]),
    "all_to_all_single of uneven pieces, in rows": (
        lambda r: filled(lambda out: dist.all_to_all_single(out, mine(6, 5), [r] * N, list(range(N))),
                         torch.empty(4 * r, 5)),
        lambda r: [("all_to_all", 5 * FLOAT * (6 - r))]),
    "all_to_all_single where one rank sends nothing": (
        lambda r: filled(lambda out: dist.all_to_all_single(
            out, mine(4 if r else 0), [0, 1, 1, 1], [1 if r else 0] * N), torch.empty(3)),
        lambda r: [("all_to_all", 12 if r else 0)]),
    "barrier": (lambda r: dist.barrier(), [("barrier", 0)]),
    "monitored_barrier": (lambda r: dist.monitored_barrier(), [("barrier", 0)]),
    "send and recv": (
        from_0_to_1, lambda r: [[("send", 12, 1)], [("recv", 0)], [], []][r]),
    "isend and irecv": (to_the_next, lambda r: NEXT(r)[::-1]),
    "batch_isend_irecv": (in_a_batch, NEXT),
    "coalesced all_reduces": (
        lambda r: [filled(lambda x: coalesced(lambda: dist.all_reduce(x[0]), lambda: dist.all_reduce(x[1])),
                          [mine(3), mine(1)])], [("all_reduce", 24)]),
    "coalesced all_gathers": (
        lambda r: filled(lambda out: coalesced(*(lambda o=o: all_gather_into_tensor(o, mine(o.numel() // N))
                                                 for o in out)), [mine(4), mine(8)]), [ALL_GATHER]),
    "coalesced reduce_scatters": (
        lambda r: filled(lambda out: coalesced(*(lambda o=o: reduce_scatter_tensor(o, mine(o.numel() * N))
                                                 for o in out)), [mine(1), mine(2)]), [REDUCE_SCATTER]),
    "functional all_reduce": (lambda r: functional("all_reduce", mine(3), "sum"), [ALL_REDUCE]),
    "functional all_reduce_coalesced": (
        lambda r: functional("all_reduce_coalesced", [mine(3), mine(1)], "sum"), [("all_reduce", 24)]),
    "functional broadcast": (
        lambda r: functional("broadcast", mine(3), 1), lambda r: [("broadcast", sent_if(r == 1, 36), 1)]),
    "functional all_gather": (lambda r: functional("all_gather_single", mine(3), 0), [ALL_GATHER]),
    "functional all_gather_coalesced": (
        lambda r: functional("all_gather_single_coalesced", [mine(1), mine(2)]), [ALL_GATHER]),
    "functional reduce_scatter": (
        lambda r: functional("reduce_scatter_single", mine(12), "sum", 0), [REDUCE_SCATTER]),
    "functional reduce_scatter_coalesced": (
        lambda r: functional("reduce_scatter_single_coalesced", [mine(4), mine(8)], "sum", [0, 0]), [REDUCE_SCATTER]),
    "functional all_to_all": (lambda r: functional("all_to_all_single", mine(12), None, None), [ALL_TO_ALL]),
    "functional all_reduce, backward": (
        lambda r: gradient(differentiable("all_reduce", "sum"), 3), [ALL_REDUCE, ALL_REDUCE]),
    "functional all_gather, backward": (
        lambda r: gradient(differentiable("all_gather_single_autograd", 0), 3), [ALL_GATHER, REDUCE_SCATTER]),
    "functional all_gather for autograd, in inference mode": (
        lambda r: torch.inference_mode()(lambda: functional("all_gather_single_autograd", mine(3), 0)[0].numpy())(),
        [ALL_GATHER]),
    "functional reduce_scatter, backward": (
        lambda r: gradient(differentiable("reduce_scatter_single_autograd", "sum", 0), 12),
        [REDUCE_SCATTER, ALL_GATHER]),
    "functional all_to_all, backward": (
        lambda r: gradient(differentiable("all_to_all_single_autograd", [3] * N, [3] * N), 12),
        [ALL_TO_ALL, ALL_TO_ALL]),
    "nn.all_reduce": (lambda r: gradient(older("all_reduce"), 3), [ALL_REDUCE, ALL_REDUCE]),
    "nn.all_gather": (  # on gloo its backward is a scatter from each rank
        lambda r: gradient(older("all_gather"), 3),
        lambda r: [ALL_GATHER] + [("scatter", sent_if(r == root, 36), root) for root in range(N)]),
    "nn.reduce_scatter": (
        lambda r: gradient(lambda x: older("reduce_scatter", list(x.chunk(N)))(torch.empty(3)), 12),
        [REDUCE_SCATTER, ALL_GATHER]),
    "nn.all_to_all_single": (
        lambda r: gradient(lambda x: older("all_to_all_single", x)(torch.empty(12)), 12), [ALL_TO_ALL, ALL_TO_ALL]),
    "nn.broadcast": (lambda r: gradient(older("broadcast", 1), 3)[:1], rooted(1, "broadcast", "reduce")),
    "nn.gather": (lambda r: gradient(older("gather", 1), 3)[1:], rooted(1, "gather", "scatter")),
    "nn.scatter": (
        lambda r: gradient(lambda x: older("scatter", 1)(list(x.chunk(N))), 12)[:1], rooted(1, "scatter", "gather")),
    "an autograd function of one's own": (lambda r: gradient(Doubled.apply, 3), [ALL_REDUCE]),
}  # fmt: skip
if torch.__version__ < "2.13":  # its gloo has no all_to_all of lists, and this one does not run in inference mode
    del TRIALS["all_to_all"], TRIALS["functional all_gather for autograd, in inference mode"]


def plain(records: list[Record]) -> list[tuple]:
    return [(record.collective, record.bytes, record.peer) for record in records]


def tried() -> dict[str, tuple]:
    """On a rank, for each trial: the records, and whether the results are those without counting, to the bit."""
    warnings.simplefilter("ignore", FutureWarning)  # PyTorch renames some
    found = {}
    for name, (call, _) in TRIALS.items():
        with count_traffic() as traffic:
            counted = call(dist.get_rank())
        calls = traffic.calls
        alone = call(dist.get_rank())
        assert traffic.calls == calls, f"{name} is counted after the end of the with"
        found[name] = traffic.records, torch.equal(flat(alone), flat(counted))
    assert not _get_current_dispatch_mode_stack()
    return found


def flat(results) -> torch.Tensor:
    """All numbers of nested results."""
    if results is None or isinstance(results, (list, tuple)):
        return torch.cat([torch.zeros(0), *(flat(result) for result in results or [])])
    return torch.as_tensor(results).detach().flatten().float()


@pytest.fixture(scope="module")
def found(ranks):
    """What `tried` found, by rank."""
    return ranks(tried)


@pytest.mark.parametrize("name", TRIALS)
def test_every_way_to_communicate_is_counted_and_changes_nothing(found, name):
    expected = TRIALS[name][1]
    for rank in range(N):
        records, same = found[rank][name]
        wanted = expected(rank) if callable(expected) else expected
        assert plain(records) == [(*one, None)[:3] for one in wanted], f"rank {rank}"
        assert {(record.group, record.rank) for record in records} <= {(EVERYONE, rank)}
        assert same, f"rank {rank}: other results while it is counted"


# Classes of PyTorch that communicate by themselves.


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))  # 212 parameters


def phases(wrap) -> list[list[Record]]:
    """On a rank: what a wrapped model sends when it is made, in a forward and in a backward pass."""
    with count_traffic() as made:
        model = wrap(small_model())
    with count_traffic() as forward:
        loss = model(mine(2, 8)).square().sum()
    with count_traffic() as backward:
        loss.backward()
    return [part.records for part in (made, forward, backward)]


def classes() -> dict:
    """On a rank: phases of DistributedDataParallel and fully_shard, records of DTensor's redistribute by placements."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh, found = init_device_mesh("cpu", (N,)), {}
    found["DDP"] = phases(nn.parallel.DistributedDataParallel)
    found["FSDP"] = phases(lambda model: fully_shard(model, mesh=mesh))
    shards = (Partial(), Replicate()), (Partial(), Shard(0)), (Shard(0), Replicate()), (Shard(0), Shard(1))
    for before, after in shards:
        tensor = DTensor.from_local(mine(8, 8), mesh, [before], run_check=False)
        with count_traffic() as traffic:
            result = tensor.redistribute(mesh, [after]).to_local()
            result = result.wait() if hasattr(result, "wait") else result
        found[type(before).__name__, str(after)] = traffic.records
    return found


@pytest.fixture(scope="module")
def by_class(ranks):
    return ranks(classes)


def totals(records: list[Record]) -> dict[str, int]:
    """Bytes by collective."""
    names = sorted({record.collective for record in records})
    return {name: Traffic(records).select(name).bytes for name in names}


def test_distributed_data_parallel_sums_its_gradients_in_backward(by_class):
    for rank, found in enumerate(by_class):
        made, forward, backward = found["DDP"]
        sent = {record.bytes for record in made if record.collective == "broadcast"}  # first their shapes
        assert 3 * 212 * FLOAT in sent if rank == 0 else sent == {0}, "rank 0 sends its parameters"
        assert forward == [] and totals(backward) == {"all_reduce": 2 * 3 * 212 * FLOAT // 4}


def test_fully_shard_gathers_parameters_and_scatters_gradients(by_class):
    for found in by_class:
        _, forward, backward = found["FSDP"]
        each_way = 3 * 212 * FLOAT // 4  # 16, 16, 4 and 4 rows: no shard is padded
        assert totals(forward) == {"all_gather": each_way}
        assert totals(backward)["reduce_scatter"] == each_way


def test_a_dtensor_is_counted_by_what_it_turns_into(by_class):
    whole = 64 * FLOAT  # a rank's local tensor
    expected = {
        ("Partial", "R"): {"all_reduce": 2 * 3 * whole // 4},
        ("Partial", "S(0)"): {"reduce_scatter": 3 * whole // 4},
        ("Shard", "R"): {"all_gather": 3 * whole},
        ("Shard", "S(1)"): {"all_gather": 3 * whole},  # what PyTorch does on a CPU in place of an all-to-all
    }
    for found in by_class:
        assert {key: totals(found[key]) for key in found if isinstance(key, tuple)} == expected


# Groups, order, nesting, objects, and the sum over the ranks.


def other_ways() -> dict:
    """On a rank: records by the name of what was called."""
    rank, found = dist.get_rank(), {}
    pair, three = dist.new_group([1, 3]), new_group(3, 2, 0)

    def counted(name, call):
        with count_traffic() as traffic:
            call()
        found[name] = traffic.records

    if rank in (1, 3):
        counted("pair", lambda: (dist.all_reduce(mine(3), group=pair), dist.broadcast(mine(3), 3, group=pair)))
        counted("pair, group_src", lambda: dist.broadcast(mine(3), group_src=1, group=pair))
        send, receive = (dist.send, dist.recv) if rank == 1 else (dist.recv, dist.send)
        there = {"group_src": 1} if rank == 1 else {"group_dst": 0}
        counted("pair, send", lambda: (send(mine(3), 4 - rank), receive(mine(3), group=pair, **there)))
    if rank != 1:
        counted("three", lambda: (dist.all_gather(each(3)[:3], mine(3), group=three), dist.barrier(three)))
        counted("three, scatter", lambda: dist.scatter(
            torch.empty(3), each(3)[:3] if rank == 2 else None, src=2, group=three))  # fmt: skip
    counted("order", lambda: (dist.barrier(), dist.all_reduce(mine(3)), dist.broadcast(mine(1), 0), dist.barrier()))
    with count_traffic() as outer:
        dist.barrier()
        with count_traffic() as inner:
            dist.all_reduce(mine(3))
        dist.broadcast(mine(1), 0)
    found["outer"], found["inner"] = outer.records, inner.records
    try:
        with count_traffic() as broken:
            dist.barrier()
            raise KeyError
    except KeyError:
        found["broken"] = broken.records
    dist.barrier()
    objects = [None] * N
    counted("all_gather_object", lambda: dist.all_gather_object(objects, "x" * 10**rank))
    found["objects"] = [len(received) for received in objects]
    counted("broadcast_object_list", lambda: dist.broadcast_object_list(["a", {1: 2}], 1))
    for name, ours, theirs in (
        ("all_reduce", ring_all_reduce, dist.all_reduce),
        ("broadcast", lambda x: tree_broadcast(x, 2), lambda x: dist.broadcast(x, 2)),
        ("reduce_scatter", ring_reduce_scatter, lambda x: reduce_scatter_tensor(torch.empty(6), x)),
        ("all_gather", ring_all_gather, lambda x: all_gather_into_tensor(x, mine(6))),
    ):
        counted(f"ours, {name}", lambda ours=ours: ours(mine(24)))
        counted(f"theirs, {name}", lambda theirs=theirs: theirs(mine(24)))
    return found


@pytest.fixture(scope="module")
def others(ranks):
    return ranks(other_ways)


def test_a_subgroup_is_told_by_its_global_ranks_and_so_are_peers(others):
    for rank in (1, 3):
        pair = others[rank]["pair"]
        from_3 = Record("broadcast", (1, 3), rank, 12 * (rank == 3), 3)
        assert pair == [Record("all_reduce", (1, 3), rank, 12, None), from_3]
        assert others[rank]["pair, group_src"] == pair[1:]
    sent, received = [Record("send", EVERYONE, 1, 12, 3)], [Record("recv", EVERYONE, 3, 0, 1)]
    assert others[1]["pair, send"] == [*sent, Record("recv", (1, 3), 1, 0, 3)]
    assert others[3]["pair, send"] == [*received, Record("send", (1, 3), 3, 12, 1)]
    for rank in (0, 2, 3):
        gathering, barrier = others[rank]["three"]
        three = (3, 2, 0) if KEPT else (0, 2, 3)
        assert gathering == Record("all_gather", three, rank, 24, None)
        assert barrier == Record("barrier", three, rank, 0, None)
        (scatter,) = others[rank]["three, scatter"]
        assert scatter[2:] == (rank, sent_if(rank == 2, 24), 2)


def test_records_come_in_the_order_of_issue_and_both_of_two_nested_counts_see_a_call(others):
    def names(records):
        return [record.collective for record in records]

    for found in others:
        assert names(found["order"]) == ["barrier", "all_reduce", "broadcast", "barrier"]
        assert names(found["inner"]) == ["all_reduce"]
        assert names(found["outer"]) == ["barrier", "all_reduce", "broadcast"]
        assert names(found["broken"]) == ["barrier"], "an error ends the count"


def test_objects_are_counted_as_the_bytes_that_they_become(others):
    for rank, found in enumerate(others):
        sizes, objects = found["all_gather_object"]
        assert sizes.bytes == 3 * 8 and objects.bytes % 3 == 0 and objects.bytes // 3 > 1000, "as long as the longest"
        assert found["objects"] == [1, 10, 100, 1000]
        assert {record.collective for record in found["broadcast_object_list"]} == {"broadcast"}
        assert bool(sum(record.bytes for record in found["broadcast_object_list"])) == (rank == 1)


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "reduce_scatter", "all_gather"])
def test_a_collective_is_booked_at_what_our_own_sends_of_it_add_up_to(others, name):
    ours, theirs = ([Traffic(found[f"{whose}, {name}"]) for found in others] for whose in ("ours", "theirs"))
    assert sum(each.select("send").bytes for each in ours) == sum(each.bytes for each in theirs) > 0
    if name != "broadcast":
        assert [each.bytes for each in ours] == [each.bytes for each in theirs]


# Without other ranks.


def test_a_group_that_only_pretends_is_counted_and_another_thread_is_not():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=512)
    try:
        with count_traffic() as traffic:
            dist.all_reduce(torch.empty(1024))
            dist.broadcast(torch.empty(1024), 3)
            thread = threading.Thread(target=lambda: dist.all_reduce(torch.empty(1024)))
            thread.start()
            thread.join()
        group = tuple(range(512))
        assert traffic.records == [Record("all_reduce", group, 3, 2 * 511 * 8, None),
                                   Record("broadcast", group, 3, 511 * 4096, 3)]  # fmt: skip
    finally:
        dist.destroy_process_group()


def test_its_first_use_does_not_import_dynamo():
    """Which takes seconds, on each rank."""
    program = """
        import sys, torch, torch.distributed as dist
        from course_lib.collectives.traffic import count_traffic
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with count_traffic() as traffic:
            dist.all_reduce(torch.ones(3))
            torch.ones(3, requires_grad=True).sum().backward()
        assert traffic.calls == 1
        assert "torch._dynamo" not in sys.modules
        dist.destroy_process_group()
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


RECORDS = [
    Record("all_reduce", (0, 1, 2, 3), 0, 100, None),
    Record("send", (0, 1, 2, 3), 0, 10, 1),
    Record("all_reduce", (0, 1, 2, 3), 1, 100, None),
    Record("all_reduce", (0, 2), 0, 2_000_000, None),
]


def test_traffic_selects_adds_up_and_shows_itself():
    traffic = Traffic(RECORDS)
    assert (traffic.calls, traffic.bytes) == (4, 2_000_210)
    assert traffic.select("all_reduce", rank=0).records == [RECORDS[0], RECORDS[3]]
    assert traffic.select(group=[0, 2]).records == RECORDS[3:]
    assert traffic.select(rank=0).select("send").bytes == 10
    assert traffic.select("gather").calls == traffic.select("gather").bytes == 0
    assert sum([Traffic(RECORDS[:1]), Traffic(RECORDS[1:])], Traffic()).records == RECORDS
    lines = str(traffic).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["all_reduce", "0-3", "0", "1", "100"],
        ["all_reduce", "0-3", "1", "1", "100"],
        ["all_reduce", "0,2", "0", "1", "2,000,000"],
        ["send", "0-3", "0", "1", "10"],
    ] and len({len(line) for line in lines}) == 1
    Traffic().records.append(RECORDS[0])
    assert Traffic().records == [], "each has a list of its own"


def test_a_group_is_shown_in_15_characters_or_fewer():
    groups = [(0,), (3, 4), (0, 1, 2), (1, 3, 5), tuple(range(0, 64, 2)), tuple(range(1000, 1008)), (2, 1, 0)]
    texts = [shown(group) for group in groups]
    assert texts[:4] == ["0", "3,4", "0-2", "1,3,5"] and texts[5:] == ["1000-1007", "2,1,0"]
    assert texts[4] == "0,2,4,6,8,10..." and max(map(len, texts)) <= 15
