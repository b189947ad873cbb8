"""Published figures of accelerators, by the name that PyTorch reports.

    peak_flops("NVIDIA H100 80GB HBM3")                   9.89e14
    peak_flops("NVIDIA GeForce RTX 4090 Laptop GPU")      None: the table has no row for it

The figures come from course_lib/data/hardware.csv. A new accelerator is a new row there, with its source.
"""

from __future__ import annotations

import csv
import functools
import re
from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "data"
# Vendors, SXM boards (most names leave them out), OAM boards and virtual functions, air cooling, and memory.
NOT_MODEL = re.compile(r"NVIDIA|TESLA|AMD|INSTINCT|GEFORCE|SXM\d?|OAM|VF|AC|HBM\d\w?|\d+GB?")


def read_table(file: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file of course_lib/data, each with the column names as keys."""
    with open(DATA / file, newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


@functools.cache
def hardware() -> dict[str, dict[str, str]]:
    """Return the rows of hardware.csv by the name in their first column; of several, the last: it has more digits."""
    return {row["gpu"]: row for row in read_table("hardware.csv")}


def model_of(name: str) -> str:
    """Return the model in a device's name: "H100", "H100 PCIE", "H100 NVL", "RTX 4090 LAPTOP GPU".

    Names as PyTorch reports them ("NVIDIA A100-SXM4-80GB") and as hardware.csv has them ("A100-SXM-80GB") give the
    same. All words but those for the vendor, an SXM board and memory belong to the model: a variant is another model.
    """
    parts = re.findall(r"[\w.]+", name.upper())
    return " ".join(part for part in parts if not NOT_MODEL.fullmatch(part))


@functools.cache
def peak_tflops() -> dict[str, float]:
    """Return the dense BF16 peaks of hardware.csv by `model_of` the first column, in TFLOP/s."""
    rows = hardware().values()
    return {model_of(row["gpu"]): float(row["bf16_dense_tflops"]) for row in rows if row["bf16_dense_tflops"]}


def peak_flops(device_name: str | None = None) -> float | None:
    """Return the dense BF16 FLOP/s of an accelerator, or None if the peak is not known.

    device_name: as `torch.cuda.get_device_name` reports it; None for the accelerator of this machine. A V100 has no
    BF16: the figure is its FP16 peak.
    """
    if device_name is None:
        import torch

        device_name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = peak_tflops().get(model_of(device_name))
    return peak and peak * 1e12
