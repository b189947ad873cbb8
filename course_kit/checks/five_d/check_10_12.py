"""Check of exercise 10.12: `find_desync` on made-up records of four ranks."""

from __future__ import annotations

from course_lib.five_d import flight_records
from course_lib.five_d.flight_records import CollectiveRecord

GROUPS = {"0": [0, 1, 2, 3], "1": [0, 1], "2": [2, 3], "9": [2]}


def flights(
    *numbers: int, group: str = "1", name: str = "all_reduce", sizes: tuple = ((4,),), at: int = 0
) -> list[CollectiveRecord]:
    """Return records of one rank: these numbers of a group, asked for at this time, in ns."""
    return [CollectiveRecord(group, number, name, sizes, at) for number in numbers]


def check_lost() -> None:
    """Assert that a rank without a record of a group is absent only if its oldest record is older."""
    for oldest, absent in ((900, False), (100, True)):
        later = {rank: flights(1, group="0", at=900) for rank in range(4)}
        records = {0: flights(5, at=500) + later[0], 1: flights(1, group="0", at=oldest), 2: later[2], 3: later[3]}
        message = flight_records.find_desync(GROUPS, records)
        lost = "lost its records of group [0, 1]: its ring begins later than the others' collective"
        why = "missed number 5: its oldest record, of another group, is older" if absent else lost
        assert len(message) == absent, f"rank 1 has {why}; it is{'' if absent else ' not'} absent: {message}"


def check() -> None:
    """Assert the lines for ranks in sync, behind, in another collective, and whose ring has lost records."""
    fine = {rank: flights(1, 2) if rank < 2 else flights(1, 2, 3, group="2") for rank in range(4)}
    fine[2] = fine[2] + flights(1, 2, group="9")
    message = flight_records.find_desync(GROUPS, fine)
    assert message == [], f"all are in sync: {message}"
    message = flight_records.find_desync(GROUPS, fine | {3: flights(1, group="2")})
    assert len(message) == 1, f"only group [2, 3] is out of sync: {message}"
    assert all(spec in message[0] for spec in ("[2, 3]", "number 2", "[2] in", "not there: [3]")), (
        f"group [2, 3], number 2: [2] is in it, [3] is not there: {message}"
    )
    message = flight_records.find_desync(GROUPS, fine | {1: []})
    assert len(message) == 1 and "[1]" in message[0], f"rank 1 has come to nothing: {message}"
    both = flight_records.find_desync(GROUPS, fine | {1: [], 3: flights(1, group="2")})
    assert len(both) == 2, f"two groups are out of sync here, and each has a line: {both}"
    other = fine | {1: flights(1) + flights(2, name="broadcast")}
    message = flight_records.find_desync(GROUPS, other)
    assert len(message) == 1 and "broadcast" in message[0] and "all_reduce" in message[0], (
        f"two different collectives at number 2: {message}"
    )
    everyone = {rank: flights(1, group="0", name=name) for rank, name in enumerate(("all_reduce", "barrier", "", "x"))}
    everyone |= {2: [], 3: flights(1, group="0")}
    message = flight_records.find_desync(GROUPS, everyone)
    specs = ("[0, 3] in all_reduce", "[1] in barrier", "not there: [2]")
    assert len(message) == 1 and all(spec in message[0] for spec in specs), (
        f"0 and 3 are in an all_reduce, 1 in a barrier, and 2 is not there; all of it belongs in the line: {message}"
    )
    check_lost()
    sized = fine | {1: flights(1) + flights(2, sizes=((8,),))}
    assert len(flight_records.find_desync(GROUPS, sized)) == 1, "the same collective with other sizes is a mismatch"
    message = flight_records.find_desync(GROUPS, fine | {0: flights(7, 8, 9), 1: flights(8, 9)})
    assert message == [], f"rank 1 has lost its number 7, not missed it: {message}"
    pair = {rank: flights(*numbers, group="7") for rank, numbers in ((5, (1, 2)), (9, (1,)))}
    message = flight_records.find_desync({"7": [5, 9]}, pair)
    assert len(message) == 1 and "[5, 9]" in message[0] and "not there: [9]" in message[0], (
        f"group [5, 9], number 2: [9] is not there: {message}"
    )
    uneven = fine | {0: flights(1, name="all_to_all"), 1: flights(1, name="all_to_all", sizes=((5,),))}
    assert flight_records.find_desync(GROUPS, uneven) == [], "an all-to-all may have other sizes on each rank"
