"""course_lib.five_d.flight_records on made-up records, and on four ranks that hang or lag. CPU, gloo."""

import json
import time

import pytest
import torch
import torch.distributed as dist

from course_kit.ranks import Ranks, RanksHung
from course_lib.collectives.into_tensor import all_gather_into_tensor
from course_lib.five_d.flight_records import (
    CollectiveRecord,
    Watchdog,
    described,
    dump_records,
    find_desync,
    read_records,
    straggler_delay,
)
from course_lib.five_d.layouts import Layout
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import parallelize
from course_lib.single_gpu.model import ModelConfig

GROUPS = {"0": [0, 1, 2, 3], "1": [0, 1], "2": [2, 3], "3": [0], "4": [1], "5": [2], "6": [3]}


def flights(group: str, names: str, first: int = 1, numel: int = 8) -> list[CollectiveRecord]:
    """Collectives of a group, numbered from `first`."""
    words = enumerate(names.split(), first)
    return [CollectiveRecord(group, number, name, ((numel,),), number * 10**9) for number, name in words]


def in_step() -> dict[int, list[CollectiveRecord]]:
    """All have come to the same; all-to-alls have sizes of their own."""
    records = {rank: flights("0", "broadcast all_reduce all_gather") for rank in range(4)}
    for rank in range(4):
        records[rank] += flights("12"[rank // 2], "all_to_all all_reduce all_to_all")
        records[rank] = [f._replace(sizes=((3 + rank,),)) if f.name == "all_to_all" else f for f in records[rank]]
        records[rank] += flights(str(3 + rank), "all_reduce " * rank)
    return records


def test_ranks_in_step():
    assert find_desync(GROUPS, in_step()) == []
    assert find_desync(GROUPS, {rank: [] for rank in range(4)}) == []
    assert find_desync({}, {}) == []


def test_a_rank_that_has_not_come():
    records = in_step()
    del records[2][2]  # its last one over all ranks
    assert find_desync(GROUPS, records) == [
        "group [0, 1, 2, 3], number 3: [0, 1, 3] in all_gather [[8]]; not there: [2]"
    ]
    records[1].remove(next(flight for flight in records[1] if (flight.group, flight.number) == ("1", 3)))
    (_, second) = find_desync(GROUPS, records)
    assert second == "group [0, 1], number 3: [0] in all_to_all; not there: [1]"


def test_one_rank_is_ahead_by_many():
    """The first collective that the others lack is named, not the last."""
    records = in_step()
    records[3] += flights("0", "reduce all_reduce all_reduce", 4)
    assert find_desync(GROUPS, records) == ["group [0, 1, 2, 3], number 4: [3] in reduce [[8]]; not there: [0, 1, 2]"]


def test_collectives_in_another_order():
    records = in_step()
    records[1][1:3] = flights("0", "all_gather all_reduce", 2)
    (line,) = find_desync(GROUPS, records)
    assert line == "group [0, 1, 2, 3], number 2: [0, 2, 3] in all_reduce [[8]]; [1] in all_gather [[8]]"


def test_another_size():
    records = in_step()
    records[3][1] = flights("0", "all_reduce", 2, numel=9)[0]
    (line,) = find_desync(GROUPS, records)
    assert line == "group [0, 1, 2, 3], number 2: [0, 1, 2] in all_reduce [[8]]; [3] in all_reduce [[9]]"


def test_rings_that_have_lost_their_beginning():
    """Each buffer begins elsewhere; what only some of them still have says nothing."""
    records = {rank: flights("0", "all_reduce " * (20 - 3 * rank), 1 + 3 * rank) for rank in range(4)}
    assert find_desync(GROUPS, records) == []
    records[0] = records[0][:-1]
    (line,) = find_desync(GROUPS, records)
    assert line.endswith("number 20: [1, 2, 3] in all_reduce [[8]]; not there: [0]")
    records = {rank: flights("0", "all_reduce " * 10, 50) for rank in range(3)} | {3: flights("0", "all_reduce " * 10)}
    (line,) = find_desync(GROUPS, records)
    assert line.endswith("number 50: [0, 1, 2] in all_reduce [[8]]; not there: [3]")


def test_a_ring_that_has_lost_all_of_a_group():
    """Rank 0 has come to as many collectives of two ranks as rank 1, before all that its buffer still has."""
    records = {rank: flights("0", "all_reduce " * 10, 50) for rank in range(4)}
    records[1] = flights("1", "all_gather", 49) + records[1][1:]
    assert find_desync(GROUPS, records) == []


def test_a_rank_without_a_file():
    records = in_step()
    del records[3]
    assert find_desync(GROUPS, records) == [
        "group [0, 1, 2, 3], number 1: [0, 1, 2] in broadcast [[8]]; not there: [3]",
        "group [2, 3], number 1: [2] in all_to_all; not there: [3]",
    ]


def test_described_leaves_out_sizes_that_may_differ():
    assert described(flights("0", "all_to_all_single")[0]) == "all_to_all_single"
    assert described(CollectiveRecord("0", 1, "all_reduce", ((2, 3), (4,)), 0)) == "all_reduce [[2, 3], [4]]"


def test_lateness_is_what_the_last_one_comes_after_the_median():
    records = {
        rank: [CollectiveRecord("0", 1, "all_reduce", ((1,),), at * 10**9)] for rank, at in enumerate((10, 10, 11, 15))
    }
    records[0] += flights("1", "all_reduce")  # rank 1 has not come: nobody knows when it will
    records[1] += flights("4", "all_reduce")  # alone
    assert straggler_delay(GROUPS, records) == {0: 0, 1: 0, 2: 0, 3: pytest.approx(4.5)}
    records[1] += [flights("1", "all_reduce")[0]._replace(time_ns=2 * 10**9)]
    assert straggler_delay(GROUPS, records)[1] == pytest.approx(0.5)  # of two, half of what is between them


# On ranks.


@pytest.fixture
def recorded(monkeypatch):
    """Four ranks whose collectives are recorded: the variable is there before their groups are."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "50")
    with Ranks(4, "gloo", timeout_s=30) as four:
        yield four


def dumped_steps(folder: str, steps: int, seconds: float = 0.0) -> None:
    """On a rank: collectives of many kinds over all ranks and over two; rank 2 is `seconds` late for each step."""
    rank, pair = dist.get_rank(), dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0]
    for _ in range(steps):
        time.sleep(seconds * (rank == 2))
        dist.all_reduce(torch.ones(3))
        all_gather_into_tensor(torch.zeros(8), torch.ones(2))
        splits = [1, 2] if pair.rank() == 0 else [3, 4]
        received = torch.zeros(4 if pair.rank() == 0 else 6)
        arriving = [1, 3] if pair.rank() == 0 else [2, 4]
        dist.all_to_all_single(received, torch.ones(sum(splits)), arriving, splits, group=pair)
    dump_records(folder)


def hanging(folder: str) -> None:
    """On a rank: before the third all-reduce, in which the others are, rank 3 waits for rank 2 in another group."""
    pair = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0]
    with Watchdog(folder, 60):
        dist.all_reduce(torch.ones(5))
    with Watchdog(folder, 3):
        dist.all_reduce(torch.ones(5))
        if dist.get_rank() == 3:
            all_gather_into_tensor(torch.zeros(4), torch.ones(2), group=pair)
        dist.all_reduce(torch.ones(5))


def test_records_of_real_ranks(recorded, tmp_path):
    """In step, in rings of 50 that have lost their beginning; rank 2 is the one that others wait for. A hang is told in
    two lines.
    """
    quick, hung = tmp_path / "quick", tmp_path / "hung"
    quick.mkdir()
    hung.mkdir()
    recorded(dumped_steps, str(quick), 3, 0.2)
    groups, records = read_records(quick)
    assert sorted(records) == [0, 1, 2, 3] and [0, 1, 2, 3] in groups.values()
    assert {flight.name for flight in records[0]} == {"all_reduce", "all_gather", "all_to_all"}
    assert find_desync(groups, records) == []
    late = straggler_delay(groups, records)
    assert max(late, key=late.get) == 2, late

    recorded(dumped_steps, str(quick), 30)
    groups, records = read_records(quick)
    assert all(len(each) <= 50 and min(f.number for f in each) > 1 for each in records.values())
    assert find_desync(groups, records) == []

    recorded.timeout_s = 10
    with pytest.raises(RanksHung):
        recorded(hanging, str(hung))
    lines = find_desync(*read_records(hung))
    assert len(lines) == 2, lines
    everyone = next(line for line in lines if line.startswith("group [0, 1, 2, 3]"))
    assert everyone.endswith("[0, 1, 2] in all_reduce [[5]]; not there: [3]")
    assert next(line for line in lines if line.startswith("group [2, 3]")).endswith("not there: [2]")


def stepped(folder: str, words: str) -> None:
    """On a rank: two steps of a layout of several dimensions, then its records."""
    config, layout = ModelConfig(2, 16, 4, 2, 20, 97, tied=True), Layout.parse(words)
    mesh = build_mesh(layout)
    parallel = parallelize(config, layout, mesh, lr=1e-3)
    for _ in range(2):
        parallel.step(*torch.randint(97, (2, 2, 8)))
    dump_records(folder)


def test_records_of_a_layout_with_many_groups(recorded, tmp_path):
    """A group has one name on all its ranks, and no other has it; the ranks are in step, though stages differ."""
    for words in ("dp2,tp2,sp,zero1", "pp2,cp2,zero3,keep"):
        recorded(stepped, str(tmp_path), words)
        files = [json.loads(file.read_text()) for file in tmp_path.iterdir()]
        groups, records = read_records(tmp_path)
        assert len(files) == 4 and all(
            groups[name] == file["groups"][name] for file in files for name in file["groups"]
        )
        assert sum(map(len, records.values())) >= 100
        assert find_desync(groups, records) == []


def quick_block(folder: str) -> bool:
    """On a rank: whether the watchdog waits on after its block."""
    with Watchdog(folder, 60) as watchdog:
        dist.all_reduce(torch.ones(1))
    watchdog.timer.join(30)
    return watchdog.timer.is_alive()


def test_a_watchdog_of_a_block_that_ends_writes_nothing(ranks, tmp_path):
    assert ranks(quick_block, str(tmp_path)) == [False] * 4
    assert not list(tmp_path.iterdir())
