"""The planner: memory and time of layouts, estimated, searched, and counted in a dry run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.lazy import lazy_exports

if TYPE_CHECKING:
    from course_lib.best_config.calibration import calibrate
    from course_lib.best_config.clusters import Cluster
    from course_lib.best_config.dry_runs import dry_run
    from course_lib.best_config.planner import Estimate, estimate, search
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "best_config.calibration": "calibrate",
            "best_config.clusters": "Cluster",
            "best_config.dry_runs": "dry_run",
            "best_config.planner": "Estimate estimate search",
        },
    )

__all__ = ["Cluster", "calibrate", "dry_run", "estimate", "Estimate", "search"]
