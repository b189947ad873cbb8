"""The planner as a widget: the best layouts for a choice of model, cluster and batch.

    planner()

Every change starts a search over all layouts (hundreds of thousands, within a second): the widget shows the answer of
`python -m course_lib.best_config` with a figure of its layouts, and below it the best MFU of the model's family, from 1
to 2,048 nodes. The heatmap takes twenty more searches, so it tries fewer settings, and is cached until the batch, the
length, the cluster or the family changes.
"""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Callable

import ipywidgets
from matplotlib.figure import Figure

from course_kit.figures import best_config as figures
from course_kit.planning.best_layouts import best_layouts
from course_kit.widgets.redrawn import Drawing, png
from course_lib.best_config.answer import answer
from course_lib.best_config.answer_text import as_text
from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.question import Question
from course_lib.best_config.simplicity import answer_rows
from course_lib.single_gpu.model import PRESETS

NODES = tuple(2**n for n in range(12))
HEATMAP_NODES = (1, 8, 64, 512, 2048)
# For the widget's heatmap: twenty searches per second. The other settings are almost never the best.
SCHEDULES = ("1f1b", "zb-h1", "zb-v")
HEATMAP_SETTINGS: dict[str, tuple] = {
    "micro_batch": (1, 2, 4, 8, 16),
    "schedule": SCHEDULES,
    "recompute": ("none", "full"),
}


def family(model: str) -> tuple[str, ...]:
    """Return the presets whose names begin with the same letters: llama3-8B is with llama3.2-1B, llama3-70B,
    llama3-405B.
    """
    letters = {name: re.split("[^A-Za-z]", name)[0] for name in (model, *PRESETS)}
    return tuple(name for name in PRESETS if letters[name] == letters[model])


Picture = tuple[bytes, str]  # a PNG image, and its width on the screen in pixels


def picture_of(figure: Figure) -> Picture:
    """Return a figure as a picture."""
    return png(figure), f"{figure.get_figwidth() * figure.dpi:.0f}"


@functools.lru_cache(maxsize=16)
def family_heatmap(models: tuple[str, ...], cluster: str, batch: int, seq: int) -> Picture:
    """Return the widget's heatmap. It is drawn only if an argument has changed."""
    configs = {name: PRESETS[name] for name in models}
    rows = best_layouts(configs, HEATMAP_NODES, CLUSTERS[cluster], batch, seq, HEATMAP_SETTINGS)
    where = f"{CLUSTERS[cluster].name}; {batch:,} sequences of {seq:,} tokens per step"
    return picture_of(figures.heatmap(rows, where, predicted=True))


def answer_in_html(question: Question) -> str:
    """Return the output of the planner's program as HTML."""
    return f"<pre style='line-height:1.3'>{html.escape(as_text(answer(question)))}</pre>"


def planner_controls() -> dict[str, ipywidgets.ValueWidget]:
    """Return the widgets of the planner by name. Sliders update on release: a search takes up to a second."""
    w = ipywidgets
    style = {"style": {"description_width": "140px"}, "layout": w.Layout(width="420px")}
    lengths, still = [2**n for n in range(9, 18)], {"continuous_update": False}
    nodes, tokens = ([(f"{n:,}", n) for n in numbers] for numbers in (NODES, lengths))
    return {
        "model": w.Dropdown(options=list(PRESETS), value="llama3-70B", description="model", **style),
        "cluster": w.Dropdown(options=list(CLUSTERS), value="H100", description="cluster", **style),
        "nodes": w.SelectionSlider(value=64, options=nodes, description="nodes", **still, **style),
        "batch": w.IntText(value=1024, description="batch, sequences", **style),
        "seq": w.SelectionSlider(value=4096, options=tokens, description="sequence, tokens", **still, **style),
    }


def show(image: ipywidgets.Image, draw: Callable[[], Picture]) -> str:
    """Show a picture in an image. In case of an error, hide the image and return the message."""
    try:
        image.value, image.width = draw()
    except ValueError as error:
        image.layout.display = "none"
        return str(error)
    image.layout.display = None
    return ""


def planner() -> Drawing:
    """Return a widget: the best layouts for a choice of model, cluster, number of nodes, batch and length, with the
    answer of `python -m course_lib.best_config`, and the best MFU of the model's family from 1 to 2,048 nodes.

    While it searches, a line says so, and what was shown for the previous choice is pale.
    """
    w = ipywidgets
    controls = planner_controls()
    message, best, answer_text = w.HTML(), w.Image(format="png"), w.HTML()
    across, below = w.Image(format="png"), w.HTML()
    shown = (best, answer_text, across, below)
    tried = f"The heatmap tries schedules {', '.join(SCHEDULES)} and micro-batches up to 16."

    def update(_=None) -> None:
        model, cluster, nodes, batch, seq = (control.value for control in controls.values())
        gpus = nodes * CLUSTERS[cluster].gpus_per_node
        title = f"{model} on {gpus:,} GPUs: {batch:,} sequences of {seq:,} tokens"
        message.value = f"<i>computing… {title}</i>"
        for part in shown:
            part.layout.opacity = "0.3"

        def draw_best() -> Picture:
            answer_text.value = ""
            question = Question(model, PRESETS[model], CLUSTERS[cluster], gpus, batch, seq)
            answer_text.value = answer_in_html(question)
            ranking = question.search()
            rows = [row for row, _ in answer_rows(question, ranking, 8)]
            return picture_of(figures.ranking(ranking, title=title, rows=rows))

        wrong = show(best, draw_best)
        best.layout.opacity = answer_text.layout.opacity = None
        wrong_below = show(across, lambda: family_heatmap(family(model), cluster, batch, seq))
        below.value = "" if wrong_below else tried
        message.value = f"<b>{wrong}</b>"
        across.layout.opacity = below.layout.opacity = None

    for control in controls.values():
        control.observe(update, "value")
    update()
    columns = list(controls.values())
    return Drawing([w.HBox([w.VBox(columns[:3]), w.VBox(columns[3:])]), message, *shown])
