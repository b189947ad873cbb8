"""Checks of notebook 07's exercises in course_lib.context_parallel, and what they share."""
