"""One reason for which many futures fail."""

from __future__ import annotations

import copy

__all__ = ["unshared"]


def unshared(error: Exception) -> Exception:
    """Return a copy of an exception for one future of several that fail for the same reason.

    Each time an exception is raised, as by ``future.result()``, its traceback becomes longer: with one object for ten
    thousand futures, Parsl would write tracebacks of megabytes to its log. An exception that cannot be copied is
    returned itself.
    """
    try:
        own = copy.copy(error)
    except Exception:  # noqa: BLE001 - Parsl's and other packages' exceptions have constructors of their own
        return error
    if type(own) is not type(error):
        return error
    own.__cause__, own.__suppress_context__ = error.__cause__, error.__suppress_context__
    return own
