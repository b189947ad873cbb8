"""Docstrings as the reference shows them: plain text, with indented blocks as code and stars kept literally."""


def read_plainly(app, what, name, obj, options, lines: list[str]) -> None:
    """Turn a docstring's lines into reStructuredText, in place."""
    if what == "data":  # it has its type's docstring
        lines.clear()
    plain, in_block = [], False
    for line in lines:
        indented = line.startswith(" ")
        if indented and not in_block and plain and not plain[-1]:
            plain += ["::", ""]
            in_block = True
        in_block = in_block and (indented or not line)
        plain.append(line if in_block else line.replace("*", r"\*"))
    lines[:] = plain


def setup(app) -> dict:
    app.connect("autodoc-process-docstring", read_plainly)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
