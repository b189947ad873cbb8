"""Mixed precision: floating-point formats, master weights, and loss scaling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.lazy import lazy_exports

if TYPE_CHECKING:
    from course_lib.mixed_precision.masters import LossScaler, MasterWeights
else:
    __getattr__, __dir__ = lazy_exports(__name__, {"mixed_precision.masters": "LossScaler MasterWeights"})

__all__ = ["LossScaler", "MasterWeights"]
