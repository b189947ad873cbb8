"""Which layout to take: memory and time of all of them, estimated, searched, and counted in a dry run."""

from course_lib.best_config.clusters import Cluster
from course_lib.best_config.dry_runs import dry_run
from course_lib.best_config.planner import Estimate, estimate, search

__all__ = ["Cluster", "dry_run", "estimate", "Estimate", "search"]
