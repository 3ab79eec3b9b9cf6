"""Import Parsl without optional packages that this executor never uses; for processes of HTEX, workers and commands.

Parsl imports the SDK of Globus Compute and SQLAlchemy wherever they are installed: more than half of the processor time
of its import. The SDK also starts a thread, which a process from which others are forked must not have. User code in
these processes may still import both, but Parsl's executor for Globus Compute and its monitoring are off there.
"""

from __future__ import annotations

import sys
from typing import Final

_UNUSED: Final = tuple(name for name in ("globus_compute_sdk", "sqlalchemy") if name not in sys.modules)

for _name in _UNUSED:
    sys.modules[_name] = None  # type: ignore[assignment]  # an import raises ImportError, which Parsl expects
try:
    import parsl.executors  # noqa: F401
finally:
    for _name in _UNUSED:
        del sys.modules[_name]
