"""course_lib.single_gpu.devices: names of accelerators as PyTorch reports them, against the rows of hardware.csv."""

import pytest

from course_lib.best_config.clusters import CLUSTERS
from course_lib.kernels.gpus import GPUS
from course_lib.single_gpu.devices import hardware, model_of, peak_flops, read_table


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H800", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA GH200 144G HBM3e", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GB300", 2500),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Tesla V100-SXM2-32GB", 125),
        ("Tesla V100-PCIE-16GB", 112),
        ("AMD Instinct MI300X", 1300),
        ("AMD Instinct MI300X VF", 1300),
        ("AMD Instinct MI325X", 1300),
        ("AMD Instinct MI355X", 2500),
    ],
)
def test_the_peak_of_a_device_by_its_name(name, tflops):
    assert peak_flops(name) == tflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX A1000",
        "NVIDIA A10G",
        "NVIDIA A10",
        "NVIDIA L40",
        "NVIDIA L4",
        "NVIDIA H20",
        "NVIDIA H200 NVL",
        "NVIDIA H800 PCIe",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "GRID A100-10C",
        "Tesla V100S-PCIE-32GB",
        "AMD Instinct MI300A",
        "Intel(R) Data Center GPU Max 1550",
        "",
    ],
)
def test_a_variant_without_a_row_has_no_peak(name):
    assert peak_flops(name) is None


def test_every_row_with_a_peak_is_found_by_its_own_name():
    for name, row in hardware().items():
        published = row["bf16_dense_tflops"]
        assert peak_flops(name) == (float(published) * 1e12 if published else None), name


def test_rows_of_the_same_model_agree_and_name_their_source():
    peaks = {}
    for row in read_table("hardware.csv"):
        assert row["source"], row["gpu"]
        if row["bf16_dense_tflops"]:
            peaks.setdefault(model_of(row["gpu"]), set()).add(float(row["bf16_dense_tflops"]))
    assert {model: found for model, found in peaks.items() if len(found) > 1} == {}


def test_presets_and_the_model_of_a_gpu_have_the_peaks_of_the_table():
    for cluster in CLUSTERS.values():
        gpu = cluster.name.partition(",")[0].replace("80 GB", "80GB").replace("40 GB", "40GB").replace(" NVL72", "")
        assert peak_flops(gpu) == cluster.peak_flops, cluster.name
    for gpu in GPUS.values():
        assert peak_flops(gpu.name) == gpu.peak_flops["bfloat16"]
