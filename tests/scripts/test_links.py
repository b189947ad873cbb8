"""Links lead to what is there, in JupyterLab, on the site and in a repository's viewer; each entry of a notebook's
further reading says what is in it. Needs no GPU.
"""

import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from export import read_notebook

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = [path.name for path in NOTEBOOKS]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("data/**/*.md")])
MARKDOWN = MarkdownIt("commonmark").enable("table")
LINK = re.compile(r"\[[^]\n]*\]\([^)\s]+\)")


def texts(path):
    """The markdown cells of a notebook, in order."""
    return [cell["source"] for cell in read_notebook(path)["cells"] if cell["cell_type"] == "markdown"]


def flat(tokens):
    for token in tokens:
        yield token
        yield from flat(token.children or [])


def local_links(text):
    """Where a text's links and pictures lead, those to other sites aside."""
    found = [token.attrGet("href") or token.attrGet("src") for token in flat(MARKDOWN.parse(text))]
    return [link for link in found if link and not re.match(r"[a-z][a-z0-9+.-]*:", link)]


def said(text):
    """What a text says outside of links, code and HTML."""
    inside, words = 0, []
    for token in flat(MARKDOWN.parse(text)):
        inside += (token.type == "link_open") - (token.type == "link_close")
        if token.type in ("text", "softbreak") and not inside:
            words.append(token.content or " ")
    return "".join(words)


def anchors(path):
    """The names of headings: on the site those of pages and notebooks, in a repository's viewer those of pages."""
    text = "\n".join(texts(path)) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebooks_links_lead_to_notebooks_beside_it(path):
    """`make lab` opens JupyterLab on workbook/ alone: a link to anything above it is dead there. Nor do JupyterLab, the
    site and a repository's viewer agree on the names of headings.
    """
    assert {link for text in texts(path) for link in local_links(text)} <= {*NAMES} - {path.name}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_left_by_links(path):
    """At its top to the one before and the one after, at its end to the one after, anywhere to one that it names."""
    title, *rest = texts(path)
    number = NAMES.index(path.name)
    before, after = NAMES[max(number - 1, 0) : number], NAMES[number + 1 : number + 2]
    assert {*before, *after} <= {*local_links(title)}
    end = [link for text in rest if "**You can now**" in text for link in local_links(text)]
    assert {*after} <= {*end}
    for text in (title, *rest):
        assert not re.search(r"[Nn]otebooks?\s+\d\d|[Nn]ext notebook\b(?!:)", said(text)), text
        html = [token.content for token in flat(MARKDOWN.parse(text)) if token.type.startswith("html")]
        assert not LINK.search("".join(html)), "a link inside of HTML is shown as it is written"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_further_reading_says_what_is_in_it(path):
    (text,) = (text for text in texts(path) if "Further reading" in text)
    lists = re.findall(r"(?:^- .*\n?)+", text.split("Further reading")[1], re.MULTILINE)
    assert lists and all(len(one.splitlines()) <= 11 for one in lists), "ten or so are read, forty are not"
    for entry in "".join(lists).splitlines():
        source, *sentence = LINK.split(entry)
        assert sentence and len(" ".join(sentence).split()) > 5 and entry.endswith("."), entry


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_pages_links_lead_to_files(page):
    for link in local_links(page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name} links {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links {link}"
