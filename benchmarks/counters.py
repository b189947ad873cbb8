"""Sectors that Nsight Compute counts in our kernels on this GPU, against those that `count_transactions` predicts.

    PYTHONPATH=. python benchmarks/counters.py       # writes benchmarks/results/sectors_<gpu>.json

Needs a GPU, `ncu`, and permission to read its counters: as root, or with NVreg_RestrictProfilingToAdminUsers=0 for the
driver. The script runs itself under ncu; launches of both runs are matched by their order.
"""

import argparse
import csv
import io
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from measure import gpu_word, save

METRICS = {
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": "load",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ldgsts.sum": "load",  # cp.async: from memory straight to shared memory
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum": "store",
}
KINDS = ("load", "store")
SHAPES = [
    (8, 1024),
    (5, 1000),
    (3, 4096),
]  # rows and width: small, since interpreted; one that does not end with a block


def parse_ncu(text: str) -> list[dict]:
    """Return the launches of `ncu --csv --metrics ...` in order: kernel, and sectors by "load" and "store".

    ncu writes a line for each metric of each launch, after messages that start with ==. Raises ValueError if there is
    no table, or a counter was not read.
    """
    lines = text.splitlines()
    header = next((number for number, line in enumerate(lines) if line.startswith('"ID",')), None)
    if header is None:
        raise ValueError(
            f"ncu wrote no table: {next((line for line in lines if 'ERROR' in line), 'nothing was profiled')}"
        )
    launches: dict[int, dict] = {}
    for row in csv.DictReader(io.StringIO("\n".join(line for line in lines[header:] if line.startswith('"')))):
        if row["Metric Name"] not in METRICS:
            continue
        if not row["Metric Value"].replace(",", "").replace(".", "").isdigit():
            raise ValueError(f"{row['Kernel Name']}: ncu could not read {row['Metric Name']}: {row['Metric Value']!r}")
        launch = launches.setdefault(int(row["ID"]), {"kernel": row["Kernel Name"]})
        kind = METRICS[row["Metric Name"]]
        launch[kind] = launch.get(kind, 0) + round(float(row["Metric Value"].replace(",", "")))
    return [launches[number] for number in sorted(launches)]


def ncu_sectors(command: list[str], kernels: list[str], timeout_s: float = 300) -> list[dict]:
    """Run `command` under ncu and return `parse_ncu` of these kernels. Raises RuntimeError with ncu's message if ncu or
    the command fails, usually for lack of permission to read the counters.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        options = ["--csv", "--print-units", "base", "--log-file", str(log), "--metrics", ",".join(METRICS)]
        options += ["--clock-control", "none"]  # clocks may not be lockable, and counts do not depend on them
        options += ["--target-processes", "all", "--kernel-name", f"regex:^({'|'.join(kernels)})$"]
        done = subprocess.run(["ncu", *options, *command], capture_output=True, text=True, timeout=timeout_s)
        text = log.read_text() if log.exists() else ""
    errors = [line for line in (text + done.stdout + done.stderr).splitlines() if "==ERROR==" in line]
    if done.returncode or errors:
        raise RuntimeError(f"ncu ended with {done.returncode}: {' '.join(errors) or done.stderr.strip()[-500:]}")
    return parse_ncu(text)


def run_kernels(device: torch.device) -> None:
    """Run forward and backward of the row kernels once."""
    from kernel_cases import rope_case, row_cases
    from kernel_runs import Method

    for rows, width in SHAPES:
        for case in (*row_cases(device, rows, width), rope_case(device, rows, 4 * 128)):
            Method(case.methods["ours"], case.make).results()


def predicted(device: torch.device) -> list[dict]:
    """Return the same launches, counted without hardware counters."""
    from course_kit.gpu.launches import record_launches
    from course_kit.gpu.transactions import count_transactions

    major, minor = torch.cuda.get_device_capability(device)
    with record_launches() as launches:
        run_kernels(device)
    counts = []
    for launch in launches:
        counted = count_transactions(
            launch.kernel, launch.grid, *launch.args, capability=10 * major + minor, **launch.meta
        )
        counts.append({"kernel": launch.name} | {kind: counted.sectors(kind) for kind in KINDS})
    return counts


def main() -> None:
    """Compare, print and write the rows; with --launch only run the kernels, for ncu to profile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launch", action="store_true", help="run the kernels and nothing else")
    parser.add_argument("--out", type=Path, help="a file for the rows, in place of benchmarks/results")
    args = parser.parse_args()
    if not torch.cuda.is_available() or not shutil.which("ncu"):
        print("no GPU with Nsight Compute (ncu) here, so there are no counters to compare with")
        return
    device = torch.device("cuda")
    if args.launch:
        run_kernels(device)
        return
    expected = predicted(device)
    names = sorted({launch["kernel"] for launch in expected})
    measured = ncu_sectors([sys.executable, __file__, "--launch"], names)
    if [launch["kernel"] for launch in measured] != [launch["kernel"] for launch in expected]:
        raise RuntimeError(
            f"ncu saw {len(measured)} launches, of {len(expected)} that were predicted, or in another order"
        )
    rows = [{"kernel": e["kernel"], "predicted": e, "counted": m} for e, m in zip(expected, measured, strict=True)]
    for row in rows:
        sectors = (f"{kind} {row['predicted'][kind]:>8,} / {row['counted'].get(kind, 0):>8,}" for kind in KINDS)
        print(f"{row['kernel']:<32} predicted / counted: {', '.join(sectors)}")
    if args.out:
        args.out.write_text(json.dumps({"rows": rows}))
    else:
        save("sectors", {"rows": rows}, gpu_word())


if __name__ == "__main__":
    main()
