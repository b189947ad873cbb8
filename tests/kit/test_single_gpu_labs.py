"""course_kit.labs.single_gpu, and what the checks of notebook 01 count with. CPU."""

from __future__ import annotations

import pytest
import torch

from course_kit.checks.single_gpu.counting import counted_parameters, retained_bytes
from course_kit.labs import single_gpu as labs
from course_kit.labs.gpt import GPTBlock
from course_lib.single_gpu.memory import param_count
from course_lib.single_gpu.model import PRESETS
from course_lib.single_gpu.profile import saved_bytes


def test_activations_alone_grow_with_the_batch():
    one, two = labs.largest(1, seq=64), labs.largest(2, seq=64)
    activations = one.pop("activations"), two.pop("activations")
    assert activations[1] == pytest.approx(2 * activations[0], rel=0.01) and one == two
    assert one["optimizer states"] == pytest.approx(2 * one["parameters"], rel=1e-4)


def test_the_second_step_needs_more_than_the_first_and_the_third_no_more():
    first, second, third = labs.step_peaks(3)
    assert second == third and 1.3 < second / first < 1.5


def test_the_gpt_layer_keeps_what_the_paper_counts_and_the_statistics_of_its_norms():
    b, s, h, a = 2, 16, 32, 4
    block, x = GPTBlock(h, a).bfloat16(), torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True)
    expected = 34 * s * b * h + 5 * a * s * s * b + 8 * s * b
    assert retained_bytes(block, lambda: block(x)) == saved_bytes(block, lambda: block(x)) == expected


def test_counted_parameters_are_those_of_the_formula():
    assert sum(counted_parameters(PRESETS["llama3-8B"]).values()) == param_count(PRESETS["llama3-8B"])


def test_a_large_vocabulary_makes_temporaries_that_no_formula_counts():
    added, top = labs.sum_and_peak(16_384)
    assert sum(top.values()) > added and top["temporary"] >= 8 * 16_384 * 4 * 128 / labs.MiB


def test_memory_tools_agree_but_for_the_text_that_one_of_them_counts():
    tokens = labs.text_tokens()
    found = {name: size for name, (_, size) in labs.memory_tools(tokens, repeats=2).items()}
    assert found["MemoryProfile"] == pytest.approx(found["torch.profiler"], abs=0.01) and found["no tool"] is None
    assert found["MemTracker"] - found["MemoryProfile"] == pytest.approx(tokens.nbytes / labs.MiB, abs=0.01)
