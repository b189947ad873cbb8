"""The instruments that the lessons use and do not teach: written by hand, never imported by `course_lib`."""

import course_lib  # noqa: F401  before Triton: where there is no GPU, it asks for the interpreter
