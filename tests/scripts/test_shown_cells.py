"""How the site shows the cells of a notebook: what its bars say, and where a solution stands."""

from shown_cells import TAG, shown

PRINTED = {"text": "printed"}


def code(source: str, *tags: str, kind="code", outputs=()) -> dict:
    return {"cell_type": kind, "id": "a", "source": source, "metadata": {"tags": [*tags]}, "outputs": [*outputs]}


def bar(cell: dict) -> str | None:
    """What stands on the bar of a collapsed cell."""
    return cell["metadata"]["mystnb"]["code_prompt_show"] if TAG in cell["metadata"]["tags"] else None


def test_an_open_cell_and_a_text_are_shown_as_they_are():
    for cell in (code("x = 1", "measurement"), code("### BEGIN SOLUTION", kind="markdown")):
        assert shown(cell) == [cell]


def test_solutions_are_collapsed_apart_and_what_the_cell_printed_comes_last():
    cell = code(
        "def f(x):\n    ### BEGIN SOLUTION\n    a = 1\n\n    ### END SOLUTION\n    y = 2\n"
        "    ### BEGIN SOLUTION\n    b = 3\n    ### END SOLUTION\n",
        outputs=[PRINTED],
    )
    parts = shown(cell)
    assert [part["source"] for part in parts] == ["def f(x):", "    a = 1", "    y = 2", "    b = 3"]
    assert [bar(part) for part in parts] == [None, "Solution", None, "Solution"]
    assert [part["outputs"] for part in parts] == [[], [], [], [PRINTED]]
    assert len({part["id"] for part in parts}) == 4


def test_an_exercise_shows_its_directive_and_hides_its_solution():
    first = "#| export zero.shards:Unit\ndef gather(self: Unit):"
    source = f"{first}\n    ### BEGIN SOLUTION\n    a = 1\n    ### END SOLUTION"
    parts = shown(code(source))
    assert [part["source"] for part in parts] == [first, "    a = 1"]
    assert [bar(part) for part in parts] == [None, "Solution"]


PICTURE = {"data": {"image/png": ""}}


def test_a_figure_has_its_first_comment_for_screen_readers():
    for kind in ("Figure", "Measured", "Widget"):
        (cell,) = shown(code(f"# {kind}: <b> & its bytes, about 12 s\nx = 1", "measurement", outputs=[PICTURE]))
        assert cell["source"] == "x = 1"
        assert cell["metadata"] == {"tags": ["measurement"], "mystnb": {"image": {"alt": f"{kind}: <b> & its bytes"}}}
    for cell in (code("# Figures lie\nx = 1", outputs=[PICTURE]), code("# Measured: x\nx = 1")):
        assert shown(cell) == [cell]
