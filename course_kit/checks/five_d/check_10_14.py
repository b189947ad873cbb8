"""Check of exercise 10.14: `straggler_delay` on made-up records of four ranks."""

from __future__ import annotations

from course_lib.five_d import flight_records
from course_lib.five_d.flight_records import CollectiveRecord

GROUPS = {"1": [0, 1, 2, 3], "2": [0, 1], "3": [2]}


def at(number: int, ms: int, group: str = "1") -> CollectiveRecord:
    """Return the record of a collective that a rank asked for at this time."""
    return CollectiveRecord(group, number, "all_reduce", ((4,),), ms * 1_000_000)


def check() -> None:
    """Assert the seconds that others waited for each rank."""
    came = {0: [at(1, 0), at(2, 100)], 1: [at(1, 2), at(2, 101)], 2: [at(1, 40), at(2, 160)], 3: [at(1, 4), at(2, 103)]}
    came[0] += [at(1, 200, "2")]
    came[1] += [at(1, 230, "2")]
    came[2] += [at(1, 999, "3")]
    result = flight_records.straggler_delay(GROUPS, came)
    wanted = {0: 0.0, 1: 0.015, 2: (40 - 3 + 160 - 102) / 1e3, 3: 0.0}
    assert set(result) == {0, 1, 2, 3}, f"every rank should be there: {result}"
    for rank, seconds in wanted.items():
        assert abs(result[rank] - seconds) < 1e-9, (
            f"rank {rank} made others wait {seconds} s, and straggler_delay says {result[rank]}"
        )
    late = flight_records.straggler_delay(
        {"4": [5, 7, 9]}, {5: [at(1, 0, "4")], 7: [at(1, 0, "4")], 9: [at(1, 70, "4")]}
    )
    assert set(late) == {5, 7, 9} and abs(late[9] - 0.07) < 1e-9, f"group [5, 7, 9]: rank 9 is 70 ms late: {late}"
    waits = flight_records.straggler_delay(GROUPS, {0: [at(7, 0)], 1: [at(7, 50)], 2: [], 3: [at(7, 10)]})
    assert set(waits.values()) == {0.0}, "a collective that rank 2 has not reached yet does not count"
