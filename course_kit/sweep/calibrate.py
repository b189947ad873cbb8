"""The planner's constants from a sweep of this machine: `python -m course_kit.sweep --calibrate ours.toml`.

The sweep runs the most informative layouts (`informative`) among those that fit by the planner's estimate. Their rows
are in the sweep's CSV, so a calibration that was stopped resumes. Under Slurm it takes two steps: --calibrate with
--slurm FOLDER writes the jobs, --calibrate with --collect FOLDER fits to their results. The constants are of the
course's own program on this cluster: `course_lib.best_config.run_files` reads runs of other programs.

A machine without a data sheet, such as a CPU, has a TOML file of its own: its peak is then the measured FLOP/s of one
rank's matmuls in the program's dtype. It only sets the scale of the fitted constants.
"""

from __future__ import annotations

from collections.abc import Iterable

from course_lib.best_config.calibration import calibrate
from course_lib.best_config.clusters import Cluster
from course_lib.best_config.fit_reports import Calibration
from course_lib.best_config.sweep_files import measured_run, of_program


def calibrate_rows(rows: Iterable[dict], cluster: Cluster) -> Calibration:
    """Fit the cluster's constants to rows of a sweep that ran the course's program in one dtype."""
    runs = [measured_run(row) for row in rows]
    return calibrate(runs, of_program(cluster, runs[0].dtype))
