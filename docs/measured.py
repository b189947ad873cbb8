"""The tables of “Measurements”, from benchmarks/results/: a section for each file, with its machine and date.

For each file: paired runs (ours, theirs, their ratio, its spread, and the spread of theirs against itself, which is
the noise), medians with their spread, kernel times side by side, and all other single numbers.
Curves and other lists of numbers stay in the file.
"""

import ast
import csv
import functools
import json
import re
from pathlib import Path

from sphinx.errors import ExtensionError

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LONG = 24  # rows of a table that is shown without a click
WIDE = 14  # columns that fit
OTHER = "Other figures"
ABOUT = ["machine", "date", "threads", "torch", "triton"]
WORDS = {"fp8": "FP8", "gpu": "GPU", "d": "dimensions"}  # of a file's name
UNITS = {"_tflop_per_s": "TFLOP/s", "_gb_per_s": "GB/s", "_ms": "ms", "_mib": "MiB", "_gflop": "GFLOP", "_mb": "MB"}


def shown(value) -> str:
    """Format a value for a table: three digits, all numbers in the same notation."""
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if value >= 10_000 else str(value)
    if isinstance(value, float):
        if value == 0 or 1e-3 <= abs(value) < 999.5:
            return f"{value:#.3g}".rstrip(".")
        return f"{value:,.0f}" if 999.5 <= abs(value) < 1e9 else f"{value:.1e}"
    return str(value).replace("|", "\\|")


def title(key: str) -> str:
    """Return the column title for a key of a file: `step peak, MiB` for `step_peak_mib`."""
    for ending, unit in UNITS.items():
        if f"_{key}".endswith(ending):
            return f"{f'_{key}'.removesuffix(ending)[1:]}, {unit}".replace("_", " ").removeprefix(", ")
    return re.sub(r" per s$", "/s", re.sub(r"(?<!_per)_s$", ", s", key).replace("_", " "))


def titled(values: dict) -> dict:
    """Return the scalar entries of a dictionary, by column title."""
    numbers = {key: value for key, value in values.items() if not isinstance(value, dict | list)}
    if "peak_memory" in numbers:
        numbers["peak_mib"] = numbers.pop("peak_memory") / 2**20
    return {title(key): value for key, value in numbers.items()}


def table(rows: list[dict]) -> str:
    """Return rows as a table with every column that occurs; transposed if the columns do not fit."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns] + [[shown(row.get(column)) for column in columns] for row in rows]
    if columns[0] == "":
        for above, line in zip(lines[-2::-1], lines[:0:-1], strict=True):
            if line[0] == above[0]:
                line[0] = ""  # the same place as the line above
    if len(columns) > WIDE:
        lines = [list(line) for line in zip(*lines, strict=True)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(name: str, rows: list[dict]) -> str:
    """Return the table of these rows; one collapsed table per set of columns if it is long or secondary."""
    summary = f"{name}: {len(rows)} row{'s' if len(rows) > 1 else ''}"
    if name != OTHER:
        return table(rows) if len(rows) <= LONG else folded(summary, table(rows))
    alike = {}
    for row in rows:
        alike.setdefault(tuple(row), []).append(row)
    return folded(summary, "\n\n".join(map(table, alike.values())))


def folded(summary: str, text: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>"


def leaves(value: dict, path: tuple[str, ...] = ()):
    """Yield every nested dictionary, with its path of keys."""
    for key, each in value.items():
        if isinstance(each, dict):
            yield (*path, key.replace("_", " ")), each
            yield from leaves(each, (*path, key.replace("_", " ")))


def spread(least, most) -> str:
    """Return both bounds as one unbreakable range: after a dash, a no-break space alone does not prevent a break."""
    return f"{least}\u00a0–\u2060\u00a0{most}"


def ratios(run: dict) -> str:
    """Return the range of the pairs' ratios."""
    return spread(f"{run['ratio_min']:.2f}", f"{run['ratio_max']:.2f}")


def row_label(path: tuple[str, ...]) -> dict:
    """Return the first two columns of a row: its position in the file."""
    return {"": " · ".join(path[:-1]) or path[-1], " ": path[-1] if path[:-1] else ""}


def paired(path: tuple[str, ...], run: dict, runs: dict) -> dict:
    """Return a row of paired runs. The noise is the spread of theirs against itself, in the same place and order."""
    itself = [r"\g<rival> against itself", r"\g<rival> \g<order> against itself"]
    versus = re.compile(r"^(?:.*?(?P<order>\S*) )?against (?P<rival>.*)$")
    keys = [tuple(versus.sub(new, part) for part in path) for new in itself]
    noise = next((runs[key] for key in keys if key in runs), None)
    return row_label(path) | {
        "ours, ms": run["ours_ms"],
        "theirs, ms": run["rival_ms"],
        "ours / theirs": f"{run['ratio']:.2f}",
        "from – to": ratios(run),
        "noise": ratios(noise) if noise else None,
    }


def side_by_side(row: dict) -> dict:
    """Return a kernel's row: milliseconds per column, each rival's time followed by the ratio of ours to it; or MiB."""
    where = {"kernel": row["kernel"], "size": row["size"].replace(" x ", "\u00a0x\u00a0"), "pass": row["pass"]}
    if "mib" in row:
        return where | {f"{name}, MiB": mib for name, mib in row["mib"].items()}
    times = {f"{name}, ms": shown(ms) for name, ms in row["ms"].items()}
    for name, ratio in row["ours_against"].items():
        times[f"{name}, ms"] += f"\u00a0({ratio:.2f})"
    return where | times | {"noise": f"{100 * row['noise']:.1f}%"}


def file_tables(figures: dict) -> list[str]:
    """The tables of a JSON file."""
    values = list(leaves({key: value for key, value in figures.items() if isinstance(value, dict)}))
    runs = {path: value for path, value in values if "ratio_min" in value}
    kinds = {"Times": [paired(path, run, runs) for path, run in runs.items() if "against itself" not in " ".join(path)]}
    kinds["Medians"] = [
        row_label(path)
        | {"median, s": value["median_s"], "least – most": spread(shown(value["min_s"]), shown(value["max_s"]))}
        | titled({key: each for key, each in value.items() if key not in ("median_s", "min_s", "max_s")})
        for path, value in values
        if "median_s" in value
    ]
    kinds[OTHER] = [
        row_label(path) | titled(value)
        for path, value in values
        if titled(value) and "ratio_min" not in value and "median_s" not in value
    ]
    for key, value in figures.items():
        if isinstance(value, list):
            name = title(key).capitalize()
            kinds[f"{name}, time"] = [side_by_side(row) for row in value if "ms" in row]
            kinds[f"{name}, peak memory"] = [side_by_side(row) for row in value if "mib" in row]
            kinds[name] = [titled(row) for row in value if "ms" not in row and "mib" not in row]
    return [tables(name, rows) for name, rows in kinds.items() if rows]


def jobs(path: Path) -> tuple[dict, list[str]]:
    """Return the machine and the tables of a `make gpu` log: how its jobs ended."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    about = next(line["row"] for line in lines if line["job"] == "machine" and "row" in line)
    ended = [line for line in lines if "outcome" in line]
    rows = {}
    for line in ended:
        row = rows.setdefault((line["job"].split(":")[0], line["outcome"]), {"jobs": 0, "seconds": 0.0})
        row["jobs"] += 1
        row["seconds"] += line.get("seconds", 0)
    counted = [{"kind": kind, "outcome": outcome} | row for (kind, outcome), row in rows.items()]
    not_passed = [{"job": line["job"], "outcome": line["outcome"]} for line in ended if line["outcome"] != "passed"]
    about = {key: about[key] for key in ABOUT if key in about} | {"date": lines[0]["begin"][:10]}
    return about, [table(counted)] + ([table(not_passed)] if not_passed else [])


def read(path: Path) -> tuple[dict, list[str]]:
    """Return a file's metadata (machine, date and other settings) and its tables."""
    if path.suffix == ".jsonl":
        return jobs(path)
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        rows = [{**row, "date": row["date"][:10]} for row in rows]
        about = {key: value for key, value in rows[0].items() if value and all(row[key] == value for row in rows)}
        columns = [key for key in rows[0] if key not in about and any(row[key] for row in rows)]
        return about, [table([{title(key): row[key] for key in columns} for row in rows])]
    figures = json.loads(path.read_text(encoding="utf-8"))
    return {key: value for key, value in figures.items() if not isinstance(value, dict | list)}, file_tables(figures)


@functools.cache
def docstrings() -> dict[str, str]:
    """Return the docstring of each script that measures."""
    scripts = [*sorted((ROOT / "benchmarks").glob("*.py")), ROOT / "course_kit" / "sweep" / "__init__.py"]
    return {
        str(path.relative_to(ROOT)): ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        for path in scripts
    }


def script(stem: str) -> tuple[str, str]:
    """Return the path and the docstring of the script that writes these results."""
    for path, text in docstrings().items():
        if f"/{stem}.py" in path or f"/{stem}/" in path or f"results/{stem}_" in text:
            return path, text
    return "benchmarks/gpu.py", docstrings()["benchmarks/gpu.py"]


def section(path: Path) -> tuple[str, str, str]:
    """Return the machine, name and text of a file's section."""
    stem = re.sub(r"_[^_]+$", "", path.stem) if "_" in path.stem else path.stem
    try:
        about, tables = read(path)
        machine, date = about["machine"], about["date"]
    except (ValueError, LookupError, StopIteration) as error:
        why = f"{type(error).__name__}: {error}"
        raise ExtensionError(f"benchmarks/results/{path.name} cannot be shown: {why}") from None
    name, docstring = script(stem)
    first, _, rest = docstring.partition("\n")
    heading = " ".join(WORDS.get(word, word) for word in stem.split("_"))
    settings = "; ".join(f"{title(key)} {shown(about[key])}" for key in about if key not in ("machine", "date", "what"))
    text = [
        f"### {heading[0].upper()}{heading[1:]}",
        about.get("what") or first,
        f"*{date}; {settings}.* [`{path.name}`](../benchmarks/results/{path.name})",
        *tables,
    ]
    if rest:
        text.append(folded(f"How: {name}", f"```text\n{rest.strip()}\n```"))
    return machine, stem, "\n\n".join(text)


def measured(results: Path = RESULTS) -> str:
    """All sections, by machine."""
    paths = sorted(path for path in results.iterdir() if path.suffix in (".json", ".jsonl", ".csv"))
    sections = sorted(section(path) for path in paths)
    text, before = [], None
    for machine, _, each in sections:
        text += [f"## {machine}", each] if machine != before else [each]
        before = machine
    return "\n\n".join(text)
