"""What the compiler made of a tile that it has split between two groups of warps."""

import re

from course_kit.gpu.compiled import Compiled


def rows_of_second_group(made: Compiled) -> list[str]:
    """What its rows are counted from, as the compiler's intermediate form writes it: the numbers to which 64, 65, ...
    are added. One that is itself half a tile further on (`arith.addi %x, %c64_i32`) has the rows moved twice.
    """
    second = made.ttgir.partition("partition1(")[2]
    defined = dict(re.findall(r"(%[\w#]+) = (.*)", second))
    found = []
    for text in defined.values():
        sum_of = re.match(r"arith\.addi (%\w+), (%\w+) ", text)
        first, rows = (defined.get(name, "") for name in sum_of.groups()) if sum_of else ("", "")
        if "tt.make_range" in rows and "start = 64" in rows and first.startswith("tt.splat"):
            found.append(defined[first.split()[1]])
    return found


def moved_twice(made: Compiled) -> bool:
    found = rows_of_second_group(made)
    assert found, "no rows of a second group"
    return any(re.match(r"arith\.addi %\w+, %c64_i32", each) for each in found)
