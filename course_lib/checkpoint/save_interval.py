"""The checkpoint interval, and the cost of failures.

    mtbf_s       mean time between failures of the job: one GPU's, divided by the number of GPUs
    save_s       seconds that training waits for a save: for a save beside training, the time of the copy alone
    restart_s    seconds from a failure to the first step after it

(Young 1974, "A first order approximation to the optimum checkpoint interval", CACM; Daly 2006, "A higher order estimate
of the optimum checkpoint interval for restart dumps", FGCS, equation 20.)
"""

from __future__ import annotations

import math


# exercise 10.16
def save_interval(save_s: float, mtbf_s: float) -> float:
    """Return the seconds of work between two saves: Young's optimum, valid while it is well below mtbf_s."""
    return math.sqrt(2 * save_s * mtbf_s)


# exercise 10.16
def lost_share(interval_s: float, save_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """Return the share of a long run's time lost to saves, repeated work and restarts. Failures are random."""
    took = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + save_s) / mtbf_s)
    return 1 - interval_s / took
