"""The result of a calibration: the constants, how well they are known, and the range that they were fitted on.

    print(calibration)                            each constant: before, fitted, 90% interval; or why it stays
                                                  and the five worst runs, with their lines in the file
    calibration.outside(config, Layout.parse("dp4,tp16,sp"), batch=512, seq=8192)       ["tp 16: fitted on 1 to 8"]

A constant that stays at a wrong value shifts the fitted ones. Their intervals assume that it is known to a factor of 3.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass, field
from typing import Any

from course_lib.best_config.clusters import Cluster
from course_lib.best_config.runs import MeasuredRun, predict
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.config import ModelConfig


@dataclass(frozen=True)
class Constant:
    """A constant of the fit."""

    name: str
    before: float
    value: float
    low: float = math.nan  # 90% interval
    high: float = math.nan
    why: str = ""  # the reason if it keeps its value


def facts(config: ModelConfig, layout: Layout, batch: int, seq: int, nodes: int) -> dict[str, Any]:
    """Return the numbers and settings of a run that may be outside the range that constants were fitted on."""
    degrees = {name: getattr(layout, name) for name in ("dp", "pp", "cp", "tp", "ep")} | {"nodes": nodes}
    batches = {"mb": layout.micro_batch, "micro-batches": batch / (layout.dp * layout.micro_batch)}
    sizes = {"seq": seq, "hidden": config.hidden, "layers": config.layers}
    schedule = layout.schedule if layout.pp > 1 else "1f1b"
    settings = {"zero": str(layout.zero_stage), "recompute": layout.recompute, "schedule": schedule}
    return degrees | batches | sizes | settings


def facts_of(runs: list[MeasuredRun]) -> dict[str, list]:
    """Return the values of each fact among the runs, ascending."""
    of_runs = [facts(run.config, run.layout, run.batch, run.seq, run.nodes) for run in runs]
    return {name: sorted({each[name] for each in of_runs}) for name in of_runs[0]}


@dataclass(frozen=True)
class Row:
    """A run's measured value and the prediction of the fitted constants; seconds, or bytes."""

    where: str
    layout: Layout
    measured: float
    predicted: float

    @property
    def factor(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted


def worst_rows(runs: list[MeasuredRun], cluster: Cluster, what: str, n: int = 5) -> tuple[Row, ...]:
    """Return the n runs whose "step_s" or "peak_bytes" is furthest off, in either direction, the worst first."""
    predicted = getattr(predict(runs, cluster), what).tolist()
    rows = [Row(run.where, run.layout, getattr(run, what), at) for run, at in zip(runs, predicted, strict=True)]
    return tuple(sorted(rows, key=lambda row: -abs(math.log(row.factor)))[:n])


SHOWN = {"step_s": ("step time", 1, "s"), "peak_bytes": ("peak memory", 2**30, "GiB")}  # names in tables, and units


@dataclass(frozen=True)
class Calibration:
    """A cluster whose software's constants were fitted to runs, and how well they are known. Prints as a table."""

    cluster: Cluster
    constants: tuple[Constant, ...]
    runs: int
    errors: dict[str, tuple[float, float]]  # median error of the runs' "tokens/s" and "peak memory", before and after
    ranges: dict[str, list]  # of the runs: the values of each of `facts`
    worst: dict[str, tuple[Row, ...]] = field(default_factory=dict)  # of "step_s" and "peak_bytes"
    failures: dict[str, int] = field(default_factory=dict)  # runs that failed, by MeasuredRun.failure

    @property
    def determined(self) -> list[str]:
        """The constants that the runs determine; the others are the old cluster's."""
        return [constant.name for constant in self.constants if not constant.why]

    def outside(self, config: ModelConfig, layout: Layout, batch: int, seq: int) -> list[str]:
        """Return where a layout is outside the range of the fit, such as "tp 16: fitted on 1 to 8"."""
        nodes, outside = math.ceil(layout.ranks / self.cluster.gpus_per_node), []
        for name, value in facts(config, layout, batch, seq, nodes).items():
            fitted = self.ranges[name]
            if isinstance(value, str) and value not in fitted:
                outside.append(f"{name} {value}: fitted on {name} {', '.join(fitted)}")
            elif not isinstance(value, str) and not fitted[0] <= value <= fitted[-1]:
                ends = f"{fitted[0]:g}" + (f" to {fitted[-1]:g}" if len(fitted) > 1 else "")
                outside.append(f"{name} {value:g}: fitted on {ends}")
        return outside

    def __str__(self) -> str:
        errors = {name: each for name, each in self.errors.items() if each[1] == each[1]}  # without a peak: nan
        off = [f"{name} off by {after:.1%}, before by {before:.1%}" for name, (before, after) in errors.items()]
        lines = [f"fitted to {self.runs} runs (median errors: {'; '.join(off)})", *self.failed_lines()]
        lines.append(f"{'constant':20s}{'before':>12s}{'fitted':>12s}   90% interval")
        for each in self.constants:
            if each.why:
                start = f"{each.name:20s}{each.before:12.4g}{'as before':>12s}   "
                lines += textwrap.wrap(each.why, 120, initial_indent=start, subsequent_indent=" " * len(start))
            elif each.high < 100 * each.value:
                known = f"{each.low:.3g} to {each.high:.3g}"
                lines.append(f"{each.name:20s}{each.before:12.4g}{each.value:12.4g}   {known}")
            else:
                known = "or less" if each.value < each.before else "or more"  # further changes do not show
                lines.append(f"{each.name:20s}{each.before:12.4g}{each.value:12.4g}   {known}")
        return "\n".join([*lines, *self.worst_lines()])

    def failed_lines(self) -> list[str]:
        """Return a line about the runs that failed, if there are any."""
        outcomes = {"oom": "ran out of memory", "": "failed and may have run out of memory"}
        outcomes |= {"other": "failed for other reasons and do not count"}
        counts = [f"{count} {outcomes[failure]}" for failure, count in self.failures.items()]
        return [f"of the others, {'; '.join(counts)}"] if counts else []

    def worst_lines(self) -> list[str]:
        """Return a table of the worst runs for each of "step_s" and "peak_bytes"."""
        lines = []
        for what, rows in self.worst.items():
            (name, unit, symbol), width = SHOWN[what], max([28, *(len(row.where) for row in rows)])
            if rows:
                title = f"worst runs in {name}, {symbol}"
                lines += ["", f"{title:{width}s}{'measured':>12s}{'predicted':>12s}{'factor':>9s}  layout"]
            for row in rows:
                values = f"{row.measured / unit:12.4g}{row.predicted / unit:12.4g}{row.factor:9.3g}"
                lines.append(f"{row.where:{width}s}{values}  {row.layout}")
            if any(row.factor > 20 for row in rows):
                lines.append("a factor above 20 is a run that stalled, or one in other units: check these rows")
        return lines
