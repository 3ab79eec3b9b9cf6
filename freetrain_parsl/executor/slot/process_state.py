"""What a training may change in its process, and must not leave to the next training there."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from typing import TextIO

__all__ = ["ProcessState"]


class ProcessState:
    """Working directory, environment, standard streams and torch's settings, as they are when this is created."""

    def __init__(self) -> None:
        self._directory = Path.cwd()
        self._environment = dict(os.environ)
        self._stdout = sys.stdout
        self._stderr = sys.stderr
        self._dtype = torch.get_default_dtype()
        self._threads = torch.get_num_threads()
        self._gradients = torch.is_grad_enabled()
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._warns_only = torch.is_deterministic_algorithms_warn_only_enabled()

    def restore(self) -> None:
        """Set everything to what it was."""
        torch.set_default_dtype(self._dtype)
        torch.set_default_device(None)
        torch.set_num_threads(self._threads)
        torch.set_grad_enabled(self._gradients)
        found = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        if found != (self._deterministic, self._warns_only):  # the call imports much of torch
            torch.use_deterministic_algorithms(self._deterministic, warn_only=self._warns_only)
        with suppress(OSError):  # it has been removed
            os.chdir(self._directory)
        sys.stdout = self._stdout = _usable(self._stdout, 1)
        sys.stderr = self._stderr = _usable(self._stderr, 2)
        for variable in os.environ.keys() - self._environment.keys():
            del os.environ[variable]
        for variable, value in self._environment.items():
            if os.environ.get(variable) != value:  # other threads read the environment meanwhile
                os.environ[variable] = value


def _usable(stream: TextIO, descriptor: int) -> TextIO:
    """Return a standard stream, or another one for its descriptor if it has been closed."""
    if not stream.closed:
        return stream
    file = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", line_buffering=True)
