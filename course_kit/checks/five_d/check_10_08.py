"""Check of exercise 10.8: predicted local shapes against the recorded ones."""

from __future__ import annotations

from course_kit.checks.five_d.references import reference_models
from course_kit.labs.five_d.counts import local_shapes
from course_kit.labs.five_d.models import MOE
from course_kit.ranks import shared

LAYOUT = "dp2,ep2,cp2,tp2,sp,mb2"
MODULES = {"attention_norm", "core", "o_proj", "mlp_norm", "mlp"}


def check(shapes: dict[str, list[int]]) -> None:
    """Judge the shapes that leave five modules."""
    assert set(shapes) == MODULES, f"name the five modules: {sorted(shapes)}"
    with reference_models(), shared(8).within(40):
        noted = shared(8)(local_shapes, LAYOUT, MOE)[0].shapes
    wrong = [name for name, shape in shapes.items() if list(shape) != noted[name]]
    assert not wrong, f"the model disagrees about {wrong}: think of who cuts sequences, tokens, heads there"
