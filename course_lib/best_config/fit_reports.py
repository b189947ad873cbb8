"""What came of a calibration: the constants, how well they are known, and where they hold.

    print(calibration)                            each constant: before, fitted, 90% interval; or why it stays
                                                  and the five worst runs, with their lines in the file
    calibration.outside(config, Layout.parse("dp4,tp16,sp"), batch=512, seq=8192)       ["tp 16: fitted on 1 to 8"]

A constant that stays at a wrong value moves those beside it. So their intervals take it as known to a factor of 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from course_lib.best_config.clusters import Cluster
from course_lib.best_config.runs import MeasuredRun, predict
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.config import ModelConfig


@dataclass(frozen=True)
class Constant:
    """One of the fit."""

    name: str
    before: float
    value: float
    low: float = math.nan  # 90% interval
    high: float = math.nan
    why: str = ""  # it stays as it was, where it does


def facts(config: ModelConfig, layout: Layout, batch: int, seq: int, nodes: int) -> dict[str, int | str]:
    """What of a run may lie outside of what constants were fitted on."""
    found = {name: getattr(layout, name) for name in ("dp", "pp", "cp", "tp", "ep")} | {"nodes": nodes}
    found |= {"mb": layout.micro_batch, "micro-batches": batch / (layout.dp * layout.micro_batch)}
    found |= {"seq": seq, "hidden": config.hidden, "layers": config.layers}
    schedule = layout.schedule if layout.pp > 1 else "1f1b"
    return found | {"zero": str(layout.zero_stage), "recompute": layout.recompute, "schedule": schedule}


def facts_of(runs: list[MeasuredRun]) -> dict[str, list]:
    """The values of each fact among the runs, ascending."""
    each = [facts(run.config, run.layout, run.batch, run.seq, run.nodes) for run in runs]
    return {name: sorted({one[name] for one in each}) for name in each[0]}


@dataclass(frozen=True)
class Row:
    """A run's measured value beside the prediction of the fitted constants; seconds, or bytes."""

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


SHOWN = {"step_s": ("step time", 1, "s"), "peak_bytes": ("peak memory", 2**30, "GiB")}  # in a table, and their unit


@dataclass(frozen=True)
class Calibration:
    """A cluster whose software's constants were fitted to runs, and how well they are known. Printed, it is a table."""

    cluster: Cluster
    constants: tuple[Constant, ...]
    runs: int
    errors: dict[str, tuple[float, float]]  # median error of the runs' "tokens/s" and "peak memory", before and after
    ranges: dict[str, list]  # of the runs: the values of each of `facts`
    worst: dict[str, tuple[Row, ...]] = field(default_factory=dict)  # of "step_s" and "peak_bytes"
    failures: dict[str, int] = field(default_factory=dict)  # runs that failed, by MeasuredRun.failure

    @property
    def determined(self) -> list[str]:
        """The constants that the runs tell; the others are the old cluster's."""
        return [constant.name for constant in self.constants if not constant.why]

    def outside(self, config: ModelConfig, layout: Layout, batch: int, seq: int) -> list[str]:
        """What of a layout the constants were not fitted on, such as "tp 16: fitted on 1 to 8"."""
        nodes, found = math.ceil(layout.ranks / self.cluster.gpus_per_node), []
        for name, value in facts(config, layout, batch, seq, nodes).items():
            seen = self.ranges[name]
            if isinstance(value, str) and value not in seen:
                found.append(f"{name} {value}: fitted on {name} {', '.join(seen)}")
            elif not isinstance(value, str) and not seen[0] <= value <= seen[-1]:
                ends = f"{seen[0]:g}" + (f" to {seen[-1]:g}" if len(seen) > 1 else "")
                found.append(f"{name} {value:g}: fitted on {ends}")
        return found

    def __str__(self) -> str:
        errors = {name: each for name, each in self.errors.items() if each[1] == each[1]}  # without a peak: nan
        off = [f"{name} off by {after:.1%}, before by {before:.1%}" for name, (before, after) in errors.items()]
        lines = [f"fitted to {self.runs} runs (median errors: {'; '.join(off)})", *self.failed_lines()]
        lines.append(f"{'constant':20s}{'before':>12s}{'fitted':>12s}   90% interval")
        for each in self.constants:
            if each.why:
                lines.append(f"{each.name:20s}{each.before:12.4g}{'as before':>12s}   {each.why}")
            elif each.high < 100 * each.value:
                known = f"{each.low:.3g} to {each.high:.3g}"
                lines.append(f"{each.name:20s}{each.before:12.4g}{each.value:12.4g}   {known}")
            else:
                known = "or less" if each.value < each.before else "or more"  # it shows no more
                lines.append(f"{each.name:20s}{each.before:12.4g}{each.value:12.4g}   {known}")
        return "\n".join([*lines, *self.worst_lines()])

    def failed_lines(self) -> list[str]:
        """Return a line about the runs that failed, if there are any."""
        says = {"oom": "ran out of memory", "": "failed and may have run out of memory"}
        says |= {"other": "failed for other reasons and do not count"}
        found = [f"{count} {says[failure]}" for failure, count in self.failures.items()]
        return [f"of the others, {'; '.join(found)}"] if found else []

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
