"""The directory of this package, in a checkout or installed."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["PACKAGE"]

PACKAGE: Final = Path(__file__).parent
"""The directory of the package; in a checkout, the repository is its parent."""
