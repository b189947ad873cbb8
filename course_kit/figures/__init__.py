"""The course's figures: one module per package of course_lib. Each function takes measurements and returns a figure."""
