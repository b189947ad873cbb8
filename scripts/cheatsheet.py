"""Collect the recap tables of all notebooks into one page, `CHEATSHEET.md`.

    python scripts/cheatsheet.py

A notebook's recap is a markdown cell tagged `cheatsheet` that holds one table, with the columns below.
"""

import re
import sys
from pathlib import Path

from export import NOTEBOOKS, ROOT, ExportError, chapter, read_notebook, write_atomically

PAGE = ROOT / "CHEATSHEET.md"
COLUMNS = ["method", "saves", "costs", "formula", "use when", "limit"]
HEAD = """# Cheatsheet

Every method of the course on one page. <!-- `make cheatsheet` collects it from the recaps: edit them. -->

"""


def table_row(cells: list[str]) -> str:
    """Return a line of a markdown table."""
    return f"| {' | '.join(cells)} |"


def row_cells(line: str) -> list[str]:
    r"""Return the cells of a markdown table row; `\|` is a bar inside a cell."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def table_rows(source: str) -> list[list[str]]:
    """Return the body rows of a recap's table. Raises ExportError, which the caller completes, if it is malformed."""
    rows = [row_cells(line) for line in source.splitlines() if line.lstrip().startswith("|")]
    if len(rows) < 3:
        raise ExportError("holds no table, or one without a row")
    if [column.lower() for column in rows[0]] != COLUMNS:
        raise ExportError(f"has the columns {', '.join(rows[0])}; a recap has {', '.join(COLUMNS)}")
    for row in rows[1:]:
        if len(row) != len(COLUMNS):
            raise ExportError(f"has a row of {len(row)} cells instead of {len(COLUMNS)}: {row[0] if row else ''}")
    return rows[2:]


def page(notebooks: Path) -> tuple[str, int]:
    """Return the text of the page and the number of methods."""
    lines = []
    for path in sorted(notebooks.glob("*.ipynb")):
        link = f"[{chapter(path)}](notebooks/{path.name})"
        for cell in read_notebook(path)["cells"]:
            if "cheatsheet" in cell["metadata"].get("tags", []):
                try:
                    lines += [table_row([*row, link]) for row in table_rows(cell["source"])]
                except ExportError as error:
                    raise ExportError(f"{path.name}, cell {cell.get('id')} {error}") from None
    head = [table_row([*COLUMNS, "notebook"]), "|---" * (len(COLUMNS) + 1) + "|"]
    return HEAD + "\n".join(head + lines) + "\n", len(lines)


def main(argv: list[str] | None = None) -> int:
    """Write the page. Returns 0, or 2 after printing why it could not be written."""
    if sys.argv[1:] if argv is None else argv:
        print("usage: python scripts/cheatsheet.py", file=sys.stderr)
        return 2
    try:
        text, methods = page(NOTEBOOKS)
        write_atomically(PAGE, text)
    except ExportError as error:
        print(f"cheatsheet: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"cheatsheet: {PAGE} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    print(f"{PAGE.name}: {methods} methods")
    return 0


if __name__ == "__main__":
    sys.exit(main())
