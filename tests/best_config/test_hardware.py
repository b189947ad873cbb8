"""course_lib.best_config.hardware: what a file says is what is loaded, to the last bit after a save, and a file that
makes no sense is one line that names file and key. No GPU.
"""

import dataclasses
import math
import random
from pathlib import Path

import pytest

from course_lib.best_config.clusters import CLUSTERS, Cluster
from course_lib.best_config.hardware import KEYS, load_cluster, save_cluster
from course_lib.best_config.planner import search
from course_lib.best_config.software import NANOTRON, Software
from course_lib.single_gpu.model import PRESETS

EXAMPLE = Path(__file__).parents[2] / "data" / "clusters" / "example.toml"
OURS = """\
name = "ours"
bf16_tflops = 362.05
memory_gib = 45
memory_tb_s = 0.864
node_link_gb_s = 32
gpus_per_node = 4
"""


@pytest.fixture
def written(tmp_path):
    """Makes a file of some text."""

    def write(text: str) -> Path:
        file = tmp_path / "ours.toml"
        file.write_text(text, encoding="utf-8")
        return file

    return write


def test_units_are_those_of_data_sheets(written):
    found = load_cluster(written(OURS + "fp8_tflops = 733\nnetwork_gb_s = 6.25\n"))
    wanted = Cluster("ours", 362.05e12, 45 * 2**30, 0.864e12, 32e9, 6.25e9, gpus_per_node=4, fp8_flops=733e12)
    assert found == wanted


def test_without_a_network_and_without_fp8(written):
    box = load_cluster(written(OURS))
    assert (box.network, box.fp8_flops, box.software) == (0, None, Software())
    assert search(PRESETS["llama3.2-1B"], box, 4, 16).best(1)
    with pytest.raises(ValueError, match="^ours: 8 GPUs are more than a node's 4, and it has no network$"):
        search(PRESETS["llama3.2-1B"], box, 8, 16)


def test_a_preset_is_a_start(written):
    found = load_cluster(written('name = "ours"\nbase = "H100, EFA"\nnetwork_gb_s = 25\n[software]\nstall_s = 0\n'))
    assert found == dataclasses.replace(CLUSTERS["H100, EFA"], name="ours", network=25e9).with_software(stall_s=0.0)
    assert CLUSTERS["H100, EFA"].software == NANOTRON, "the preset is as it was"


def test_shares_of_the_peak_are_optional_and_the_presets_where_it_is_the_start(written):
    assert load_cluster(written(OURS)).matmul_factor == 1
    a100 = load_cluster(written('name = "ours"\nbase = "A100"\nattention_factor = 1.5\n'))
    assert a100.matmul_factor == CLUSTERS["A100"].matmul_factor > 1 and a100.attention_factor == 1.5
    for name in ("matmul_factor", "attention_factor"):
        with pytest.raises(ValueError, match=f": {name} = 0: not a number above 0$"):
            load_cluster(written(f'name = "ours"\nbase = "H100"\n{name} = 0\n'))
    for name in ("tp_overlap", "selective_keeps"):
        with pytest.raises(ValueError, match=f": software.{name} 1.5: a share, 0 to 1$"):
            load_cluster(written(f'name = "ours"\nbase = "H100"\n[software]\n{name} = 1.5\n'))


def test_constants_have_softwares_kinds(written):
    table = "[software]\nweight_bytes = 4\ngradient_bytes = 2.5\nheld = [1, 0.5]\ngathers_again = true\n"
    words = 'half_rows = 100\nsplit = "flops"\norder = ["pp", "dp", "cp", "tp"]\n'
    software = load_cluster(written(OURS + table + words)).software
    assert (software.weight_bytes, software.gradient_bytes, software.held) == (4, 2.5, (1.0, 0.5))
    assert (software.gathers_again, software.split, software.order[0]) == (True, "flops", "pp")
    assert type(software.weight_bytes) is int and type(software.half_rows) is float


def test_the_example_has_every_key_and_says_what_an_h100_has(written):
    text = EXAMPLE.read_text()
    assert all(any(line.lstrip("# [").startswith(key) for line in text.splitlines()) for key in KEYS)
    found, h100 = load_cluster(EXAMPLE), CLUSTERS["H100"]
    for name in ("peak_flops", "fp8_flops", "memory_bandwidth", "node_link", "gpus_per_node"):
        assert getattr(found, name) == getattr(h100, name)
    assert found.memory_bytes == pytest.approx(h100.memory_bytes, rel=0.005)
    assert load_cluster(written(text.replace("# base =", "base ="))) == found


# Saved and loaded.


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_preset_comes_back(name, tmp_path):
    save_cluster(CLUSTERS[name], tmp_path / "it.toml")
    assert load_cluster(tmp_path / "it.toml") == CLUSTERS[name]


def test_a_fit_comes_back_to_the_last_bit(tmp_path):
    draw = random.Random(0)
    for _ in range(30):
        start = Software()
        fitted = {
            field.name: getattr(start, field.name) * math.exp(draw.gauss(0, 1))
            for field in dataclasses.fields(Software)
            if isinstance(field.default, float)
        }
        fitted |= {"held": (draw.random(), draw.random()), "gathers_again": draw.random() < 0.5, "split": "layers"}
        fitted |= {"selective_keeps": draw.random(), "tp_overlap": draw.random()}
        rates = [10 ** draw.uniform(9, 16) for _ in range(5)]
        cluster = Cluster('it\'s "ours" \\ ü', *rates, gpus_per_node=draw.randint(1, 72)).with_software(**fitted)
        save_cluster(cluster, tmp_path / "it.toml")
        assert load_cluster(tmp_path / "it.toml") == cluster


# Files that make no sense.


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("memory_gib", "memory_gb", "memory_gb is no key of a cluster; memory_gib is one"),
        ("bf16_tflops", "peak_tflops", "peak_tflops is no key of a cluster; bf16_tflops is one"),
        ("node_link_gb_s", "node_link", "node_link is no key of a cluster; node_link_gb_s is one"),
        ("gpus_per_node = 4", "zzz = 4", "zzz is no key of a cluster"),
        ("memory_gib = 45\n", "", "memory_gib missing"),
        ('name = "ours"\n', "", "name missing"),
        ('name = "ours"\n', 'base = "H100"\n', "name missing"),
        ('"ours"', "4", "name = 4: not a text"),
        ('"ours"', '""', 'name = "": not a text'),
        ('"ours"', '"ours"\nbase = "H101"', 'base = "H101": not one of H100; H100, EFA;'),
        ("362.05", '"362"', 'bf16_tflops = "362": not a number of 0 or more'),
        ("362.05", "true", "bf16_tflops = true: not a number"),
        ("362.05", "2026-01-01", "bf16_tflops = .*: not a number"),
        ("362.05", "0", "bf16_tflops = 0: not a number above 0"),
        ("362.05", "0.0", "bf16_tflops = 0: not a number above 0"),
        ("362.05", "-989", "bf16_tflops = -989: not a number of 0 or more"),
        ("362.05", "nan", "bf16_tflops = NaN: not a number"),
        ("362.05", "inf", "bf16_tflops = Infinity: not a number"),
        ("362.05", "1e400", r"bf16_tflops = 1E\+400: not a number"),
        ("362.05", "9" * 400, "bf16_tflops = 9*...: not a number"),
        ("362.05", "1e9999999999999999999999", ""),  # not even a Decimal
        ("= 32", "= 0", "node_link_gb_s = 0: not a number above 0"),
        ("0.864", "-1", "memory_tb_s = -1: not a number"),
        ("gpus_per_node = 4", "gpus_per_node = 4\nnetwork_gb_s = -1", "network_gb_s = -1: not a number of 0 or more"),
        ("gpus_per_node = 4", "gpus_per_node = 4\nfp8_tflops = 0", "fp8_tflops = 0: not a number above 0"),
        ("_node = 4", "_node = 0", "gpus_per_node = 0: not a whole number of 1 or more"),
        ("_node = 4", "_node = 4.5", "gpus_per_node = 4.5: not a whole number of 1 or more"),
        ("_node = 4", "_node = true", "gpus_per_node = true: not a whole number of 1 or more"),
        ("= 45", "= [45, 80]", "memory_gib has 2 values, but the planner takes clusters of one kind of GPU"),
        ("_node = 4", "_node = 4\n[[group]]\n[[group]]", "group has 2 values, but .* one kind of GPU"),
        ("_node = 4", '_node = 4\ngpus = ["H100", "A100"]', "gpus has 2 values, but .* one kind of GPU"),
        ("_node = 4", "_node = 4\n[L40S]\nx = 1", r"\[L40S\] is no table of a cluster: .* one kind of GPU"),
        ("_node = 4", "_node = 4\nmemory_gib = 80", "Cannot overwrite a value"),
        ("_node = 4", "_node = ", "Invalid value"),
        ("_node = 4", "_node = 4\nsoftware = 1", "software = 1: not a table"),
    ],
)
def test_a_file_that_makes_no_sense_is_one_line(old, new, message, written):
    assert OURS.count(old) == 1
    file = written(OURS.replace(old, new))
    with pytest.raises(ValueError, match=f": {message}") as error:
        load_cluster(file)
    assert str(error.value).startswith(f"{file}: ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "line, message",
    [
        ("nvlnk_efficiency = 0.7", r"\[software\]: nvlnk_efficiency is no constant; nvlink_efficiency is one"),
        ("x = 0.7", r"\[software\]: x is no constant$"),
        ('overlap = "all"', 'software.overlap = "all": not a number of 0 or more'),
        ("overlap = true", "software.overlap = true: not a number"),
        ("overlap = -1", "software.overlap = -1: not a number"),
        ("overlap = nan", "software.overlap = NaN: not a number"),
        ("nvlink_efficiency = 0", "software.nvlink_efficiency 0: a number above 0"),
        ("held = 0.5", "software.held = 0.5: not a list of 2"),
        ("held = [0.5]", r"software.held = \[.*: not a list of 2"),
        ("held = [0.5, nan]", "software.held = NaN: not a number"),
        ("gathers_again = 1", "software.gathers_again = 1: not true or false"),
        ("split = 1", "software.split = 1: not a text"),
        ('split = "halves"', "software.split 'halves': it is one of ends, layers, flops"),
        ('order = ["dp", "pp", "tp"]', "software.order = .*: not a list of 4"),
        ('order = ["dp", "pp", "tp", "tp"]', "software.order .*: it has dp, pp, cp, tp, each once"),
    ],
)
def test_software_that_makes_no_sense_is_one_line(line, message, written):
    file = written(f"{OURS}[software]\n{line}\n")
    with pytest.raises(ValueError, match=f"^{file}: {message}") as error:
        load_cluster(file)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_text_or_is_not_there(tmp_path):
    file = tmp_path / "it.toml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=f"^{file}: "):
        load_cluster(file)
    with pytest.raises(OSError, match="none.toml"):
        load_cluster(tmp_path / "none.toml")
