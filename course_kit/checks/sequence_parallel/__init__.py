"""Checks of notebook 07's exercises in course_lib.sequence_parallel, and what they share with the others of 07."""
