"""Runs of the training program in several layouts, and layouts that it refuses."""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import tempfile
from typing import Any

from course_kit.labs.five_d.models import TINY
from course_kit.ranks import Ranks
from course_lib.five_d import layouts
from course_lib.five_d.layouts import Layout
from course_lib.train import program

WRONG: dict[str, dict[str, Any]] = {  # spec: what else `check_layout` is told
    "dp2,tp2,pp2": {"world_size": 12},
    "tp3": {},
    "pp8": {},
    "dp2,ep2": {},
    "dp4,mb2": {"batch": 12},
    "pp2,interleaved": {"batch": 3},
    "cp2,tp2,sp": {"seq": 30},
    "cp4,tp2,ulysses": {},
}


def refusals() -> dict[str, str]:
    """Return the message of `check_layout` for each of WRONG, by its spec and arguments."""
    messages = {}
    for text, arguments in WRONG.items():
        try:
            layouts.check_layout(TINY, Layout.parse(text), **arguments)
        except ValueError as error:
            asked = " ".join([text, *(f"{name}={value}" for name, value in arguments.items())])
            messages[asked] = str(error)
    return messages


def program_logs(ranks: Ranks, config: str, specs: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    """Run the program in several layouts with the settings of a TOML file; return the lines of its logs, by layout."""
    folder = pathlib.Path(tempfile.mkdtemp())
    (folder / "run.toml").write_text(config)
    logs = {}
    for number, spec in enumerate(specs):
        file = folder / f"{number}.jsonl"
        with contextlib.redirect_stdout(io.StringIO()):
            ranks(program.main, [str(folder / "run.toml"), "--layout", spec, "--out", str(file)])
        logs[spec] = [json.loads(line) for line in file.read_text().splitlines()]
    return logs


def largest_spread(logs: dict[str, list[dict[str, Any]]]) -> float:
    """Return the largest relative difference of a step's loss between the first layout and any other."""
    first, *others = logs.values()
    return max(abs(a["loss"] / b["loss"] - 1) for log in others for a, b in zip(log, first, strict=True))
