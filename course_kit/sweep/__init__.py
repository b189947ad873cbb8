"""Real runs of many layouts, one after another, with a time limit and a memory limit: `python -m course_kit.sweep`."""
