"""What the site's own pages are made of: the methods' drawings, the glossary and its links, the tables of results."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from docutils import nodes
from docutils.utils import new_document
from sphinx.errors import ExtensionError

import mathml
import pages
from cheatsheet import row_cells
from export import NOTEBOOKS, read_notebook
from measured import RESULTS, WIDE, file_tables, measured, shown
from methods import COLUMNS, COSTS, MAPPED, SHEET, course_map, drawing, methods

SHEET_HEAD = "| method | saves | costs | formula | use when | limit | notebook |\n|---|---|---|---|---|---|---|\n"
CLASSES_HEAD = "method,saves,costs,on_map\n"


def small(folder: Path, classes: str) -> dict[str, Path]:
    """A cheatsheet of one method, and what `classes` says of the methods."""
    (folder / "sheet.md").write_text(
        SHEET_HEAD + "| f\\* | <bytes> | – | 4\\|N | always | – | [05](notebooks/05_zero.ipynb) |\n", encoding="utf-8"
    )
    (folder / "classes.csv").write_text(CLASSES_HEAD + classes, encoding="utf-8")
    return {"sheet": folder / "sheet.md", "classes": folder / "classes.csv"}


def test_every_method_of_the_cheatsheet_is_drawn_where_it_saves_and_costs():
    found = methods()
    rows = [row_cells(line) for line in SHEET.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert [method.name for method in found] == [row[0] for row in rows[1:]]
    drawn = drawing(found, "")
    assert drawn.count("<a ") == sum(bool(words & {*method.saves}) for method in found for words in COLUMNS.values())
    assert drawn.count('class="cell') == len(COLUMNS) * len(COSTS)
    assert all(drawn.count(method.link("")) > 0 for method in found)
    on_map = [method for method in found if method.on_map]
    assert {method.notebook for method in on_map} == {path.stem for path in NOTEBOOKS.glob("*.ipynb")}
    marks = [word for method in on_map for word in (*method.saves, *method.costs) if word in MAPPED]
    assert course_map(found, "../").count("<i ") == len(marks)
    assert all(MAPPED.keys() & {*method.saves, *method.costs} for method in on_map)


def test_a_method_is_drawn_with_its_link_and_its_words(tmp_path):
    (method,) = methods(**small(tmp_path, "f\\*,weights time,memory traffic,yes\n"))
    link = '<a href="../notebooks/05_zero.html" title="saves &lt;bytes&gt;; costs –">f*<small>05</small></a>'
    assert method.link("../") == link
    assert re.findall('<i [^>]*title="(saves|costs) (.*?)"', course_map([method], "")) == [
        ("saves", "weights"),
        ("saves", "time"),
        ("costs", "communication"),
        ("costs", "memory"),
    ]
    assert len(re.findall('cell cost-memory">.*</a>', drawing([method], ""))) == 2


@pytest.mark.parametrize(
    "classes, complaint",
    [
        ("", "lacks the method"),
        ("f\\*,weights,,\ng,time,,\n", "that no recap has: “g”"),
        ("f\\*,,memory,\n", "saves"),
        ("f\\*,money,memory,\n", "saves"),
        ("f\\*,weights,money,\n", "costs"),
    ],
)
def test_what_does_not_go_together_is_told_in_a_line(tmp_path, classes, complaint):
    with pytest.raises(ExtensionError, match=complaint) as told:
        methods(**small(tmp_path, classes))
    assert "\n" not in str(told.value)


def test_every_term_of_the_glossary_is_in_the_notebook_that_teaches_it_and_there_once():
    found = pages.entries()
    text = (pages.DOCS / "glossary.md").read_text(encoding="utf-8")
    assert len(found) == text.count(".ipynb))\n") > 100
    terms = [term for words, _ in found for term in words]
    assert sorted(terms) == sorted(set(terms))
    texts = {
        f"notebooks/{path.stem}": "\n".join("".join(cell["source"]) for cell in read_notebook(path)["cells"]).lower()
        for path in NOTEBOOKS.glob("*.ipynb")
    }
    for words, teacher in found:
        words = [word.split(" (")[0].lower() for word in words]
        assert any(re.search(rf"(?<![\w-]){re.escape(word)}", texts[teacher]) for word in words), (words, teacher)
        assert all(any(word in text for text in texts.values()) for word in words), words


def linked(docname: str, *texts: nodes.Node) -> list[str]:
    """The texts of the links to the glossary that a page of these nodes gets."""
    terms = [word for words, _ in pages.entries() for word in words]
    anchors = [(word, word, "term", "docs/glossary", f"term-{word}", 0) for word in terms]
    app = SimpleNamespace(
        builder=SimpleNamespace(get_relative_uri=lambda page, to: "../docs/glossary.html"),
        env=SimpleNamespace(get_domain=lambda name: SimpleNamespace(get_objects=lambda: anchors)),
    )
    document = new_document("page")
    document += texts
    before = document.astext()
    pages.link_words(app, document, docname)
    assert document.astext() == before
    links = list(document.findall(nodes.reference))
    assert all(link["refuri"].startswith("../docs/glossary.html#term-") for link in links if "refuri" in link)
    return [link.astext() for link in links]


def test_a_word_is_linked_where_it_first_stands_in_a_text():
    heading = nodes.title("", "Buckets and replicas")
    text = nodes.paragraph("", "Buckets: a bucket is reduced by an all-reduce, not a bucketful; no_sync_bucket.")
    assert linked("notebooks/04_data_parallel", heading, text) == ["Buckets", "all-reduce"]


def test_headings_code_links_and_other_pages_are_left_alone():
    inside = [
        nodes.title("", "The bucket"),
        nodes.literal_block("", "bucket"),
        nodes.paragraph("", "", nodes.literal("", "bucket"), nodes.math("", "bucket")),
    ]
    assert linked("notebooks/04_data_parallel", *inside) == []
    assert linked("docs/architecture", nodes.paragraph("", "A bucket")) == []


def test_the_longest_word_wins_and_a_capital_is_part_of_a_name():
    words = nodes.paragraph("", "full\nrecomputation, Recomputation; ZeRO-3 and ZeRO; TP, tP, tp, a")
    assert linked("notebooks/05_zero", words) == ["full\nrecomputation", "Recomputation", "ZeRO-3", "ZeRO", "TP", "tp"]


def test_a_word_with_two_meanings_is_linked_from_its_own_notebook_on():
    text = "Widgets need a running kernel."
    assert linked("notebooks/01_single_gpu", nodes.paragraph("", text)) == []
    assert linked("notebooks/12b_fused", nodes.paragraph("", text)) == ["kernel"]


def test_every_result_has_a_section_with_its_date_and_a_table():
    text = measured()
    sections = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    assert len(sections) == len([path for path in RESULTS.iterdir() if path.suffix in (".json", ".jsonl", ".csv")])
    for section in sections:
        assert re.search(r"^\*\d{4}-\d\d-\d\d; ", section, re.MULTILINE), section[:80]
        assert "| --- |" in section, section[:80]
        for row in re.findall(r"^\|.*\|$", section, re.MULTILINE):
            assert len(row_cells(row)) <= WIDE, row
            assert not re.search(r"\bNone\b|[{}\[]|\bnan\b", row), row
    assert text.count("\n## ") + 1 == len(set(re.findall(r"^## (.*)$", text, re.MULTILINE)))


def test_pairs_stand_beside_their_noise():
    def run(ratio):
        return {"ours_ms": 2.0, "rival_ms": 4.0, "ratio": ratio, "ratio_min": ratio - 0.1, "ratio_max": ratio + 0.1}

    (text,) = file_tables({"2 ranks": {"ours_against_ddp": run(0.5), "ddp_against_itself": run(1.0)}, "date": "today"})
    row = "| 2 ranks | ours against ddp | 2.00 | 4.00 | 0.50 | 0.40 – 0.60 | 0.90 – 1.10 |"
    assert text.replace("\u2060\u00a0", " ").replace("\u00a0", " ").splitlines()[2:] == [row]


@pytest.mark.parametrize(
    "value, text",
    [(0.51234, "0.512"), (1234567.0, "1,234,567"), (2.2e-7, "2.2e-07"), (True, "yes"), (54329761, "54,329,761")]
    + [(1024, "1024"), (None, ""), (0.0, "0.00"), (999.7, "1,000"), ("a|b", "a\\|b")],
)
def test_numbers_are_readable(value, text):
    assert shown(value) == text


@pytest.mark.parametrize("name, text", [("x_cpu.json", "{"), ("x_cpu.json", '{"date": "today"}'), ("x_y.jsonl", "")])
def test_a_file_that_cannot_be_shown_is_named(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ExtensionError, match=rf"^benchmarks/results/{name} cannot be shown: \w+: [^\n]*$"):
        measured(tmp_path)


def test_a_new_result_is_shown_without_an_edit(tmp_path):
    figures = {"date": "2027-01-01", "machine": "GPU 9", "a": {"b_ms": 1.5}}
    (tmp_path / "future_gpu9.json").write_text(json.dumps(figures))
    text = measured(tmp_path)
    assert text.startswith("## GPU 9\n\n### Future\n") and "| b, ms |" in text and "| 1.50 |" in text


def test_a_formula_that_cannot_be_drawn_is_named(monkeypatch):
    said, formula = [], nodes.math("", r"\nosuch{x}")
    monkeypatch.setattr(mathml.LOG, "warning", lambda text, *words, location: said.append((text % words, location)))
    with pytest.raises(nodes.SkipNode):
        mathml.draw(False)(None, formula)
    assert said == [(r'Unknown LaTeX command "\nosuch". In: \nosuch{x}', formula)]
