"""Formulas as MathML, which browsers draw themselves: no script, no font and nothing from the network."""

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

LOG = logging.getLogger(__name__)


def draw(as_block: bool):
    """Write a formula's MathML. If the formula cannot be parsed, a warning names the page and the line.

    The theme lets the keyboard scroll a long formula, as it does for the class of its wide tables.
    """

    def visit(translator, node) -> None:
        try:
            formula = tex2mathml(node.astext(), as_block=as_block)
            translator.body.append(
                f'<div class="formula pst-scrollable-table-container">{formula}</div>' if as_block else formula
            )
        except MathError as error:
            LOG.warning("%s In: %s", error, node.astext(), location=node)
        raise nodes.SkipNode

    return visit


def setup(app) -> dict:
    app.add_html_math_renderer("mathml", (draw(False), None), (draw(True), None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
