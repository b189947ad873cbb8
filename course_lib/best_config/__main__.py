"""`python -m course_lib.best_config`: see `program`; `... calibrate runs.csv --out mine.toml`: `calibrate_program`."""

from __future__ import annotations

import os
import sys


def run(argv: list[str]) -> None:
    """Run the planner, or the calibration, with these options."""
    if argv[:1] == ["calibrate"]:
        from course_lib.best_config.calibrate_program import main

        main(argv[1:])
    else:
        from course_lib.best_config.program import main

        main(argv)


if __name__ == "__main__":
    try:
        try:
            run(sys.argv[1:])
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its end
        sys.exit(1)
