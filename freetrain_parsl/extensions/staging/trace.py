"""Print which files the start of a slot opens: ``python trace.py OUT``, run by `make` in the nodes' Python.

Python's audit events tell what Python opens, and ``/proc/self/maps`` which libraries the loader has opened. The imports
are those of a node: pilot, worker pool and the process from which slots are forked, and a step of a small model.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from contextlib import suppress

# What a node's processes import.
MODULES = (
    "freetrain_parsl.executor.slot.pilot",
    "freetrain_parsl.executor.htex.warm_imports",
    "multiprocessing.forkserver",
    "multiprocessing.resource_tracker",
    "multiprocessing.spawn",
    "multiprocessing.popen_forkserver",
)


def watch() -> set[str]:
    """Return a set to which each file is added that this process opens for reading."""
    opened: set[str] = set()

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
            if isinstance(path, (str, bytes)) and not writes:
                opened.add(os.path.abspath(os.fsdecode(path)))
        elif event == "import" and isinstance(arguments[1], str):
            opened.add(os.path.abspath(arguments[1]))  # an extension

    sys.addaudithook(hook)
    return opened


class Searched:
    """A finder that finds nothing and notes for which installed packages it is asked, of modules that are optional."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:  # noqa: ARG002 - of finders
        """Note the name of a module that is in no package."""
        if path is None:
            self.names.add(name)

    def files(self) -> set[str]:
        """Return the files of those that were found, but not imported: a look for one opens none."""
        found = set()
        for name in self.names - set(sys.modules):
            with suppress(Exception):  # of any other finder
                spec = importlib.util.find_spec(name)
                if spec is not None and spec.origin is not None:
                    found.add(spec.origin)
        return found


def step() -> None:
    """Make what a slot makes before and at its first step: each imports something."""
    import torch

    from freetrain_parsl.entry_points import own_entry_points
    from freetrain_parsl.executor.environment import describe_environment

    describe_environment()
    own_entry_points("freetrain.sessions")  # reads its file
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(torch.zeros(1, 2)).sum().backward()
    optimizer.step()
    torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(1)))


def main(out: str, modules: tuple[str, ...]) -> None:
    """Import and write the names of the files, one a line."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    opened, searched = watch(), Searched()
    sys.meta_path.insert(0, searched)
    for module in modules or MODULES:
        importlib.import_module(module)
    if not modules:
        step()
    from freetrain_parsl.executor.slot.loaded_files import loaded_files

    opened |= loaded_files() | searched.files()
    with open(out, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write("\n".join(sorted(name for name in opened if "\n" not in name)))


if __name__ == "__main__":
    main(sys.argv[1], tuple(sys.argv[2:]))
