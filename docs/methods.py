"""Two drawings of the cheatsheet: the course's map, and all methods on one page, by what they save and what they cost.

Names and descriptions come from CHEATSHEET.md, which is collected from the notebooks' recaps. methods.csv gives, in a
word or two, what each method saves and costs.
"""

import csv
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

from sphinx.errors import ExtensionError

from cheatsheet import row_cells

DOCS = Path(__file__).parent
SHEET = DOCS.parent / "CHEATSHEET.md"
CLASSES = DOCS / "methods.csv"

SAVES = {
    "weights": "weights",
    "gradients": "gradients",
    "states": "optimizer states",
    "activations": "activations",
    "time": "time",
    "traffic": "communication",
    "bits": "accuracy",
    "trouble": "mistakes",
}
COSTS = {
    "": "nothing",
    "memory": "memory",
    "compute": "compute",
    "traffic": "communication",
    "time": "time",
    "bits": "accuracy",
    "effort": "effort",
}

# The map's columns: mistakes and effort are those of hardly any technique on it.
MAPPED = {word: title for word, title in (SAVES | COSTS).items() if word not in ("", "trouble", "effort")}

# The drawing's columns. A method that shards all model states is listed there once.
COLUMNS = {"weights, gradients, states": {"weights", "gradients", "states"}} | {
    title: {word} for word, title in SAVES.items() if word not in ("weights", "gradients", "states")
}


@dataclass
class Method:
    """A row of the cheatsheet. `saves` and `costs` hold keys of SAVES and COSTS, the most important first."""

    name: str
    text: str
    chapter: str
    notebook: str
    saves: list[str]
    costs: list[str]
    on_map: bool

    def link(self, root: str) -> str:
        """Return the name as a link to its notebook, with its number. root: path from the page to the site's root."""
        name = escape(self.name.replace("\\", ""))
        page = f"{root}notebooks/{self.notebook}.html"
        return f'<a href="{page}" title="{escape(self.text)}">{name}<small>{self.chapter}</small></a>'


def methods(sheet: Path = SHEET, classes: Path = CLASSES) -> list[Method]:
    """Return the methods in course order. Raises ExtensionError if CHEATSHEET.md and methods.csv disagree."""
    with classes.open(encoding="utf-8", newline="") as file:
        classed = {row["method"]: row for row in csv.DictReader(file)}
    listed = []
    rows = [row_cells(line) for line in sheet.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    for name, saves, costs, *_, notebook in rows[2:]:
        if name not in classed:
            raise ExtensionError(f"{classes.name} lacks the method “{name}”")
        row = classed.pop(name)
        kinds = {"saves": row["saves"].split(), "costs": row["costs"].split() or [""]}
        for kind, known in (("saves", SAVES), ("costs", COSTS)):
            if not kinds[kind] or not {*kinds[kind]} <= {*known}:
                words = ", ".join(filter(None, known))
                raise ExtensionError(f"{classes.name}: “{name}” {kind} “{row[kind]}”, but the words are {words}")
        number, path = notebook[1:-1].split("](")
        text = f"saves {saves or '–'}; costs {costs or '–'}"
        listed.append(Method(name, text, number, Path(path).stem, **kinds, on_map=row["on_map"] == "yes"))
    if classed:
        raise ExtensionError(f"{classes.name} has a method that no recap has: “{next(iter(classed))}”")
    return listed


def course_map(listed: list[Method], root: str) -> str:
    """Return a table with a row per technique, by chapter, and a mark for each thing that it saves or costs."""
    titles = "".join(f'<th scope="col"><span>{title}</span></th>' for title in MAPPED.values())
    lines = ['<div class="course-map"><table>', f'<thead><tr><td colspan="2"></td>{titles}</tr></thead>']
    for chapter, group in groupby((method for method in listed if method.on_map), lambda method: method.chapter):
        rows = []
        for method in group:
            cells = "".join(f"<td>{marks(method, word)}</td>" for word in MAPPED)
            rows.append(f'<th scope="row">{method.link(root)}</th>{cells}</tr>')
        rows[0] = f'<th rowspan="{len(rows)}" scope="rowgroup">{chapter}</th>{rows[0]}'
        lines += ["<tbody>", *(f"<tr>{row}" for row in rows), "</tbody>"]
    return "\n".join([*lines, "</table></div>"])


def marks(method: Method, word: str) -> str:
    """Return the marks in a cell of the map."""
    kinds = [kind for kind in ("saves", "costs") if word in getattr(method, kind)]
    return "".join(
        f'<i class="{kind}" role="img" title="{kind} {MAPPED[word]}" aria-label="{kind} {MAPPED[word]}"></i>'
        for kind in kinds
    )


def drawing(listed: list[Method], root: str) -> str:
    """Return all methods in a grid: a column per saving, a row per main cost."""
    lines = ['<div class="methods-drawing">', "<div><b>saves</b> →<br><b>costs</b> ↓</div>"]
    lines += [f'<div class="saved">{title}</div>' for title in COLUMNS]
    for cost, cost_title in COSTS.items():
        lines.append(f'<div class="cost">{cost_title}</div>')
        for title, saved in COLUMNS.items():
            links = [method.link(root) for method in listed if saved & {*method.saves} and method.costs[0] == cost]
            label = f'<span class="label">saves {title}</span>' if links else ""
            lines.append(f'<div class="cell cost-{cost or "nothing"}">{label}{"".join(links)}</div>')
    return "\n".join([*lines, "</div>"])
