"""Check of exercise 12.2: `touched_units` counts sectors, lines and any other unit, request by request."""

from __future__ import annotations

import numpy as np

from course_lib.kernels import sectors

LANES = np.arange(32)
ALL_ACTIVE = np.ones((1, 32), dtype=bool)
START = 2**40  # of the memory that lanes touch


def sectors_of(index: np.ndarray, active: np.ndarray = ALL_ACTIVE, size: int = 4, start: int = 0) -> int:
    """Return the sectors of one request: lanes touch elements of `size` bytes, from byte `start` of the memory on."""
    return sectors.touched_units(np.atleast_2d(START + start + index * size), active, 32)


def check() -> None:
    """Assert the sectors of one request at several strides, of lanes that are off, of several requests."""
    for stride, wanted in ((1, 4), (2, 8), (4, 16), (8, 32), (100, 32), (0, 1)):
        result = sectors_of(LANES * stride)
        assert result == wanted, f"32 lanes of float32, {stride} elements apart: {wanted} sectors, yours says {result}"
    assert sectors_of(LANES, start=16) == 5, "a warp's 128 bytes that begin in the middle of a sector touch 5, not 4"
    assert sectors_of(LANES[::-1]) == 4, "the order of the lanes does not matter"
    assert sectors_of(LANES, size=2) == 2, "32 lanes of bfloat16 side by side are 64 bytes: 2 sectors"
    result = sectors_of(LANES, active=(LANES < 9)[None, :])
    assert result == 2, f"9 active lanes touch 2 sectors, yours says {result}; a lane that is off touches none"
    try:
        idle: object = sectors_of(LANES, active=~ALL_ACTIVE)
    except ValueError as error:
        idle = error
    assert idle == 0, f"a request without an active lane touches 0 sectors, yours says: {idle}"
    result = sectors.touched_units(np.stack([START + LANES * 4] * 2), np.ones((2, 32), dtype=bool), 32)
    assert result == 8, f"two requests for the same 128 bytes pay twice: 8 sectors, yours says {result}"
    apart = np.array([[0, 2**32]])
    result = sectors.touched_units(START + apart, np.ones((1, 2), dtype=bool), 32)
    assert result == 2, f"two addresses 4 GiB apart are in 2 sectors, yours says {result}: addresses have 64 bits"
    rng = np.random.default_rng(0)
    addresses = START + 4 * rng.integers(0, 10_000, (50, 32))
    active = rng.random((50, 32)) < 0.7
    for unit in (4, 32, 128):
        wanted = sum(len({int(a) // unit for a in row[on]}) for row, on in zip(addresses, active, strict=True))
        result = sectors.touched_units(addresses, active, unit)
        assert result == wanted, f"50 random requests touch {wanted} units of {unit} bytes, yours says {result}"
