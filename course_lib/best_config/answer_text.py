"""What `answer.answer` returns, as the lines that the program prints."""

from __future__ import annotations

from string import ascii_lowercase

from course_lib.best_config.simplicity import SAME

NOTABLE = 0.1  # of a step: what the overlap of data parallelism has to save to be mentioned
MFU_LINE = "MFU counts attention in full (PaLM), causal MFU half of the scores"


def parts_of(parts: dict[str, float], unit: str) -> str:
    """Return a sum and its parts, the largest first; parts below a hundredth of it are added up."""
    total = sum(parts.values())
    large = {name: part for name, part in parts.items() if part >= total / 100}
    rest = total - sum(large.values())
    large |= {"other": rest} if rest > total / 1000 else {}
    listed = ", ".join(f"{name} {part:.3g}" for name, part in sorted(large.items(), key=lambda each: -each[1]))
    return f"{total:.3g} {unit}: {listed}"


def shares_of(shares: dict[str, float], total: float) -> str:
    """Return shares of a step that add up to `total`; those below a tenth of the largest are added up."""
    least = max(map(abs, shares.values()), default=0) / 10
    large = {name: share for name, share in shares.items() if abs(share) >= least}
    rest = total - sum(large.values())
    large |= {"other": rest} if abs(rest) >= SAME else {}
    return ", ".join(f"{share:+.1%} {name}" for name, share in large.items())


def head_of(one: dict) -> list[str]:
    """Return the two lines above a table of layouts; `one` of them says which columns there are."""
    days, usable = f"{'days':>9}" if "days" in one else "", f"of {one['usable_gib']:.0f}"
    first = f"{'tokens/s':>10}{'tokens/s':>14}{'MFU':>8}{'causal':>8}{'GiB':>8}{'risk':>7}{days}{'speed':>8}"
    return [first, f"{'per GPU':>10}{'in all':>14}{'':>8}{'MFU':>8}{usable:>8}"]


def marks_of(layouts: list[dict]) -> dict[str, str]:
    """Return a letter for each uncommon choice of some layouts, in the order in which they appear."""
    names = dict.fromkeys(name for layout in layouts for name in layout["uncommon"])
    return dict(zip(names, ascii_lowercase, strict=False))


def line_of(layout: dict, first: dict, marks: dict[str, str] | None = None) -> str:
    """Return a layout's line in the table; its speed is relative to the first layout's. marks: of `marks_of`; None to
    leave out what is uncommon.
    """
    days = f"{layout['days']:>9,.1f}" if "days" in layout else ""
    gain = first["step_s"] / layout["step_s"] - 1
    speed = "" if layout is first else f"{gain:+.1%}"
    numbers = "{tokens_per_s_per_gpu:>10,.0f}{tokens_per_s:>14,.0f}{mfu:>8.1%}{causal_mfu:>8.1%}{peak_gib:>8.1f}"
    numbers = (numbers + "{risk:>7.0%}").format(**layout)
    letters = ", ".join(sorted(marks[name] for name in layout["uncommon"])) if marks else ""
    return f"{numbers}{days}{speed:>8}  {layout['layout']}" + (f" ({letters})" if letters else "")


def table_lines(result: dict) -> list[str]:
    """Return the table of the best layouts, with those that are too risky below, and the legend."""
    risky, shown = result["risky"], [*result["layouts"], *result["risky"]]
    marks, first = marks_of(shown), shown[0]
    lines = head_of(first) if result["layouts"] else []
    lines += [line_of(layout, first, marks) for layout in result["layouts"]]
    if risky:
        faster = "faster by estimate" if result["layouts"] else "fits by estimate"
        lines.append(f"{faster}, but with a risk above {result['risk']:.0%} of running out of memory:")
        lines += [] if result["layouts"] else head_of(first)
        lines += [line_of(layout, first, marks) for layout in risky]
    lines += [f"uncommon: {', '.join(f'({letter}) {name}' for name, letter in marks.items())}"] if marks else []
    return [*lines, MFU_LINE + ("; both are of the BF16 peak" if "FP8" in result["program"] else "")]


def takes(longer: float) -> str:
    """Return how much longer a step takes than another, in words. longer: the difference as a share of the other."""
    if longer >= 1:
        return f"takes {1 + longer:.1f} times as long"
    return f"takes {abs(longer):.1%} {'longer' if longer > 0 else 'less time'}"


def second_line(result: dict) -> str:
    """Return the line that compares the second layout with the first."""
    first, second = result["layouts"][:2]
    more, longer = second["peak_gib"] - first["peak_gib"], second["step_s"] / first["step_s"] - 1
    if abs(longer) <= SAME:
        return f"the second, {second['layout']}, is as fast, with {abs(more):.1f} GiB {'more' if more > 0 else 'less'}"
    return f"the second, {second['layout']}, {takes(longer)}: {shares_of(result['second'], longer)}"


def untested_line(result: dict) -> list[str]:
    """Return the line that says what no run has tested, and the fastest layout that runs have tested."""
    if not result["untested"]:
        return []
    line = f"no run has tested this: {'; '.join(result['untested'])}"
    if (tested := result["tested"]) is None:
        return [f"{line}; nor any other layout of this job"]
    gain = result["layouts"][0]["step_s"] / tested["step_s"] - 1
    numbers = f"{tested['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU ({gain:+.1%}), {tested['mfu']:.1%} MFU"
    return [f"{line}; the fastest tested layout: {tested['layout']}, {numbers}, {tested['peak_gib']:.1f} GiB"]


def exposed_line(result: dict) -> list[str]:
    """Return the line that says how much of the first layout's speed rests on overlap, if it is much."""
    exposed, first = result["exposed"], result["layouts"][0]
    if (longer := exposed["step_s"] / first["step_s"] - 1) < NOTABLE:
        return []
    line = (
        f"without any overlap of data-parallel traffic the first would take {exposed['step_s']:.3g} s ({longer:+.0%})"
    )
    if exposed["fastest"] == first["layout"]:
        return [f"{line}, and still lead"]
    return [f"{line}, and {exposed['fastest']} would lead with {exposed['fastest_s']:.3g} s"]


def found_lines(result: dict) -> list[str]:
    """Return the lines about the layouts that fit."""
    first = result["layouts"][0]
    lines = untested_line(result)
    lines += [f"step of the first: {parts_of(result['time'], 's')}", f"its memory: {parts_of(result['memory'], 'GiB')}"]
    lines += exposed_line(result)
    lines += [second_line(result)] if len(result["layouts"]) > 1 else []
    for one in result["near"][:3]:
        gain = f"{one['gain']:+.1%} per GPU, {one['tokens_per_s'] / first['tokens_per_s'] - 1:+.1%} in all"
        lines.append(f"a better job size: {one['gpus']:,} GPUs, batch {one['batch']:,}: {gain}, {one['layout']}")
    if faster := result.get("kernels"):
        gain, gib = first["step_s"] / faster["step_s"] - 1, f"{faster['peak_gib']:.1f} GiB"
        speed = f"{faster['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU ({gain:+.1%})"
        lines.append(f"with fused kernels (--kernels): {speed}, {gib}, {faster['layout']}")
    return lines


def no_layout_line(result: dict) -> str:
    """Return the line for a job of which no layout fits."""
    if (lean := result["leanest"]) is None:
        return "no layout runs: change the GPUs, the batch, or the length"
    needs = f"needs {lean['needed_gib']:.1f} GiB of {lean['usable_gib']:.1f}, with a risk of {lean['risk']:.0%}"
    line = f"no layout fits: the leanest, {lean['layout']}, {needs}"
    if (more := result["enough"]) is None:
        return line
    speed = f"{more['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU, {more['peak_gib']:.0f} GiB"
    return f"{line}; on {more['gpus']:,} GPUs {more['layout']} fits: {speed}"


def change_line(change: dict) -> str:
    """Return the line for a change that makes a rejected layout work."""
    if "layout" not in change:
        return f"  {change['change']}"
    speed = f"{change['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU"
    return f"  {change['change']}: fits at {change['peak_gib']:.0f} GiB, {speed}, {change['layout']}"


def asked_lines(result: dict) -> list[str]:
    """Return the lines about the layout that was asked about."""
    asked = result["asked"]
    lines = [*head_of(asked), line_of(asked, asked)]
    lines += [f"uncommon: {', '.join(asked['uncommon'])}", ""] if asked["uncommon"] else [""]
    if asked["why_not"]:
        verdict = "not recommended" if asked["fits"] else "not allowed"
        lines += [f"{verdict}: {asked['why_not']}", *map(change_line, asked["changes"])]
    else:
        lines.append(f"allowed: number {asked['rank']:,} of {asked['among']:,} layouts by speed")
    lines += [f"no run has tested this: {'; '.join(asked['untested'])}"] if asked["untested"] else []
    lines += [f"step: {parts_of(asked['time'], 's')}", f"memory: {parts_of(asked['memory'], 'GiB')}"]
    if "first" in asked and asked["first"] != asked["layout"]:
        slower = asked["slower"]
        shares = shares_of(asked["differences"], slower)
        gib = ", ".join(f"{gib:+.1f} GiB {name}" for name, gib in asked["memory_differences"].items())
        lines.append(
            f"beside the first answer, {asked['first']}, it {takes(slower)}: {shares}{'; ' if gib else ''}{gib}"
        )
    return [*lines, "", "the best layouts of this job:"]


def as_text(result: dict) -> str:
    """Return what `answer` returned, as lines."""
    batch, seq = result["batch"], result["seq"]
    tokens = f"{batch:,} sequences of {seq:,} tokens per step, {batch * seq:,} tokens"
    lines = [f"{result['model']} on {result['gpus']:,} x {result['cluster']}; {tokens}", f"for {result['program']}"]
    lines += [*(f"note: {note}" for note in result["notes"]), "", *(asked_lines(result) if "asked" in result else [])]
    lines += [] if result["layouts"] else [no_layout_line(result)]
    lines += [*table_lines(result), ""] if result["layouts"] or result["risky"] else []
    lines += found_lines(result) if result["layouts"] else []
    lines += ["", *(f"{count:>10,} rejected: {reason}" for reason, count in result["rejected"].items())]
    start = result.get("launch", {})
    if "command" in start:
        lines += ["", "launch it (the same line on each node), or let Slurm do it:", start["command"], start["slurm"]]
    elif start:
        lines += [""]
    return "\n".join([*lines, *([start["note"]] if start else [])])
