"""The planner as a widget: the best layouts for a choice of model, cluster and batch.

    planner()

Every change starts a search over all layouts (hundreds of thousands, within a second): the widget shows the answer of
`python -m course_lib.best_config` with a figure of its layouts, and below it the best MFU of the model's family, from 1
to 2,048 nodes. The heatmap takes twenty more searches, so it tries fewer settings, and is cached until the batch, the
length, the cluster or the family changes.
"""

import functools
import html
import io
import re

from course_kit.figures.ranking import mfu_heatmap, ranking_figure
from course_lib.best_config.answer import answer
from course_lib.best_config.answer_text import as_text
from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.question import Question
from course_lib.best_config.simplicity import answer_rows
from course_lib.single_gpu.model import PRESETS

NODES = tuple(2**n for n in range(12))
HEATMAP_NODES = (1, 8, 64, 512, 2048)
# For the widget's heatmap: twenty searches per second. The other settings are almost never the best.
HEATMAP_SETTINGS = {
    "micro_batch": (1, 2, 4, 8, 16),
    "schedule": ("1f1b", "zb-h1", "zb-v"),
    "recompute": ("none", "full"),
}


def png(figure) -> bytes:
    """Return a figure as a PNG image."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def family(model: str) -> tuple[str, ...]:
    """Return the presets whose names begin with the same letters: llama3-8B is with llama3.2-1B, llama3-70B,
    llama3-405B.
    """
    letters = {name: re.split("[^A-Za-z]", name)[0] for name in (model, *PRESETS)}
    return tuple(name for name in PRESETS if letters[name] == letters[model])


@functools.lru_cache(maxsize=16)
def family_heatmap(models: tuple[str, ...], cluster: str, batch: int, seq: int) -> bytes:
    """Return the widget's heatmap as a PNG image. It is redrawn only if an argument has changed."""
    configs = {name: PRESETS[name] for name in models}
    return png(mfu_heatmap(configs, HEATMAP_NODES, CLUSTERS[cluster], batch, seq, HEATMAP_SETTINGS))


def answer_in_html(question: Question) -> str:
    """Return the output of the planner's program as HTML."""
    return f"<pre style='line-height:1.3'>{html.escape(as_text(answer(question)))}</pre>"


def _planner_controls() -> dict:
    """Return the widgets of the planner by name. Sliders update on release: a search takes up to a second."""
    import ipywidgets as w

    style = {"style": {"description_width": "140px"}, "layout": w.Layout(width="420px")}
    lengths, still = [2**n for n in range(9, 18)], {"continuous_update": False}
    return {
        "model": w.Dropdown(options=list(PRESETS), value="llama3-70B", description="model", **style),
        "cluster": w.Dropdown(options=list(CLUSTERS), value="H100", description="cluster", **style),
        "nodes": w.SelectionSlider(
            value=64, options=[(f"{n:,}", n) for n in NODES], description="nodes", **still, **style
        ),
        "batch": w.IntText(value=1024, description="batch, sequences", **style),
        "seq": w.SelectionSlider(
            value=4096, options=[(f"{n:,}", n) for n in lengths], description="sequence, tokens", **still, **style
        ),
    }


def planner():
    """Return a widget: the best layouts for a choice of model, cluster, number of nodes, batch and length, with the
    answer of `python -m course_lib.best_config`, and the best MFU of the model's family from 1 to 2,048 nodes.
    """
    import ipywidgets as w

    controls = _planner_controls()
    message, best, answer_text = w.HTML(), w.Image(format="png"), w.HTML()
    across, below = w.Image(format="png"), w.HTML()
    tried = f"The heatmap tries schedules {', '.join(HEATMAP_SETTINGS['schedule'])} and micro-batches up to 16."

    def show(picture, draw) -> str:
        """Draw into a picture. In case of an error, hide the picture and return the message."""
        try:
            picture.value, picture.layout.display = draw(), None
        except ValueError as error:
            picture.layout.display = "none"
            return str(error)
        return ""

    def update(_=None):
        model, cluster, nodes, batch, seq = (control.value for control in controls.values())
        gpus = nodes * CLUSTERS[cluster].gpus_per_node
        title = f"{model} on {gpus:,} GPUs: {batch:,} sequences of {seq:,} tokens"
        answer_text.value = ""

        def draw_best() -> bytes:
            question = Question(model, PRESETS[model], CLUSTERS[cluster], gpus, batch, seq)
            answer_text.value = answer_in_html(question)
            ranking = question.search()
            return png(ranking_figure(ranking, title=title, rows=[row for row, _ in answer_rows(question, ranking, 8)]))

        message.value = f"<b>{show(best, draw_best)}</b>"
        wrong = show(across, lambda: family_heatmap(family(model), cluster, batch, seq))
        below.value = "" if wrong else tried

    for control in controls.values():
        control.observe(update, "value")
    update()
    columns = list(controls.values())
    return w.VBox([w.HBox([w.VBox(columns[:3]), w.VBox(columns[3:])]), message, best, answer_text, across, below])
