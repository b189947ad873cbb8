"""Identifiers and docstrings use the field's terms: one term per concept, American spelling, "per" for "a"."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("course_lib", "course_kit", "scripts", "benchmarks", "docs", "examples")
PARALLEL = (  # packages where a part of a tensor is a shard
    "checkpoint context_parallel data_parallel expert_parallel five_d pipeline sequence_parallel tensor_parallel zero"
).split()

WORDS = {  # in an identifier, between underscores or capitals
    "a transform, apply_*": "verb verbs",
    "shard, chunk (of a checkpoint), tile, bucket": "piece pieces",
    "local_*": "own",
    "full, unsharded": "whole",
    "chunk": "box boxes",
    "message, error": "said told",
    "args; the noun": "chosen",
    "result; the noun": "found",
    "saved, retained": "kept",
    "index, position, path, location": "place places",
    "straggler delay": "lateness",
    "overlap_with": "meanwhile",
    "TP boundary": "borders",
    "all-to-all start and wait": "departure exchanged",
    "quantizer": "caster casters",
    "transposed": "turned",
    "accumulated": "carried",
    "owner ranks": "holders",
    "needs its own collective": "rides",
    "load buffers": "rooms",
    "fixed": "mended",
    "a rank, a process": "whoever nobody",
    "matmul": "product products",
    "gradient sync": "rounds",
}
NAMES = {  # whole identifiers
    "the noun": "more there here",
    "output_reduce, input_gather": "leave enter",
    "inspect": "look",
    "copy_from_params, all_gather_params": "take_values give_values",
    "accumulate_into_master": "hand_on",
    "steady_1f1b, delay_weight_grads, assign_microbatches": "in_turn put_off numbered ahead",
    "infer_stage_shapes": "negotiate",
    "new_disjoint_subgroups": "one_split",
    "aux_loss_coeff": "balance",
    "synchronize_for_save": "at_rest",
    "gather_or_raise": "together on_each",
    "write assignment": "own_share",
    "proxy parameters": "stand_in stand_ins",
}
PACKAGE_WORDS = {  # in an identifier of some packages
    "shard, chunk, partition": (PARALLEL, "part parts"),
    "post_send, wait_recv": (["pipeline"], "take put mail"),
    "forward_order, reducing": (["zero"], "ran sent"),
    "spec, tokens": (["five_d"], "word words"),
}
UNIT = (
    r"tokens/s|bytes|tokens|[GM]i?B|ms|us|s|seconds?|elements|numbers|FLOPs?|"
    r"lines?|launch(?:es)?|steps?|times?|hours?|once"
)
PER = "GPU|rank|step|parameter|token|second|node|device|layer|micro-batch|day|head|row|block|bucket|stage|call|tensor"
BRITISH = r"colour|behaviour|neighbour|favour|centre|labelled|modelled|cancelled|whilst|grey|licence"
ISE = "|".join(
    f"{stem}is"
    for stem in "optim minim maxim initial normal recogn organ summar real quant serial general special visual".split()
)
PHRASES = {  # in a docstring
    "a transform": r"\bverbs?\b",
    "shard, chunk, tile, bucket": r"\bpieces?\b",
    "chunk": r"\bbox(?:es)?\b",
    "local shard": r"\bown (?:part|share|piece)\b",
    "full, unsharded": r"\bwhole (?:state|weights?|parameters?|tensors?|buffers?|gradients?|model's)\b",
    "fixed": r"\bmended\b",
    "setup": r"\bset-up\b",
    "in sync": r"\b(?:in|out of) step\b(?! with| \d)",
    "a rank, a process": r"\b(?:whoever|nobody|somebody)\b",
    "matmul": r"\b(?:matrix products?|products? of matrices)\b",
    "per": rf"\b(?:{UNIT})(?<!launch) an? (?:{PER})\b",
    "cannot": r"\bcan't be\b",
    "American spelling": rf"\b(?:{BRITISH})|\b(?:{ISE})(?:e|es|ed|er|ers|ing|ation|ations)\b",
}
FIRST = set("What Whether As Of Where That Those And So But Then Who Which Whose When If It They".split())
ALLOWED = {  # names that are PyTorch's, a paper's, or right as they are
    "found_inf": "PyTorch's optimizers read it",
    "needs_own_collective": "a term of its own",
    "scaled_dot_product_attention": "PyTorch's",
    "in_place": "PyTorch's",
    "kept_hidden": "users' calibration files name it",
    "kept_outside_tp": "users' calibration files name it",
    "kept_ffn": "users' calibration files name it",
    "kept_rows": "users' calibration files name it",
    "kept_elements": "exercise 11.3",
}


def words_of(name: str) -> set[str]:
    """The words of an identifier, in small letters."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}


def advice(name: str, package: str) -> Iterator[str]:
    """What to use in place of an identifier."""
    if name in ALLOWED or name.startswith("__"):
        return
    for use, words in WORDS.items():
        if hit := words_of(name) & set(words.split()):
            yield f"{name} ({', '.join(hit)}): {use}"
    for use, (packages, words) in PACKAGE_WORDS.items():
        if package in packages and words_of(name) & set(words.split()):
            yield f"{name}: {use}"
    for use, names in NAMES.items():
        if name.strip("_") in names.split():
            yield f"{name}: {use}"


def names_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the identifier of each definition: of functions, classes, arguments, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def docstrings_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the text of each docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            if text := ast.get_docstring(node):
                yield node.body[0].lineno, text


def faults(source: str, package: str = "") -> list[str]:
    """The faults of a module's source, each "line: what, and the term to use"."""
    tree, out = ast.parse(source), []
    for line, name in names_in(tree):
        out += [f"{line}: {each}" for each in advice(name, package)]
    for line, text in docstrings_in(tree):
        if (first := text.split()[0].strip(",:")) in FIRST:
            out.append(f"{line}: a docstring begins with {first}: begin with a verb or a noun")
        for use, phrase in PHRASES.items():
            out += [
                f"{line}: {match[0]!r}: {use}" for match in re.finditer(phrase, text, re.I if "spelling" in use else 0)
            ]
    return sorted(set(out), key=lambda each: int(each.split(":")[0]))


def exercise_cells() -> Iterator[tuple[str, str, str]]:
    """The place, the package and the source of each notebook cell that the library takes over."""
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
            source = "".join(cell["source"])
            if source.startswith("#| export "):
                target = source.split("\n")[0].removeprefix("#| export ")
                yield f"{notebook.name} {cell['id']}", target.split(".")[0], source


def test_the_code_speaks_the_language_of_the_field():
    found = []
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            package = file.relative_to(ROOT).parts[1] if folder == "course_lib" else ""
            found += [f"{file.relative_to(ROOT)}:{each}" for each in faults(file.read_text(encoding="utf-8"), package)]
    for place, package, source in exercise_cells():
        found += [f"{place}:{each}" for each in faults(source, package)]
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize(
    "source, package, term",
    [
        ("def shard_piece(): pass", "", "shard"),
        ("class BoxWriter: pass", "", "chunk"),
        ("def f(own_values): pass", "", "local_"),
        ("parts = []", "zero", "partition"),
        ("x.kept = 1", "", "saved"),
        ("def hand_on(): pass", "", "accumulate_into_master"),
        ('def f():\n    """What a rank keeps."""', "", "verb or a noun"),
        ('"""Tokens per second: 5 tokens/s a GPU."""', "", "per"),
        ('"""Return the whole weights."""', "", "full"),
        ('"""Return the matrix product."""', "", "matmul"),
        ('"""Return the colour of a neighbour."""', "", "American"),
        ('"""Normalise, then initialise: an optimisation."""', "", "American"),
    ],
)
def test_a_planted_word_is_found(source, package, term):
    assert any(term in each for each in faults(source, package)), faults(source, package)


@pytest.mark.parametrize(
    "source, package",
    [
        ("found_inf = 1\nparts = replace = placement = []", "best_config"),
        (
            '"""Return the color of each advertised size: precise, promised, exercised, raised likewise."""',
            "",
        ),
        ('"""Compare a and b; 4 bytes per rank; the sum is exact. Rows are processed as they arrive."""', ""),
    ],
)
def test_a_right_word_is_not(source, package):
    assert faults(source, package) == []
