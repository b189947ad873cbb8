"""The text of an answer: the numbers and strings of `answer.answer`, as the lines that the program prints."""

from __future__ import annotations

import shlex
from string import ascii_lowercase

from course_lib.best_config.one_layout import Numbers
from course_lib.best_config.simplicity import SAME

NOTABLE = 0.1  # share of a step that the overlap of data parallelism must save to be mentioned
MFU_LINE = "MFU counts attention in full (PaLM), causal MFU half of the scores"


def in_lines(command: str, width: int = 110) -> str:
    """Return a shell command in lines of up to `width` letters (longer words have a line of their own), which the shell
    reads as one.
    """
    first, *rest = map(shlex.quote, shlex.split(command))
    lines = [first]
    for word in rest:
        if len(lines[-1]) + len(word) < width:
            lines[-1] += f" {word}"
        else:
            lines.append(f"    {word}")
    return " \\\n".join(lines)


def parts_of(parts: dict[str, float], unit: str) -> str:
    """Return a sum and its parts, the largest first; parts below a hundredth of the sum are added up as "other"."""
    total = sum(parts.values())
    large = {name: part for name, part in parts.items() if part >= total / 100}
    rest = total - sum(large.values())
    large |= {"other": rest} if rest > total / 1000 else {}
    listed = ", ".join(f"{name} {part:.3g}" for name, part in sorted(large.items(), key=lambda each: -each[1]))
    return f"{total:.3g} {unit}: {listed}"


def shares_of(shares: dict[str, float], total: float) -> str:
    """Return shares of a step that add up to `total`; shares below a tenth of the largest are added up as "other"."""
    least = max(map(abs, shares.values()), default=0) / 10
    large = {name: share for name, share in shares.items() if abs(share) >= least}
    rest = total - sum(large.values())
    large |= {"other": rest} if abs(rest) >= SAME else {}
    return ", ".join(f"{share:+.1%} {name}" for name, share in large.items())


def head_of(layout: Numbers) -> list[str]:
    """Return the two lines above a table of layouts, with the columns of one of them."""
    days, usable = f"{'days':>9}" if "days" in layout else "", f"of {layout['usable_gib']:.0f}"
    first = f"{'tokens/s':>10}{'tokens/s':>14}{'MFU':>8}{'causal':>8}{'GiB':>8}{'risk':>7}{days}{'speed':>8}"
    return [first, f"{'per GPU':>10}{'in total':>14}{'':>8}{'MFU':>8}{usable:>8}"]


def marks_of(layouts: list[Numbers]) -> dict[str, str]:
    """Return a letter for each uncommon choice of some layouts, in the order of appearance."""
    names = dict.fromkeys(name for layout in layouts for name in layout["uncommon"])
    return dict(zip(names, ascii_lowercase, strict=False))


def line_of(layout: Numbers, first: Numbers, marks: dict[str, str] | None = None) -> str:
    """Return a layout's line in the table, with its speed relative to the first layout's. marks: of `marks_of`; None to
    leave out the letters of uncommon choices.
    """
    days = f"{layout['days']:>9,.1f}" if "days" in layout else ""
    gain = first["step_s"] / layout["step_s"] - 1
    speed = "" if layout is first else f"{gain:+.1%}"
    numbers = "{tokens_per_s_per_gpu:>10,.0f}{tokens_per_s:>14,.0f}{mfu:>8.1%}{causal_mfu:>8.1%}{peak_gib:>8.1f}"
    numbers = (numbers + "{risk:>7.0%}").format(**layout)
    letters = ", ".join(sorted(marks[name] for name in layout["uncommon"])) if marks else ""
    return f"{numbers}{days}{speed:>8}  {layout['layout']}" + (f" ({letters})" if letters else "")


def table_lines(result: Numbers) -> list[str]:
    """Return the table of the best layouts, the layouts that are too risky below it, and the legend."""
    risky, layouts = result["risky"], [*result["layouts"], *result["risky"]]
    marks, first = marks_of(layouts), layouts[0]
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
    """Return as text how much longer one step takes than another. longer: the difference as a share of the other."""
    if longer >= 1:
        return f"takes {1 + longer:.1f} times as long"
    return f"takes {abs(longer):.1%} {'longer' if longer > 0 else 'less time'}"


def second_line(result: Numbers) -> str:
    """Return the line that compares the second layout with the first."""
    first, second = result["layouts"][:2]
    gib, longer = second["peak_gib"] - first["peak_gib"], second["step_s"] / first["step_s"] - 1
    if abs(longer) <= SAME:
        return f"the second, {second['layout']}, is as fast, with {abs(gib):.1f} GiB {'more' if gib > 0 else 'less'}"
    return f"the second, {second['layout']}, {takes(longer)}: {shares_of(result['second'], longer)}"


def untested_line(result: Numbers) -> list[str]:
    """Return the line about what no run has tested, with the fastest layout that runs have tested."""
    if not result["untested"]:
        return []
    line = f"no run has tested this: {'; '.join(result['untested'])}"
    if (tested := result["tested"]) is None:
        return [f"{line}; nor any other layout of this job"]
    gain = result["layouts"][0]["step_s"] / tested["step_s"] - 1
    numbers = f"{tested['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU ({gain:+.1%}), {tested['mfu']:.1%} MFU"
    return [f"{line}; the fastest tested layout: {tested['layout']}, {numbers}, {tested['peak_gib']:.1f} GiB"]


def exposed_line(result: Numbers) -> list[str]:
    """Return the line about how much of the first layout's speed depends on overlap, if it is much."""
    exposed, first = result["exposed"], result["layouts"][0]
    if (longer := exposed["step_s"] / first["step_s"] - 1) < NOTABLE:
        return []
    line = (
        f"without any overlap of data-parallel traffic the first would take {exposed['step_s']:.3g} s ({longer:+.0%})"
    )
    if exposed["fastest"] == first["layout"]:
        return [f"{line}, and still lead"]
    return [f"{line}, and {exposed['fastest']} would lead with {exposed['fastest_s']:.3g} s"]


def first_lines(result: Numbers) -> list[str]:
    """Return the lines about the first layout, and those that compare others with it."""
    first = result["layouts"][0]
    lines = untested_line(result)
    lines += [f"step of the first: {parts_of(result['time'], 's')}", f"its memory: {parts_of(result['memory'], 'GiB')}"]
    lines += exposed_line(result)
    lines += [second_line(result)] if len(result["layouts"]) > 1 else []
    for job in result["near"][:3]:
        gain = f"{job['gain']:+.1%} per GPU, {job['tokens_per_s'] / first['tokens_per_s'] - 1:+.1%} in total"
        lines.append(f"a better job size: {job['gpus']:,} GPUs, batch {job['batch']:,}: {gain}, {job['layout']}")
    if faster := result.get("kernels"):
        gain, gib = first["step_s"] / faster["step_s"] - 1, f"{faster['peak_gib']:.1f} GiB"
        speed = f"{faster['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU ({gain:+.1%})"
        lines.append(f"with fused kernels (--kernels): {speed}, {gib}, {faster['layout']}")
    return lines


def no_layout_line(result: Numbers) -> str:
    """Return the line for a job without a layout that fits."""
    if (lean := result["leanest"]) is None:
        return "no layout runs: change the GPUs, the batch, or the length"
    needs = f"needs {lean['needed_gib']:.1f} GiB of {lean['usable_gib']:.1f}, with a risk of {lean['risk']:.0%}"
    line = f"no layout fits: the leanest, {lean['layout']}, {needs}"
    if (enough := result["enough"]) is None:
        return line
    speed = f"{enough['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU, {enough['peak_gib']:.0f} GiB"
    return f"{line}; on {enough['gpus']:,} GPUs {enough['layout']} fits: {speed}"


def change_line(change: Numbers) -> str:
    """Return the line for a change that makes a rejected layout work."""
    if "layout" not in change:
        return f"  {change['change']}"
    speed = f"{change['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU"
    return f"  {change['change']}: fits at {change['peak_gib']:.0f} GiB, {speed}, {change['layout']}"


def asked_lines(result: Numbers) -> list[str]:
    """Return the lines about the question's layout."""
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
        compared = f"compared with the first answer, {asked['first']}, it {takes(slower)}"
        lines.append(f"{compared}: {shares}{'; ' if gib else ''}{gib}")
    return [*lines, "", "the best layouts of this job:"]


def as_text(result: Numbers) -> str:
    """Return the text of an answer, in lines."""
    batch, seq = result["batch"], result["seq"]
    tokens = f"{batch:,} sequences of {seq:,} tokens per step, {batch * seq:,} tokens"
    lines = [f"{result['model']} on {result['gpus']:,} x {result['cluster']}; {tokens}", f"for {result['program']}"]
    lines += [*(f"note: {note}" for note in result["notes"]), "", *(asked_lines(result) if "asked" in result else [])]
    lines += [] if result["layouts"] else [no_layout_line(result)]
    lines += [*table_lines(result), ""] if result["layouts"] or result["risky"] else []
    lines += first_lines(result) if result["layouts"] else []
    lines += ["", *(f"{count:>10,} rejected: {reason}" for reason, count in result["rejected"].items())]
    start = result.get("launch", {})
    if "command" in start:
        lines += ["", "launch it (the same command on each node), or let Slurm do it:"]
        lines += [in_lines(start["command"]), in_lines(start["slurm"])]
    elif start:
        lines += [""]
    return "\n".join([*lines, *([start["note"]] if start else [])])
