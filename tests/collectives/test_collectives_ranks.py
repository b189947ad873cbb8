"""course_lib.collectives.rings on two to four ranks: values against torch.distributed, bytes, memory, the launcher.
CPU.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from calls import new_group, peak_bytes
from course_lib.collectives.bandwidth import sweep, time_collective
from course_lib.collectives.rings import (
    CHUNK,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_broadcast,
    two_level_all_reduce,
)
from course_lib.collectives.traffic import count_traffic

ROOT = Path(__file__).resolve().parents[2]
GROUPS = [(0, 1), (0, 1, 2), (0, 1, 2, 3), (1, 3), (3, 1, 0), (2,)]
SHAPES = [(12,), (10,), (1,), (0,), (3, 5), (2, 1, 7), ()]  # even, uneven, fewer than ranks, none, of more dimensions
TENSORS = [(shape, torch.float32) for shape in SHAPES]
TENSORS += [(shape, dtype) for shape in SHAPES[1:3] for dtype in (torch.float64, torch.int64, torch.bfloat16)]
FUNCTIONS = ["tree_broadcast", "ring_reduce_scatter", "ring_all_gather", "ring_all_reduce"]
GUARD, UNTOUCHED = 5, 77


def guarded(rank: int, shape: tuple, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's tensor, whole numbers whose sums are exact, as a view between guards; and all of that memory."""
    numel = math.prod(shape)
    memory = torch.full((numel + 2 * GUARD,), UNTOUCHED, dtype=dtype)
    memory[GUARD : GUARD + numel] = (torch.arange(numel) * (rank + 1) % 11).to(dtype)
    return memory[GUARD : GUARD + numel].view(shape), memory


def pieces_of(tensor: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
    return tensor.view(-1).tensor_split(n)


def problems(function: str, group, members: tuple, shape: tuple, dtype: torch.dtype) -> list[str]:
    """On a rank: what is wrong with a function on one tensor, for every source."""
    n, place = len(members), members.index(dist.get_rank())
    found = []
    for src in range(n if function == "tree_broadcast" else 1):
        tensor, memory = guarded(place, shape, dtype)
        expected = tensor.clone()
        with count_traffic() as sent:
            if function == "tree_broadcast":
                tree_broadcast(tensor, src, group)
            elif function == "ring_reduce_scatter":
                piece = ring_reduce_scatter(tensor, group)
            elif function == "ring_all_gather":
                ring_all_gather(tensor, group)
            else:
                ring_all_reduce(tensor, group)
        own, following = (pieces_of(tensor, n)[r % n] for r in (place, place + 1))
        rings = {"ring_reduce_scatter": [own], "ring_all_gather": [following], "ring_all_reduce": [own, following]}
        if function == "tree_broadcast":
            dist.broadcast(expected, members[src], group)
            after = (place - src) % n  # a rank sends at each power of two that is above its place and leads to another
            messages = sum(after < 2**bit and after + 2**bit < n for bit in range(n.bit_length()))
            enough = messages * tensor.nbytes
        else:
            messages = (n - 1) * len(rings[function])
            enough = sum(tensor.nbytes - kept.nbytes for kept in rings[function])
            if function == "ring_all_gather":
                for r, other in enumerate(pieces_of(expected, n)):
                    other.mul_(r == place)
            dist.all_reduce(expected, group=group)
        result = tensor
        if function == "ring_reduce_scatter":
            result, expected = piece, pieces_of(expected, n)[place]
            found += ["not a view of the tensor"] * (piece.data_ptr() != own.data_ptr())
        sends, receives = sent.select("send", group=members), sent.select("recv", group=members)
        found += ["wrong values"] * (not torch.equal(result, expected) or result.dtype != dtype)
        found += ["neighbours touched"] * bool((torch.cat([memory[:GUARD], memory[-GUARD:]]) != UNTOUCHED).any())
        found += [f"{sends.calls} messages, not {messages}"] * (sends.calls != messages)
        found += [f"{sent.bytes} bytes, not {enough}"] * (sent.bytes != enough)
        found += ["other calls than send and recv"] * (sent.calls != sends.calls + receives.calls)
        if function != "tree_broadcast":
            peers = {record.peer for record in sends.records}, {record.peer for record in receives.records}
            around = {members[(place + 1) % n]}, {members[place - 1]}
            found += ["not round the ring"] * (n > 1 and peers != around)
    return found


def all_problems() -> dict:
    """On a rank: the problems by function, group, shape and dtype."""
    groups = {members: new_group(*members) for members in GROUPS}
    return {
        (function, members): [
            f"{problem}: {shape} {dtype}"
            for shape, dtype in TENSORS
            for problem in problems(function, group, tuple(dist.get_process_group_ranks(group)), shape, dtype)
        ]
        for members, group in groups.items()
        if dist.get_rank() in members
        for function in FUNCTIONS
    }


@pytest.fixture(scope="module")
def found(ranks):
    return ranks(all_problems)


@pytest.mark.parametrize("members", GROUPS, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_it_does_what_pytorch_does_with_the_bytes_it_says_and_touches_nothing_else(found, function, members):
    """Every shape and dtype, and every source of a broadcast."""
    by_rank = {rank: found[rank][function, members] for rank in members}
    assert by_rank == {rank: [] for rank in members}


def real_sums() -> list[bool]:
    """On a rank, for each dtype: whether a sum is close to PyTorch's, and whether it is the same as rank 0's."""
    close = []
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-15), (torch.bfloat16, 2e-2)):
        ours = torch.rand(1001, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64).to(dtype)
        theirs = ours.clone()
        ring_all_reduce(ours)
        dist.all_reduce(theirs)
        from_0 = ours.clone()
        dist.broadcast(from_0, 0)
        close += [torch.allclose(ours, theirs, rtol=tolerance), torch.equal(ours, from_0)]
    return close


def test_sums_of_real_numbers_are_pytorchs_up_to_rounding_and_the_same_on_all_ranks(ranks):
    assert ranks(real_sums) == [[True] * 6] * 4


def refused() -> list[str]:
    """On a rank: the errors for a tensor whose memory is not in one piece."""
    tensor, said = torch.arange(12.0).view(3, 4).t(), []
    for function in (ring_all_reduce, ring_reduce_scatter, ring_all_gather, tree_broadcast):
        try:
            function(tensor)
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
    return said + [torch.equal(tensor, torch.arange(12.0).view(3, 4).t())]


def test_a_tensor_that_is_not_contiguous_is_refused_and_left_alone(ranks):
    for *said, unchanged in ranks(refused):
        assert len(said) == 4 and unchanged
        assert all("contiguous" in words or "view size" in words for words in said), said


def extra_memory(function, numel: int) -> int | None:
    """On rank 0: bytes at the peak of what a function allocates. The others only take part."""
    tensor = torch.zeros(numel)
    function(tensor)
    if dist.get_rank() > 0:
        return function(tensor)
    return peak_bytes(lambda: function(tensor))


def memory_of_each() -> list[int | None]:
    return [extra_memory(function, 4 * 25_001) for function in (ring_all_reduce, ring_all_gather, tree_broadcast)]


def test_a_ring_needs_room_for_one_piece_more_and_the_others_for_nothing(ranks):
    all_reduce, all_gather, broadcast = ranks(memory_of_each)[0]
    assert 25_001 * 4 <= all_reduce <= 25_001 * 4 + 64, "one piece, rounded up to what the allocator hands out"
    assert all_gather == broadcast == 0


def memory_of_a_large_one() -> int | None:
    return extra_memory(ring_all_reduce, 3 * CHUNK)


def test_the_buffer_of_an_all_reduce_does_not_grow_with_the_tensor(ranks):
    assert ranks(memory_of_a_large_one)[0] <= CHUNK + 64, "a fourth of a chunk, 4 bytes an element"


def two_levels(nodes: list[list[int]]) -> list[bool]:
    """On a rank, for each tensor: whether a sum in two levels is PyTorch's, and touches no memory beside the tensor."""
    places = [list(ranks) for ranks in zip(*nodes, strict=True)]
    groups = {tuple(members): new_group(*members) for members in [*nodes, *places]}
    inside, across = (next(tuple(each) for each in lists if dist.get_rank() in each) for lists in (nodes, places))
    found = []
    for shape, dtype in TENSORS:
        tensor, memory = guarded(dist.get_rank(), shape, dtype)
        expected = tensor.clone()
        two_level_all_reduce(tensor, groups[inside], groups[across])
        dist.all_reduce(expected)
        untouched = (torch.cat([memory[:GUARD], memory[-GUARD:]]) == UNTOUCHED).all()
        found.append(torch.equal(tensor, expected) and bool(untouched))
    return found


@pytest.mark.parametrize("nodes", [[[0, 1], [2, 3]], [[3, 0], [1, 2]], [[0, 1, 2, 3]], [[0], [1], [2], [3]]], ids=str)
def test_a_sum_in_two_levels_is_pytorchs(ranks, nodes):
    assert ranks(two_levels, nodes) == [[True] * len(TENSORS)] * 4


# Timing.


def timed() -> list[dict]:
    """On a rank: records of small tensors, on all ranks and on two of them."""
    pair = new_group(3, 1)
    records = sweep(["all_reduce", "all_gather", "reduce_scatter"], [4099, 1])
    with count_traffic() as traffic:
        records.append(time_collective("all_gather", 2**16))
    measured, rounds = traffic.select("all_gather"), traffic.select("barrier").calls
    assert rounds == 24 and measured.calls % rounds == 0, "a round to warm up, and 23"
    assert measured.bytes == measured.calls * 3 * 2**14, "a piece to each of the others"
    if dist.get_rank() in (1, 3):
        records.append(time_collective("all_reduce", 4096, pair))
    return records


def test_records_are_right_and_the_same_on_all_ranks(ranks):
    by_rank = ranks(timed)
    for records in by_rank:
        assert records[:7] == by_rank[0][:7]
        assert [record["bytes"] for record in records[:7]] == 3 * [4096, 16] + [2**16]
        for record in records:
            assert list(record) == ["collective", "ranks", "bytes", "seconds", "algbw", "busbw"]
            n, name = record["ranks"], record["collective"]
            factor = (2 if name == "all_reduce" else 1) * (n - 1) / n
            assert record["seconds"] > 1e-6
            assert record["algbw"] == pytest.approx(record["bytes"] / record["seconds"], rel=1e-12)
            assert record["busbw"] == pytest.approx(record["algbw"] * factor, rel=1e-12)
    assert by_rank[1][7] == by_rank[3][7] and by_rank[1][7]["ranks"] == 2
    assert len(by_rank[0]) == len(by_rank[2]) == 7


def test_the_launcher_runs_the_sweep_on_four_processes(tmp_path):
    """--no-export: a test leaves the library as it is."""
    command = [sys.executable, "scripts/launch_nb_torchrun.py", "notebooks/03_collectives.ipynb", "--no-export"]
    out = tmp_path / "sweep.json"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    ended = subprocess.run(
        [*command, "--", "--max-kib", "16", "--out", str(out)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    written = json.loads(out.read_text())
    assert [record["ranks"] for record in written["records"]] == [4] * 6
    assert {record["bytes"] for record in written["records"]} == {4096, 16384} and written["backend"] == "gloo"
    lines = [line for line in ended.stdout.splitlines() if "alpha" not in line]
    assert sum("4 ranks, gloo, float32" in line for line in lines) == 1, "rank 0 alone prints"
    assert sum(line.split()[0] in ("all_reduce", "all_gather", "reduce_scatter") for line in lines if line) == 6
    assert sum("alpha" in line for line in ended.stdout.splitlines()) == 3
