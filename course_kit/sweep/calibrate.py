"""The planner's constants from a sweep of this machine: `python -m course_kit.sweep --calibrate ours.toml`.

The layouts are those whose runs tell most (`informative`), of those that the planner says fit. Their rows are in the
sweep's CSV, so a calibration that was stopped goes on where it was. Under Slurm it is done in two: --calibrate with
--slurm FOLDER writes the jobs, --calibrate with --collect FOLDER fits to what they have done. The constants are of the
course's own program on this cluster: other programs' runs are read by `course_lib.best_config.run_files`.

A machine that no data sheet describes, such as a CPU, has a TOML file of its own: the peak is then that of one rank's
matrix products in the program's dtype, as measured. What it says is a scale for the constants that are fitted, no more.
"""

from collections.abc import Iterable

from course_lib.best_config.calibration import calibrate
from course_lib.best_config.clusters import Cluster
from course_lib.best_config.fit_reports import Calibration
from course_lib.best_config.sweep_files import measured_run, of_program


def calibrate_rows(rows: Iterable[dict], cluster: Cluster) -> Calibration:
    """The cluster's constants, fitted to rows of a sweep that ran the course's program in one dtype."""
    runs = [measured_run(row) for row in rows]
    return calibrate(runs, of_program(cluster, runs[0].dtype))
