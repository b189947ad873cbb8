"""Entry point of `python -m course_lib.best_config` (`program`) and `... calibrate RUNS.csv` (`calibrate_program`)."""

from __future__ import annotations

import os
import sys


def run(argv: list[str]) -> None:
    """Run the planner, or the calibration, with these options."""
    if argv[:1] == ["calibrate"]:
        from course_lib.best_config import calibrate_program

        calibrate_program.main(argv[1:])
    else:
        from course_lib.best_config import program

        program.main(argv)


if __name__ == "__main__":
    try:
        try:
            run(sys.argv[1:])
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its end
        sys.exit(1)
