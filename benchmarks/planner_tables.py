"""Tables of the figures of benchmarks/planner.py."""

from __future__ import annotations

import numpy as np

GOALS = {"tokens/s": 0.05, "peak memory": 0.04, "ok or out of memory": 0.95, "failed favorites": 0.05, "regret": 0.06}
REGRET_PARTS = ("regret", "other_model", "unexplained", "caution", "scatter", "avoidable")


def four_digits(figure):
    """Return a number, or all numbers in lists and dictionaries, rounded to four significant digits."""
    if isinstance(figure, dict):
        return {name: four_digits(each) for name, each in figure.items()}
    if isinstance(figure, list | tuple):
        return [four_digits(each) for each in figure]
    return float(f"{figure:.4g}") if isinstance(figure, float) else figure


def table(head: list[str], rows: list[list]) -> None:
    """Print a table with its first column aligned to the left."""
    lines = [[f"{each:.3g}" if isinstance(each, float) else str(each) for each in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        print("  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]))
    print()


def percent(share: float) -> str:
    """Return a share as a percentage."""
    return f"{share:.1%}"


def show_accuracy(result: dict) -> None:
    """Print the figures and the goals."""
    names, rows = list(GOALS), []
    for size, goals in result["goals"].items():
        limits = [f"{'>' if name == 'ok or out of memory' else '<'} {percent(goal)}" for name, goal in goals.items()]
        rows.append([f"goal, {size}", "", "", *limits])
    for how in ("in sample", "cross-validated"):
        for size, of_size in result[how].items():
            for which in ("all", "without the slow mode"):
                count = of_size["runs of the slow mode"] if which == "all" else ""
                row = of_size[which]
                rows.append([f"{how}, {size}, {which}", row["runs"], count, *(percent(row[name]) for name in names)])
    table(["", "runs", "slow mode", *names], rows)


def show_programs(result: dict) -> None:
    """Print the errors of each program's constants by source, in sample and left out; and the constants."""
    rows = [
        [f"{row['program']}: {row['source']}", row["runs"], row["predicted / measured"], percent(row["in sample"])]
        + ["" if row["left out"] is None else percent(row["left out"])]  # a program with one source
        for row in result["programs"]
    ]
    table(["by program, cross-validated by source", "runs", "predicted / measured", "in sample", "left out"], rows)
    rows = [
        [f"{program}: {name}", *values]
        for program, fitted in result["constants of programs"].items()
        for name, values in fitted.items()
    ]
    table(["constant", "fitted", "90% from", "to", "in course_lib"], rows)


def show_regret(result: dict) -> None:
    """Print the regret of each cell, the mean of each part, and the mean regret under other limits on the risk."""
    names = ("regret", "unavoidable", "caution", "avoidable")
    rows = [
        [f"{cell['model']}, {cell['nodes']}", cell["pick"], cell["fastest"], percent(cell["comparable runs differ by"])]
        + [percent(cell[name]) for name in names]
        + [cell["reason"]]
        for cell in result["cells"]
    ]
    rows += [
        [f"mean, {size}", "", "", "", *(percent(mean[name]) for name in names), ""]
        for size, mean in result["means"].items()
    ]
    table(["regret", "pick", "fastest", "differ", *names, "reason"], rows)
    shares = [[size, *(percent(mean[name]) for name in REGRET_PARTS)] for size, mean in result["means"].items()]
    table(["mean regret, by part", *REGRET_PARTS], shares)
    print(f"equal runs scatter by {percent(result['equal runs scatter by'])} (standard deviation of the logarithm)")
    limits = [
        [risk, percent(of["regret"]), percent(of["failed favorites"])] for risk, of in result["limits on risk"].items()
    ]
    table(["limit on risk", "mean regret", "failed favorites"], limits)


def show(result: dict) -> None:
    """Print all results except the predictions."""
    rows = [
        [
            name,
            *(", ".join(f"{v:.4g}" for v in np.atleast_1d(result[which][name])) for which in ("constants", "course")),
        ]
        for name in result["constants"]
    ]
    table(["constant", "fitted", "in course_lib"], rows)
    show_accuracy(result)
    names = ["tokens/s", "peak memory", "ok or out of memory", "regret", "regret, without the slow mode"]
    cell_rows = [
        [cell["model"], cell["nodes"], cell["runs"], cell["slow mode"], *(percent(cell[name]) for name in names)]
        for cell in result["cells"]
    ]
    table(["cross-validated", "nodes", "runs", "slow mode", *names], cell_rows)
    show_regret(result["regret"])
    published = [[source, n, ratio, percent(error)] for source, (n, ratio, error) in result["published"].items()]
    table(["published by", "runs", "predicted / measured", "median error"], published)
    show_programs(result)
    refused = [[name, n, of] for name, (n, of) in result["published, refused as out of memory"].items()]
    table(["published runs, which ran", "refused as out of memory", "of"], refused)
    show_questions(result["questions"])
    table(["published and left out", "runs"], [list(each) for each in result["published, left out"].items()])
    print(*(f"{name}: {each}" for name, each in four_digits(result["search"]).items()), sep=", ")


def show_questions(result: list[dict]) -> None:
    """Print each published job: its layout as measured and as predicted, and the planner's first answer."""
    names = ["program", "GPUs", "layout", "measured, s", "predicted, s", "predicted / measured", "MFU", "GiB", "risk"]
    rows = []
    for each in result:
        published, first = each["published"], each["first"]
        ratio = published["step_s"] / published["measured_s"]
        rows.append([f"{each['model']}, {each['dtype']}", each["program"], each["gpus"], published["layout"]])
        rows[-1] += [published["measured_s"], *predicted(published, ratio)]
        if first is None:
            rows.append(["  first answer", "", "", "nothing fits", *[""] * 6])
            continue
        label = f"  first answer, {percent(each['faster'])} faster"
        rows.append([label, "", "", first["layout"], "", *predicted(first, "")])
    table(["published job", *names], rows)
    for each in result:
        if each["first"] is not None and each["untested"]:
            print(f"{each['model']}, {each['dtype']}, {each['gpus']} GPUs, no run has: {'; '.join(each['untested'])}")
    print()


def predicted(of: dict, ratio: float | str) -> list:
    """Return the cells of a layout's prediction."""
    return [of["step_s"], ratio, percent(of["mfu"]), of["gib"], percent(of["risk"])]
