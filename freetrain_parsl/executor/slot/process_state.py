"""What a training may change in its process, and must not leave to the next training there.

Some of it is set where the training's modules are imported, such as ``torch.set_default_dtype`` at the top of a file.
That happens once in a process, and applies to each training of these modules.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from freetrain_parsl.executor.payloads import unpack_training

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TextIO

__all__ = ["ProcessState", "unpack_with_settings"]


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _autocast(device: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return lambda: torch.is_autocast_enabled(device), lambda value: torch.set_autocast_enabled(device, value)


_SETTINGS: Final[Mapping[str, tuple[Callable[[], Any], Callable[[Any], object]]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "anomalies": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "deterministic": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),  # imports much of torch
    ),
    "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    **{
        f"{owner.__name__}.{name}": _attribute(owner, name)
        for owner, name in (
            (torch.backends.cudnn, "enabled"),
            (torch.backends.cudnn, "benchmark"),
            (torch.backends.cudnn, "deterministic"),
            (torch.backends.cudnn, "allow_tf32"),
            (torch.backends.mkldnn, "enabled"),
            (torch.backends, "fp32_precision"),
            (torch.backends.cudnn, "fp32_precision"),
        )
        if hasattr(owner, name)  # some not in torch 2.6
    },
    "autocast cpu": _autocast("cpu"),
    "autocast cuda": _autocast("cuda"),
    "recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "garbage collection": (gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable()),
}
"""Name -> how to read and how to write it."""

_HANDLED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)
"""Signals whose handlers are restored; torch's data loaders set that of SIGCHLD once for a process."""

_of_modules: Final[dict[str, dict[str, Any]]] = {}
"""Module of a training function -> what the import of the modules that it needs has set in this process."""


class ProcessState:
    """Working directory, environment, standard streams, signal handlers and settings, as they are at creation."""

    def __init__(self) -> None:
        self._directory = Path.cwd()
        self._settings = _read()
        self._stdout = sys.stdout
        self._stderr = sys.stderr
        self._handlers = {number: signal.getsignal(number) for number in _HANDLED}
        self._wakeup = -1
        if threading.current_thread() is threading.main_thread():
            self._wakeup = signal.set_wakeup_fd(-1)  # the only way to read it
            signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)

    def restore(self) -> None:
        """Set everything to what it was."""
        torch.set_default_device(None)
        found = _read()
        _write({name: self._settings.get(name) for name in {**found, **self._settings}}, found)
        with suppress(OSError):  # it has been removed
            os.chdir(self._directory)
        sys.stdout = self._stdout = _usable(self._stdout, 1)
        sys.stderr = self._stderr = _usable(self._stderr, 2)
        if threading.current_thread() is threading.main_thread():
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm would end the next training
            for number, handler in self._handlers.items():
                if handler is not None and signal.getsignal(number) != handler:
                    signal.signal(number, handler)
            signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)  # event loops replace it


def unpack_with_settings(payload: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return a training function with its arguments, with the settings of the modules that it needs in effect."""
    before = _read()
    function, args, kwargs = unpack_training(payload)
    after = _read()
    known = _of_modules.setdefault(getattr(function, "__module__", None) or "", {})
    known |= {name: after.get(name) for name in {**before, **after} if before.get(name) != after.get(name)}
    _write(known, after)
    return function, args, kwargs


def _read() -> dict[str, Any]:
    settings: dict[str, Any] = {f"${name}": value for name, value in os.environ.items()}
    for name, (read, _) in _SETTINGS.items():
        # Where torch has two interfaces to a setting, reading one fails if the other was used; torch 2.8 cannot read
        # the default device after `restore`.
        with suppress(RuntimeError, AttributeError):
            settings[name] = read()
    return settings


def _write(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Write settings that differ from those found: other threads read the environment meanwhile."""
    for name, value in wanted.items():
        if found.get(name) == value:
            continue
        if name.startswith("$"):
            if value is None:
                os.environ.pop(name[1:], None)
            else:
                os.environ[name[1:]] = value
        elif value is not None:  # else it could not be read
            _SETTINGS[name][1](value)


def _usable(stream: TextIO, descriptor: int) -> TextIO:
    """Return a standard stream, or another one for its descriptor if it has been closed or detached."""
    with suppress(ValueError):  # detached
        if not stream.closed:
            return stream
    file = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", line_buffering=True)
