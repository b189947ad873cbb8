"""Recorded measurements, from benchmarks/results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def recorded(name: str) -> dict[str, Any]:
    """Return benchmarks/results/`name`.json: the machine, the date, and a row per measurement."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def recorded_on(record: Mapping[str, Any]) -> str:
    """Return the machine, the date and the version of PyTorch of a record."""
    return f"{record['machine']}, {record['date']}, PyTorch {record['torch']}"
