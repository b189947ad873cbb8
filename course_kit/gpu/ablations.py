"""One idea less: the same kernel with a few lines of its source replaced, to see the effect of each idea.

A kernel that contains six ideas is fast, or not, by all of them at once. Take one away and leave the rest: what then
changes is that idea's share (an ablation). Such a variant must not be a second kernel that has to be kept in sync with
the first: `undone` makes it from the source that runs, and raises if the source no longer has the line. The result
is a kernel like any other: launched, compiled for a GPU that is not there, its memory transactions counted.

    variant = undone(flash_forward_kernel, STEPS["powers of e"])
    print(difference(flash_forward_kernel, variant))

`STEPS` has the ideas of the forward kernel, each as what to write in its place. All compute the same attention.

- powers of e: the hardware knows powers of 2, so exp(x) is 2^(x log2 e), one more multiplication per score. Triton's
  exp also gets numbers below 2^-126 right, by a comparison and two more multiplications; its exp2 takes them for 0.
- scores scaled: one more multiplication per score; the multiply-add that subtracts the maximum has room for it.
- divided in every step: out is normalized after each tile, as in FlashAttention (Dao et al. 2022, algorithm 1, line
  12), and not once at the end (FlashAttention-2, Dao 2023, §3.1.1): [BLOCK_Q, BLOCK_D] more multiplications per tile.
- mask in every tile: comparisons and a selection per score, though only tiles on the diagonal need them (§3.1.1).
- two loops: the full tiles, then the partial ones. The assembler then lets each matmul wait for the one before.
- every tile visited: half of all causal scores are computed and thrown away (§3.1.1): more iterations, not longer ones.
- shortest first: the programs with the most tiles begin last, and the GPU waits for the last of them.
"""

import ast
import difflib
import itertools
import sys

import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import ConstexprFunction, KernelInterface

from course_kit.gpu.sources import Source, full_name, rebuild, sources

VARIANTS = itertools.count(1)
STEPS: dict[str, dict[str, str]] = {
    "powers of e": {
        "powers = tl.exp2(": "powers = tl.exp(",
        "shrink = tl.exp2(": "shrink = tl.exp(",
        "keys, scale * LOG2_E,": "keys, scale,",
    },
    "scores scaled": {
        "higher = tl.maximum(highest, tl.max(scores, axis=1))": (
            "scores = scores * to_base_2\nhigher = tl.maximum(highest, tl.max(scores, axis=1))"
        ),
        "tl.exp2(scores * to_base_2 - (higher * to_base_2)[:, None])": "tl.exp2(scores - higher[:, None])",
        "tl.exp2((highest - higher) * to_base_2)": "tl.exp2(highest - higher)",
        "highest * scale + tl.log(total)": "highest / LOG2_E + tl.log(total)",
    },
    "divided in every step": {
        "total = total * shrink + tl.sum(powers, axis=1)": (
            "shrink = total * shrink\ntotal = shrink + tl.sum(powers, axis=1)"
        ),
        "v_tile, weighted * shrink[:, None])": "v_tile, weighted * shrink[:, None]) * (1 / total)[:, None]",
        "weighted / total[:, None]": "weighted",
    },
    "mask in every tile": {"if first_key >= unmasked_end:": "if True:"},
    "two loops": {
        "for first_key in range(0, end, BLOCK_K):": (
            "for part in tl.static_range(2):\n"
            "  for first_key in range(part * unmasked_end, end if part else unmasked_end, BLOCK_K):"
        ),
        "if first_key >= unmasked_end:": "if part:",
    },
    "every tile visited": {"BLOCK_K * BLOCK_K, tl.minimum(keys, last)": "BLOCK_K * BLOCK_K, keys"},
    "shortest first": {"(tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q": "tl.program_id(0) * BLOCK_Q"},
}


def undone(kernel, changes: dict[str, str]):
    """Return a variant of the kernel with `changes` made in its source or in the source of functions it calls.

    Each key is a part of one line that occurs once in all of these sources; its value replaces it, with further lines
    indented like the first. New names must be constants and functions of the function's module. The variant of an
    autotuned kernel has no autotuner. Raises ValueError for a key that does not occur exactly once, or whose
    replacement is not valid Python.
    """
    kernel = kernel.fn if isinstance(kernel, Autotuner) else kernel
    functions = sources(kernel)
    for old, new in changes.items():
        matches = [source for source in functions.values() for _ in range(source["text"].count(old))]
        if len(matches) != 1:
            times = f"{len(matches)} times" if matches else "nowhere"
            raise ValueError(
                f"{old!r} occurs {times} in {kernel.fn.__name__} and the functions it calls: it must occur once"
            )
        replace(matches[0], old, new)
    find_names(functions)
    return rebuild(renamed_sources(functions))


def replace(source: Source, old: str, new: str) -> None:
    """Replace `old` with `new` in the source's text."""
    before, after = source["text"].split(old)
    line = before.rpartition("\n")[2]
    indent = line[: len(line) - len(line.lstrip())]
    text = before + new.replace("\n", "\n" + indent) + after
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise ValueError(
            f"{new!r} in place of {old!r}: {source['name']} is no longer valid Python, {error.msg}"
        ) from None
    source["text"] = text


def find_names(functions: dict[str, Source]) -> None:
    """Add the constants and functions that changed texts newly name, with all functions that these call."""
    for source in list(functions.values()):
        module = vars(sys.modules[source["module"]])
        known = {**source["modules"], **source["constants"], **source["functions"]}
        named = {node.id for node in ast.walk(ast.parse(source["text"])) if isinstance(node, ast.Name)}
        for alias in sorted(named - set(known) & set(module)):
            value = module.get(alias)
            if isinstance(value, triton.language.constexpr):
                source["constants"][alias] = value.value
            elif isinstance(value, (KernelInterface, ConstexprFunction)):
                source["functions"][alias] = full_name(value)
                if full_name(value) not in functions:
                    sources(value, functions)


def renamed_sources(functions: dict[str, Source]) -> dict[str, Source]:
    """Return the sources under new names: Python, and with it Triton, finds a function's text by its file's name."""
    number = next(VARIANTS)
    renamed = {name: f"{name}, variant {number}" for name in functions}
    return {
        renamed[name]: source | {"functions": {alias: renamed[called] for alias, called in source["functions"].items()}}
        for name, source in functions.items()
    }


def difference(kernel, variant) -> str:
    """Return the difference between a kernel and its variant, function by function: "-" before an old line, "+" before
    a new one.
    """
    kernel, variant = (each.fn if isinstance(each, Autotuner) else each for each in (kernel, variant))
    before, after = sources(kernel), sources(variant)
    report = []
    for name in before | after:
        old, new = (functions[name]["text"].splitlines() if name in functions else [] for functions in (before, after))
        lines = difflib.unified_diff(old, new, n=0, lineterm="")
        changed = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
        report += [f"in {name.rpartition('.')[2]}", *changed] if changed else []
    return "\n".join(report)
