"""The instruments that the lessons use and do not teach: written by hand, never imported by `course_lib`."""

import sys

import course_lib  # noqa: F401  before Triton: where there is no GPU, it asks for the interpreter

# A kernel's shell: ipykernel may have been imported without one, and without IPython.
if sys.modules.get("IPython") and hasattr(_shell := sys.modules["IPython"].get_ipython(), "kernel"):
    from course_kit.widgets.cell_bars import show_bars

    show_bars(_shell)
    _shell.config.InlineBackend.figure_formats = {"retina"}  # two pixels per point, read when the first figure is drawn
