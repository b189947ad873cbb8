"""Check of exercise 03.7: `bandwidths` has the factors of nccl-tests, and refuses collectives without one."""

from __future__ import annotations

from course_lib.collectives import bandwidth

FACTORS = (  # collective, ranks, factor
    ("all_reduce", 4, 1.5),
    ("all_reduce", 512, 1022 / 512),
    ("reduce_scatter", 8, 7 / 8),
    ("all_gather", 2, 1 / 2),
    ("all_to_all", 8, 7 / 8),
    ("broadcast", 8, 1),
    ("reduce", 3, 1),
)


def check() -> None:
    """Assert both bandwidths of six collectives, and the error for others."""
    for collective, n, factor in FACTORS:
        algorithm, bus = bandwidth.bandwidths(collective, 3_000_000, 0.5, n)
        assert abs(algorithm / 6_000_000 - 1) < 1e-9, "algorithm bandwidth is size / seconds, in bytes per second"
        assert abs(bus / algorithm / factor - 1) < 1e-9, (
            f"{collective}, {n} ranks: your factor is {bus / algorithm:.4g}, nccl-tests has {factor:.4g}"
        )
    for other in ("gather", "gossip"):
        try:
            raised: object = bandwidth.bandwidths(other, 1, 1.0, 2)
        except Exception as error:
            raised = error
        assert isinstance(raised, ValueError), f"{other!r} has no factor and should raise ValueError; got {raised!r}"
