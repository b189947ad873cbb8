"""A memory budget as a calculator with sliders (notebook 01)."""

from collections.abc import Callable

from course_kit.figures.single_gpu import memory_budget
from course_kit.widgets.redrawn import Drawing, png
from course_lib.single_gpu import memory
from course_lib.single_gpu.memory import POLICIES, param_count
from course_lib.single_gpu.model import PRESETS, ModelConfig

GPUS_GIB = {
    "24 GB (RTX 4090)": 24,
    "40 GB (A100)": 40,
    "80 GB (A100, H100)": 80,
    "96 GB (GH200)": 96,
    "141 GB (H200)": 141,
    "180 GB (B200)": 180,
    "192 GB (MI300X)": 192,
}
CUSTOM = "custom sizes"
MOST_GIB = 2**16  # where the axis ends


def _calculator_controls():
    """Return the widgets of the calculator by name; a preset moves the size sliders, and moving a size slider leaves
    the preset.
    """
    import ipywidgets as w

    style, lengths = (
        {"style": {"description_width": "110px"}, "layout": w.Layout(width="370px")},
        [2**n for n in range(9, 18)],
    )
    controls = {
        "preset": w.Dropdown(options=[*PRESETS, CUSTOM], value="llama3-8B", description="model", **style),
        "layers": w.IntSlider(min=1, max=160, description="layers L", **style),
        "hidden": w.IntSlider(min=64, max=20480, step=64, description="hidden h", **style),
        "ffn_hidden": w.IntSlider(min=88, max=65536, step=8, description="feed-forward f", **style),
        "vocab": w.IntSlider(min=256, max=262144, step=256, description="vocabulary v", **style),
        "batch": w.IntSlider(value=1, min=1, max=64, description="batch b", **style),
        "seq": w.SelectionSlider(
            value=4096, options=[(f"{n:,}", n) for n in lengths], description="sequence s", **style
        ),
        "policy": w.Dropdown(options=list(POLICIES), value="bf16", description="precision", **style),
        "recompute": w.Dropdown(options=["none", "selective", "matmuls", "full"], description="recompute", **style),
        "gpu": w.Dropdown(options=GPUS_GIB, value=80, description="GPU memory", **style),
    }
    sizes = ("layers", "hidden", "ffn_hidden", "vocab")

    def from_preset(_=None):
        if controls["preset"].value != CUSTOM:
            for name in sizes:
                controls[name].value = getattr(PRESETS[controls["preset"].value], name)

    def to_custom(change):
        preset = controls["preset"]
        if preset.value != CUSTOM and change["new"] != getattr(PRESETS[preset.value], change["owner"].key):
            preset.value = CUSTOM

    from_preset()
    controls["preset"].observe(from_preset, "value")
    for name in sizes:
        controls[name].key = name
        controls[name].observe(to_custom, "value")
    return controls


def memory_calculator(training_bytes: Callable[..., dict[str, float]] = memory.training_bytes) -> Drawing:
    """Return a widget: the memory of one GPU for a choice of model, batch, sequence, precision and recomputation,
    redrawn while a slider moves. training_bytes: the formulas, as in notebook 01.
    """
    import ipywidgets as w

    controls = _calculator_controls()
    picture, summary = w.Image(format="png"), w.HTML()

    def draw(_=None):
        at = {name: control.value for name, control in controls.items()}
        if at["preset"] == CUSTOM:  # head size 64 or 128, one K/V head for four query heads
            heads = at["hidden"] // (128 if at["hidden"] % 128 == 0 else 64)
            config = ModelConfig(
                at["layers"],
                at["hidden"],
                heads,
                heads // 4 if heads % 4 == 0 else heads,
                at["ffn_hidden"],
                at["vocab"],
            )
        else:
            config = PRESETS[at["preset"]]
        parts = training_bytes(config, at["batch"], at["seq"], at["policy"], at["recompute"])
        spare = at["gpu"] - sum(parts.values()) / 2**30
        figure = memory_budget({"one GPU": parts}, at["gpu"], MOST_GIB)
        picture.value, picture.width = png(figure), f"{figure.get_figwidth() * figure.dpi:.0f}"
        listed = ", ".join(f"{name} {size / 2**30:,.1f}" for name, size in parts.items())
        verdict = (
            f"fits by the formulas, {spare:,.1f} GiB to spare"
            if spare > 0
            else f"does not fit, {-spare:,.1f} GiB too much"
        )
        summary.value = f"<b>{param_count(config) / 1e9:,.2f} billion parameters: {verdict}</b><br>GiB: {listed}"

    for control in controls.values():
        control.observe(draw, "value")
    draw()
    columns = list(controls.values())
    return Drawing([w.HBox([w.VBox(columns[:5]), w.VBox(columns[5:])]), picture, summary])
