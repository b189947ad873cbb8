"""Entry point of `python -m course_kit.sweep`."""

from __future__ import annotations

from course_kit.sweep.program import main

main()
