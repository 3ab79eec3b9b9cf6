"""Import Parsl without the SDK of Globus Compute; for the processes of HTEX and their workers.

Parsl imports the SDK wherever it is installed. That takes half a second of each process, and starts a thread, which a
process from which others are forked must not have. User code in a worker may still import the SDK itself.
"""

from __future__ import annotations

import sys
from typing import Final

_SDK: Final = "globus_compute_sdk"

if _SDK not in sys.modules:
    sys.modules[_SDK] = None  # type: ignore[assignment]  # an import raises ImportError, which Parsl expects
    try:
        import parsl.executors  # noqa: F401
    finally:
        del sys.modules[_SDK]
