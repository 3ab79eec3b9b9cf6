"""``freetrain`` as on another host with a file system without locks, where a silent driver is soon taken for dead."""

import errno
import platform
from types import SimpleNamespace

from freetrain_parsl.campaign import lock


def _no_locks(_file: int, _operation: int) -> None:
    raise OSError(errno.ENOLCK, "no locks available")


platform.node = lambda: "another-host"
lock.fcntl = SimpleNamespace(flock=_no_locks, LOCK_EX=0, LOCK_NB=0)
lock._SILENT = 0.0
lock._SURE = 6.0  # longer than a driver may act without looking at the run's state

if __name__ == "__main__":
    from freetrain_parsl.cli import main

    main()
