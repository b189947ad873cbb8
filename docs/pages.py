"""Content that Sphinx adds to pages when it reads or writes them. The source files do not change.

A line `<!-- NAME -->` of a page is replaced by GENERATED's text for that name. The cheatsheet gets its drawing and a
search field; a notebook's page links the first use of each glossary term to the glossary. A figure has its title as its
caption, and a picture links to its file. A phone shows tables of text as lists; for these, cells have their column's
title.
"""

import re

from docutils import nodes

from blank_branch import BRANCH
from measured import RESULTS, measured
from methods import CLASSES, DOCS, SHEET, course_map, drawing, methods

COLAB = """## In Colab or Binder

Each notebook's page has buttons that open it there, with blank exercises. Its first cell installs what is missing, and
the text above that cell says what works differently.
"""


def colab(app) -> str:
    """Return the note on launch buttons, or nothing without a repository URL."""
    app.env.note_reread()  # the page depends on no file for it
    return COLAB if app.config.html_theme_options.get("repository_url") else ""


GENERATED = {
    "map": (lambda _: course_map(methods(), "../"), [SHEET, CLASSES]),
    "measured": (lambda _: measured(), [RESULTS]),
    "colab": (colab, []),
}
SEARCH = '<input type="search" id="method-search" placeholder="Search the methods" aria-label="Search the methods">'
GLOSSARY = "docs/glossary"
LANDING, FIELD = "docs/index", "docs/field"
STILL = "The controls need a running kernel. The picture shows their initial state. "
SIGNATURE = re.compile(r"<dl>\s*(?:<dd>(?:(?!</?d[dlt]>).)*</dd>\s*)+</dl>", re.DOTALL)
TITLED = re.compile("(Figure|Measured|Widget): ")
# Text in these is left alone.
NOT_LINKED = (nodes.title, nodes.reference, nodes.literal, nodes.literal_block, nodes.math, nodes.math_block, nodes.raw)


def fill(app, docname: str, content: list[str]) -> None:
    """Insert the generated content into a page's text, and record the files that the page depends on."""

    def made(match: re.Match) -> str:
        make, sources = GENERATED[match[1]]
        for source in sources:  # a folder counts as changed each time, so a new file in it is seen
            app.env.note_dependency(str(source), docname=docname)
        return make(app)

    if docname.startswith("docs/"):
        content[0] = re.sub(rf"^<!-- ({'|'.join(GENERATED)}) -->$", made, content[0], flags=re.MULTILINE)
    if docname == "CHEATSHEET":
        app.env.note_dependency(str(CLASSES), docname=docname)
        before, head, rows = content[0].partition("| method |")
        content[0] = f"{before}{drawing(methods(), '')}\n\n{SEARCH}\n\n{head}{rows}"
    if docname.startswith("notebooks/"):
        app.env.note_dependency(str(DOCS / "glossary.md"), docname=docname)


def entries() -> list[tuple[list[str], str]]:
    """Return the glossary's entries: the terms of each, and the notebook that teaches it."""
    terms = []
    for lines in re.findall(r"^(?:(?!```)\S.*\n)+(?:  .*\n)+", (DOCS / "glossary.md").read_text("utf-8"), re.MULTILINE):
        words = [line for line in lines.splitlines() if not line.startswith(" ")]
        if teacher := re.search(r"\(\.\./(notebooks/\w+)\.ipynb\)\)$", lines.rstrip()):
            terms.append((words, teacher[1]))
    return terms


def pattern(word: str) -> str:
    """Return a regex for a glossary term in running text: plural, capitalized, or across a line break."""
    start = f"[{word[0]}{word[0].upper()}]" if word.islower() else re.escape(word[0])
    rest = r"\s+".join(re.escape(part) for part in word[1:].split(" "))
    return rf"({start}{rest}(?:s|es)?)"


def link_words(app, doctree: nodes.document, docname: str) -> None:
    """Link the first occurrence of each term in a notebook's page.

    Skips symbols of one letter, and terms with a note in parentheses before the notebook that teaches them: there
    they mean something else.
    """
    if not docname.startswith("notebooks/"):
        return
    known = [word for words, teacher in entries() for word in words if "(" not in word or docname >= teacher]
    objects = app.env.get_domain("std").get_objects()
    anchors = {name: anchor for name, _, kind, _, anchor, _ in objects if kind == "term"}
    known = sorted((word for word in known if len(word) > 1 and word in anchors), key=len, reverse=True)
    any_word = re.compile(rf"(?<![\w-])(?:{'|'.join(pattern(word.split(' (')[0]) for word in known)})(?![\w-])")
    page, seen = app.builder.get_relative_uri(docname, GLOSSARY), set()
    for text in list(doctree.findall(nodes.Text)):
        if any(isinstance(parent, NOT_LINKED) for parent in parents(text)):
            continue
        new_nodes, end = [], 0
        for match in any_word.finditer(text):
            word = known[match.lastindex - 1]
            if word not in seen:
                seen.add(word)
                link = nodes.reference("", match[0], refuri=f"{page}#{anchors[word]}", internal=True, classes=["word"])
                new_nodes += [nodes.Text(text[end : match.start()]), link]
                end = match.end()
        if new_nodes:
            text.parent.replace(text, [*new_nodes, nodes.Text(text[end:])])


def caption_pictures(app, doctree: nodes.document, docname: str) -> None:
    """Put the title of a figure below it, and give each picture a width: Sphinx links those with one to their files."""
    for number, image in enumerate(list(doctree.findall(nodes.image))):
        image.setdefault("width", "100%")
        if title := TITLED.match(image.get("alt", "")):
            caption, figure = nodes.caption("", image["alt"]), nodes.figure(ids=[f"figure-{number}"])
            if title[1] == "Widget":
                start = f"{app.builder.get_relative_uri(docname, LANDING)}#start"
                link = nodes.reference("", "Start the course", refuri=start, internal=True)
                caption += [nodes.Text(f". {STILL}"), link, nodes.Text(", then run the cell.")]
            image.replace_self(figure)
            figure += [image, caption]


def label_cells(app, doctree: nodes.document, docname: str) -> None:
    """Put the title of its column into each cell of the tables of text: those of some pages, a notebook's first one."""
    tables = list(doctree.findall(nodes.table)) if docname in (LANDING, FIELD, "CHEATSHEET") else []
    if docname.startswith("notebooks/"):
        tables = list(doctree.findall(nodes.table))[:1]
    for table in tables:
        table["classes"].append("stacked")
        head, *rows = table.findall(nodes.row)
        for row in rows:
            for title, cell in zip(head, row, strict=True):
                if title.astext() and cell.astext():
                    cell.insert(0, nodes.inline("", title.astext(), classes=["label"]))


def parents(node: nodes.Node):
    while node.parent is not None:
        node = node.parent
        yield node


def fix_signatures(app, pagename: str, templatename: str, context: dict, doctree) -> None:
    """Replace the lists in which Sphinx writes the parameters of a long signature: without terms, they are no lists."""
    if "body" in context:
        context["body"] = SIGNATURE.sub(
            lambda match: match[0].replace("dl>", "div>").replace("dd>", "div>"), context["body"]
        )


def open_blanks(app, pagename: str, templatename: str, context: dict, doctree) -> None:
    """Let the launch buttons open the blank notebook, on a branch of its own: scripts/blank_branch.py makes it."""
    for group in context.get("header_buttons", []):
        if group.get("label") == "launch-buttons":
            for button in group["buttons"]:
                url = re.sub(r"/main(?=/notebooks/|\?urlpath=)", f"/{BRANCH}", button["url"])
                button["url"] = re.sub(r"(?<=/)notebooks(?=/\w+\.ipynb)", "workbook", url)


def setup(app) -> dict:
    app.connect("source-read", fill)
    for change in (link_words, caption_pictures, label_cells):
        app.connect("doctree-resolved", change)
    app.connect("html-page-context", fix_signatures)
    app.connect("html-page-context", open_blanks, priority=900)  # after the theme, which makes the buttons
    app.add_css_file("pages.css")
    app.add_js_file("search_methods.js", loading_method="defer")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
