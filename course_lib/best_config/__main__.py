"""`python -m course_lib.best_config`: see `program`."""

from __future__ import annotations

from course_lib.best_config.program import main

if __name__ == "__main__":
    main()
