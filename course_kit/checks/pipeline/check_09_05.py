"""Check of exercise 09.5: `Progress.missing` names the action that an action still needs."""

from __future__ import annotations

from course_lib.pipeline import actions, schedules
from course_lib.pipeline.actions import Action

ASKED = (
    (("F", 0, 2), None, "the first stage's forward needs nothing"),
    (("F", 1, 2), (True, 0, 2), "a forward needs the forward of the stage before"),
    (("B", 2, 3), (True, 2, 3), "the last stage's backward needs its own forward"),
    (("B", 1, 0), (True, 1, 0), "a backward needs its own forward first of all"),
    (("I", 1, 0), (True, 1, 0), "an I needs its own forward first of all, as a B does"),
    (("I", 2, 3), (True, 2, 3), "the last stage's I needs its own forward"),
    (("W", 1, 0), (False, 1, 0), "W needs its own I"),
)


def check() -> None:
    """Assert the missing action at the start, and as actions of three stages are done."""
    progress = actions.Progress(schedules.afab(3, 4))
    for action, wanted, why in ASKED:
        result = progress.missing(Action(*action))
        assert result == wanted, f"{Action(*action)}: {why}, so the answer is {wanted}, not {result}"
    for done in (("F", 0, 0), ("F", 1, 0), ("F", 2, 0)):
        progress.mark(Action(*done))
    assert progress.missing(Action("F", 1, 0)) is None, "the stage before is done"
    assert progress.missing(Action("F", 1, 1)) == (True, 0, 1), "another micro-batch does not matter"
    assert progress.missing(Action("B", 2, 0)) is None, "the last stage's backward needs its own forward alone"
    try:
        missing = progress.missing(Action("I", 2, 0))
    except IndexError:
        raise AssertionError("I of the last stage: there is no stage after it to look at, as for a B") from None
    assert missing is None, "the last stage's I needs its own forward alone, as a B does"
    assert progress.missing(Action("W", 2, 0)) == (False, 2, 0), "W needs its own I: its forward alone will not do"
    assert progress.missing(Action("I", 1, 0)) == (False, 2, 0), "I needs the backward of the stage after, as B does"
    progress.mark(Action("I", 2, 0))
    assert progress.missing(Action("B", 1, 0)) is None and progress.missing(Action("W", 2, 0)) is None, (
        "after I of stage 2"
    )
    progress.mark(Action("W", 1, 0))
    assert progress.missing(Action("B", 0, 0)) == (False, 1, 0), "a W unblocks no action"
