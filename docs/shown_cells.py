"""Transform a notebook's cells for the site when Sphinx reads them. The notebook files do not change.

Each solution is collapsed behind a bar. The first comment of a figure's cell becomes the figure's text for screen
readers, of which pages.py makes the caption. The links to the notebooks before and after get one to all of them.
"""

import json
import re

TAG = "hide-input"  # of a collapsed part
FIGURE = re.compile(r"# ((?:Figure|Measured|Widget): .+?)(?:, about \d+ (?:s|min))?\n+")
README, ALL = "(the README lists all)", "· [all notebooks](../docs/index.md#the-notebooks)"
SOLUTION = re.compile(r"^[ ]*### BEGIN SOLUTION\n(.*?\n?)[ ]*### END SOLUTION\n?", re.DOTALL | re.MULTILINE)


def folded(cell: dict, words: str, *extra_tags: str) -> dict:
    """Return the cell, collapsed behind a bar with this label, with more tags."""
    tags = {*cell["metadata"].get("tags", []), TAG, *extra_tags}
    prompts = {"code_prompt_show": words, "code_prompt_hide": words}
    return cell | {"metadata": cell["metadata"] | {"tags": sorted(tags), "mystnb": prompts}}


def shown(cell: dict) -> list[dict]:
    """Return the cells that the site shows for one notebook cell."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [cell | {"source": source.replace(README, ALL)}]
    texts = SOLUTION.split(source)  # every second one is a solution
    if len(texts) > 1:
        parts = [cell | {"id": f"{cell['id']}-{i}", "source": text.rstrip()} for i, text in enumerate(texts)]
        parts[1::2] = [folded(part, "Solution", "solution") for part in parts[1::2]]
        parts = [part for part in parts if part["source"]]
        parts[:-1] = [part | {"outputs": []} for part in parts[:-1]]
        return parts
    drawn = any("image/png" in output.get("data", {}) for output in cell["outputs"])
    if drawn and (match := FIGURE.match(source)):
        described = cell["metadata"] | {"mystnb": {"image": {"alt": match[1]}}}
        return [cell | {"source": source[match.end() :], "metadata": described}]
    return [cell]


def show_notebook(app, docname: str, content: list[str]) -> None:
    """Replace the text of a notebook that Sphinx has read."""
    if app.env.doc2path(docname).suffix == ".ipynb":
        notebook = json.loads(content[0])
        notebook["cells"] = [each for cell in notebook["cells"] for each in shown(cell)]
        content[0] = json.dumps(notebook)


def setup(app) -> dict:
    app.connect("source-read", show_notebook)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
