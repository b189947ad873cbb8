"""Measured runs from any CSV, with a map of its columns.

columns = {"model": "preset", "nodes": "nodes", "layout": "layout", "batch": "sequences", "seq": 4096}
runs = read_runs("ours.csv", columns | {"step_s": {"column": "iter_ms", "factor": 1e-3}})
"""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any

from course_lib.best_config.runs import MeasuredRun, numbered_rows
from course_lib.five_d.layouts import Layout, check_named_settings, check_ranks, micro_batches
from course_lib.single_gpu.config import PRESETS, ModelConfig

SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab")  # of a model that is no preset
INTEGERS = ("dp", "pp", "cp", "tp", "ep", "zero_stage", "micro_batch", "virtual", "replicate")
FLAGS, NAMED = ("sequence_parallel", "gather_once"), ("schedule", "recompute", "cp_method", "cp_order")
ABOUT = ("model", "tied", "nodes", "gpus_per_node", "gpus", "batch", "seq", "dtype", "layout", "ok", "why")
TIMES = ("step_s", "tokens_per_s", "tokens_per_s_per_gpu")
OTHERS = ("peak_bytes", "experts", "top_k", "expert_hidden")
KNOWN = (*SIZES, *INTEGERS, *FLAGS, *NAMED, *ABOUT, *TIMES, *OTHERS)
NEEDED = (("model", "layers"), ("nodes", "gpus_per_node"), ("batch",), ("seq",), ("layout", "gpus", "dp"), TIMES)
YES, NO = ("1", "true", "yes", "ok", "completed", "success"), ("0", "false", "no", "failed", "oom", "")
OUT_OF_MEMORY = re.compile(r"(?<![a-z])oom(?![a-z])|out.?of.?mem", re.IGNORECASE)
FAILED = re.compile(r"fail|error|crash|time.?d?.?out|cancel|kill|abort|hang|hung|preempt", re.IGNORECASE)


def check_columns(columns: dict) -> None:
    """Raise ValueError for a name that is not KNOWN, and if a name is missing that each run needs."""
    for name, source in columns.items():
        if name not in KNOWN:
            raise ValueError(f"columns: {name} is none of {', '.join(KNOWN)}")
        if isinstance(source, dict) and set(source) not in ({"value"}, {"column"}, {"column", "factor"}):
            raise ValueError(f"columns: {name} is {source}: make it {{column}}, {{column, factor}} or {{value}}")
        if isinstance(source, list) or isinstance(source, dict) and not isinstance(source.get("factor", 1), Real):
            raise ValueError(f"columns: {name} is {source}: a column's name or one value; a factor is a number")
    for names in NEEDED:
        if not set(names) & set(columns):
            raise ValueError(f"columns: {' or '.join(names)} is missing: name its column, or one value for all rows")


@dataclass(frozen=True)
class Cells:
    """A row of a CSV by the planner's names. Methods raise ValueError for a missing column and an impossible value."""

    row: dict[str, str]
    columns: dict

    def text(self, name: str) -> str:
        """Return the text of a cell; "" if it is empty or has no column."""
        source = self.columns.get(name, "")
        if not isinstance(source, dict):
            source = {"column": source} if isinstance(source, str) and source else {"value": source}
        if "value" in source:
            return str(source["value"]).strip()
        if source["column"] not in self.row:
            has = ", ".join(map(repr, self.row))
            raise ValueError(f"no column {source['column']!r}, where {name} should be; the columns are {has}")
        return self.row[source["column"]].strip()

    def number(self, name: str, otherwise: float | None = None) -> float:
        """Return a number above 0 (0 too for zero_stage); `otherwise` for an empty cell."""
        source, text = self.columns.get(name), self.text(name)
        if not text and otherwise is not None:
            return otherwise
        try:
            value = float(text) * (source.get("factor", 1) if isinstance(source, dict) else 1)
        except ValueError:
            raise ValueError(f"{name} is {text!r}, which is no number") from None
        if not (0 < value < math.inf or value == 0 and name == "zero_stage"):
            raise ValueError(f"{name} is {text!r}: it is more than 0")
        return value

    def integer(self, name: str, otherwise: int | None = None) -> int:
        """Return a whole number; see `number`."""
        if not (value := float(self.number(name, otherwise))).is_integer():
            raise ValueError(f"{name} is {self.text(name)!r}: it is a whole number")
        return int(value)

    def flag(self, name: str) -> bool:
        """Return True for a word of YES, False for one of NO."""
        if (text := self.text(name).lower()) not in YES + NO:
            raise ValueError(f"{name} is {text!r}: make it one of {', '.join(YES + NO[:-1])}")
        return text in YES

    def failure(self, time: str) -> str | None:
        """Return None for a run that was ok, "oom" if the row says that it ran out of memory, "other" if it names
        another failure, and "" if it only says that the run failed. Raises ValueError for other words.

        time: the name of the run's time. A row without a column "ok" failed if it has no time.
        """
        text, why = self.text("ok"), self.text("why")
        both = f"{text} {why}"
        if "ok" not in self.columns:
            failed = self.text(time) == ""
        elif OUT_OF_MEMORY.search(text):
            failed = True
        elif text.lower() not in YES + NO and FAILED.search(text):
            failed, why = True, both
        else:
            failed = not self.flag("ok")
        if not failed:
            return None
        return "oom" if OUT_OF_MEMORY.search(both) else "other" if why else ""


def config_of(cells: Cells, models: dict[str, ModelConfig]) -> ModelConfig:
    """Return the model: by its sizes if the row has them, or by its name."""
    if cells.text("layers"):
        sizes: dict[str, Any] = {name: cells.integer(name) for name in SIZES}
        return ModelConfig(**sizes, tied=cells.flag("tied"))
    if (name := cells.text("model")) not in models:
        raise ValueError(f"model {name!r} is none of {', '.join(models)}: name the columns of {', '.join(SIZES)}")
    return models[name]


def layout_of(cells: Cells) -> Layout:
    """Return the layout. With tp 1 there is no sp. Raises ValueError if its degrees do not multiply to the GPUs."""
    if spec := cells.text("layout"):
        layout = Layout.parse(spec)
    else:
        fields: dict[str, Any] = {name: cells.integer(name) for name in INTEGERS if cells.text(name)}
        fields |= {name: cells.text(name) for name in NAMED if cells.text(name)}
        fields |= {name: cells.flag(name) for name in FLAGS}
        fields["sequence_parallel"] &= fields.get("tp", 1) > 1
        inner = fields.get("pp", 1) * fields.get("cp", 1) * fields.get("tp", 1)
        fields.setdefault("dp", cells.integer("gpus", inner) // inner or 1)
        layout = Layout(**fields)
    check_named_settings(layout)
    check_ranks(layout, cells.integer("gpus", layout.ranks))
    return layout


def measured_run(cells: Cells, models: dict[str, ModelConfig]) -> MeasuredRun:
    """Return the run in a row."""
    config, layout, batch, seq = (
        config_of(cells, models),
        layout_of(cells),
        cells.integer("batch"),
        cells.integer("seq"),
    )
    micro_batches(layout, batch)
    nodes = cells.integer("nodes") if cells.text("nodes") else math.ceil(layout.ranks / cells.integer("gpus_per_node"))
    time = next((name for name in TIMES if cells.text(name)), "step_s")
    failure = cells.failure(time)
    ok = failure is None
    step_s = cells.number(time) if ok else math.nan
    if time != "step_s":
        step_s = batch * seq / step_s / (1 if time == "tokens_per_s" else layout.ranks)
    peak = cells.number("peak_bytes", math.nan) if ok else math.nan
    moe = None
    if cells.text("experts"):
        moe = {"experts": cells.integer("experts"), "top_k": cells.integer("top_k")}
        moe |= {"ffn_hidden": cells.integer("expert_hidden")} if cells.text("expert_hidden") else {}
    if layout.ep > 1 and moe is None:
        raise ValueError(f"layout {layout} has ep {layout.ep}: name the columns of experts and top_k, or make ep 1")
    model, dtype = cells.text("model") or f"{config.layers} x {config.hidden}", cells.text("dtype") or "bf16"
    return MeasuredRun(model, config, nodes, layout, batch, seq, ok, step_s, peak, dtype, moe, failure or "")


def read_columns(file: Path | str) -> dict:
    """Read a map of columns, a TOML file. Raises ValueError, with the file's name, where it is not TOML."""
    try:
        with open(file, "rb") as stream:
            return tomllib.load(stream)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def read_runs(
    file: Path | str, columns: dict | Path | str, models: dict[str, ModelConfig] = PRESETS
) -> list[MeasuredRun]:
    """Read measured runs from any CSV. columns: the source of each of the planner's names, or a TOML file of these.

        "seq"                                   the column of this name
        4096                                    the same value for all rows; a text: {"value": "llama3-8B"}
        {"column": "ms", "factor": 1e-3}        a column in other units

    The planner's names: model (of `models`) or SIZES and tied; nodes, or gpus_per_node; gpus, the product of the
    layout's degrees; batch (sequences on all GPUs); seq; layout (a spec such as dp8,tp2,sp), or Layout's fields, of
    which dp follows from gpus; one of step_s, tokens_per_s (of all GPUs), tokens_per_s_per_gpu; optionally ok (without
    it, a row with a time is ok), why (a failed run's reason, in any words), peak_bytes, dtype, experts, top_k,
    expert_hidden.

    ok is 1 or 0, or a word of YES and NO, or a failure text such as "CUDA out of memory", "Timeout" or "Failed
    (NCCL)". Only runs that ran out of memory tell how much of it is usable. If ok or why of any row says "oom" or "out
    of memory", all other failed rows therefore count as failed for other reasons (`MeasuredRun.failure`). In a file
    that only says that runs failed, each of them may have run out of memory, or failed for another reason.

    Raises ValueError, with file and line, for a missing column, an impossible value, a layout whose degrees do not
    multiply to the GPUs or do not divide the batch, and for a file without rows.
    """
    if not isinstance(columns, dict):
        columns = read_columns(columns)
    check_columns(columns)
    runs = []
    for where, row in numbered_rows(file):
        try:
            runs.append(replace(measured_run(Cells(row, columns), models), where=where))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if any(run.failure == "oom" for run in runs):  # the file distinguishes them from other failures
        runs = [replace(run, failure="other") if not run.ok and run.failure == "" else run for run in runs]
    return runs
