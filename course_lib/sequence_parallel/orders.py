"""Names of the orders in which the ranks share a sequence; without torch."""

from __future__ import annotations

ORDERS = ("zigzag", "contiguous")
