"""course_lib.fp8.recipes: the playbook's six sums of bytes a parameter, and how each recipe makes its products. CPU."""

import dataclasses

import pytest
import torch

from course_lib.fp8.linear import LayerQuantizers
from course_lib.fp8.operands import Cast
from course_lib.fp8.quantization import SQUARE, TENSOR, TILE
from course_lib.fp8.recipes import FP8_LM_CASTS, RECIPES, TE_CASTS, Recipe, by_blocks, per_tensor
from eight_bits import E4M3, E5M2

NAMES = {  # of what is kept: in which field its dtype is
    "master weights": "master",
    "accumulated gradients": "accumulated",
    "weights": "weights",
    "gradients": "gradients",
    "first moment": "first",
    "second moment": "second",
}
# The Ultra-Scale Playbook, chapter 10: bytes a parameter, in the order of NAMES.
PLAYBOOK = {
    "BF16, FP32 accumulation": (4, 4, 2, 2, 4, 4),
    "BF16": (4, 0, 2, 2, 4, 4),
    "Transformer Engine": (0, 0, 4, 4, 4, 4),
    "FP8-LM": (2, 2, 1, 1, 1, 2),
    "DeepSeek-V3": (4, 4, 1, 2, 2, 2),
    "nanotron": (2, 4, 1, 1, 1, 1),
}
SUMS = {
    "BF16, FP32 accumulation": 20,
    "BF16": 16,
    "Transformer Engine": 16,
    "FP8-LM": 9,
    "DeepSeek-V3": 15,
    "nanotron": 10,
}


def test_the_six_of_the_playbook():
    assert RECIPES.keys() == PLAYBOOK.keys() == SUMS.keys()
    for name, recipe in RECIPES.items():
        found = recipe.parameter_bytes()
        assert tuple(found.values()) == PLAYBOOK[name] and list(found) == list(NAMES), name
        assert sum(found.values()) == SUMS[name], name
    savings = [round(100 * (1 - sum(RECIPES[name].parameter_bytes().values()) / 20)) for name in SUMS]
    assert savings == [0, 20, 20, 55, 25, 50]


@pytest.mark.parametrize("field", NAMES.values())
def test_bytes_are_those_of_the_dtypes(field):
    """Each thing is counted by its own dtype: made as large as float64, it alone grows."""
    for recipe in RECIPES.values():
        before = recipe.parameter_bytes()
        after = dataclasses.replace(recipe, **{field: torch.float64}).parameter_bytes()
        changed = {name for name in before if before[name] != after[name]}
        assert {NAMES[name] for name in changed} == {field} and after[changed.pop()] == 8


def test_which_products_are_in_8_bits():
    for name, recipe in RECIPES.items():
        assert isinstance(recipe, Recipe) and recipe.source
        assert (recipe.casts is None) == name.startswith("BF16")


def test_formats_of_the_products():
    """e4m3 forward. Gradients have e5m2's range, but for DeepSeek-V3's, whose small blocks do without."""
    for name in ("Transformer Engine", "FP8-LM", "nanotron"):
        casts = RECIPES[name].casts
        assert [cast.dtype for cast in casts] == [E4M3, E4M3, E5M2], name
        assert [cast.block for cast in casts] == [TENSOR] * 3, name
    assert [(cast.dtype, cast.block) for cast in RECIPES["DeepSeek-V3"].casts] == [
        (E4M3, b) for b in (TILE, SQUARE, TILE)
    ]


def test_histories():
    """Transformer Engine's default is 1,024 steps; MS-AMP has 16 for x and dy, and the weight's own scale."""
    assert [cast.history for cast in TE_CASTS] == [1024] * 3
    assert [cast.history for cast in FP8_LM_CASTS] == [16, 0, 16]
    for name in ("DeepSeek-V3", "nanotron"):
        assert [cast.history for cast in RECIPES[name].casts] == [0, 0, 0]


def test_casts_by_options():
    assert per_tensor() == (Cast(E4M3), Cast(E4M3), Cast(E5M2))
    assert [cast.history for cast in per_tensor(history=4, weight_history=2)] == [4, 2, 4]
    for make in (per_tensor, by_blocks):
        assert [[cast.power_of_two for cast in make(power)] for power in (True, False)] == [[True] * 3, [False] * 3]


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.casts])
def test_each_can_be_made(name):
    quantizers = LayerQuantizers(RECIPES[name].casts)
    for role, cast in RECIPES[name].casts._asdict().items():
        assert getattr(quantizers, role).cast == cast


def test_recipes_are_data():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RECIPES["BF16"].weights = torch.float32
