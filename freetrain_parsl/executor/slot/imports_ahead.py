"""Imports of what a job's function is known to import, while a slot waits for its assignment.

The first member of a job notes which installed modules its function imports, and the driver tells slots that register
later. An import is made ahead only if nothing shows that the function prepares for it: when it was noted, the
environment's variables and torch's default type were as they were when the function was called. User's own modules are
never imported ahead. The process is left to another one, which has imported nothing, whenever it would be different for
the job: it is of another function, an import has failed, hangs or has used random numbers.
"""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import random
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from freetrain_parsl.executor.slot.loaded_files import pack_files, unpack_files
from freetrain_parsl.protocol.messages import ModulesImported, RunStart, StartRun
from freetrain_parsl.texts import text_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from freetrain_parsl.protocol.messages import StartTask, Welcome
    from freetrain_parsl.protocol.options import Code

__all__ = ["ImportsAhead", "ImportsNoted"]

logger = logging.getLogger(__name__)

_IMPORTLIB: Final = "<frozen importlib"
_INSTALLED: Final = ("/site-packages/", "/dist-packages/")
_OWN: Final = ("freetrain_parsl", "parsl")
_MOST: Final = 5000  # modules
_LARGEST: Final = 1 << 17  # bytes


class ImportsNoted:
    """A finder that finds nothing, and notes what is imported as long as nothing is prepared for it.

    Parameters
    ----------
    code
        The job's code.
    """

    def __init__(self, code: Code) -> None:
        self._code = code
        self._names: list[str] = []
        self._before = _settings()
        self._unprepared = True
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:  # noqa: ARG002 - of finders
        """Note the name of a module that is imported now."""
        if not self._unprepared:
            return
        if (settings := _settings()) != self._before:
            self._unprepared = _within_installed_import()
            self._before = settings
        if self._unprepared:
            self._names.append(name)

    def told(self) -> ModulesImported | None:
        """Stop noting; return the message to the driver, ``None`` if there is nothing to tell."""
        self._unprepared = False
        with suppress(ValueError):  # the function has changed the list
            sys.meta_path.remove(self)
        own = {*_OWN, self._code.name.partition(":")[0].partition(".")[0]}
        names = [
            name
            for name in dict.fromkeys(self._names)
            if name.partition(".")[0] not in own and _is_installed(sys.modules.get(name))
        ]
        payload = pack_files(names)
        return ModulesImported(self._code.identity, payload) if names and len(payload) <= _LARGEST else None


def _settings() -> tuple[Any, ...]:
    import torch  # not in the driver, which imports a slot's module

    return dict(os.environ), torch.get_default_dtype()


def _within_installed_import() -> bool:
    """Return whether the current import is of an installed module's own code while that is imported.

    It may have changed the environment itself, as scikit-learn does, and will do so again.
    """
    frame = sys._getframe(2)  # noqa: SLF001 - no other way
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_IMPORTLIB):
        frame = frame.f_back
    by_installed = False
    while frame.f_back is not None and not frame.f_code.co_filename.startswith(_IMPORTLIB):
        if not _is_in_packages(frame.f_code.co_filename):
            return False
        by_installed = True
        frame = frame.f_back
    return by_installed and frame.f_back is not None


def _is_installed(module: object) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and _is_in_packages(file)


def _is_in_packages(file: str) -> bool:
    return any(place in file for place in _INSTALLED)


class ImportsAhead:
    """What a process of a slot imports before it has an assignment.

    Parameters
    ----------
    message
        What the driver has told.
    mark
        File that exists during the imports, and after one that has ended its process: then nothing is imported.
    """

    def __init__(self, message: Welcome, mark: Path | None) -> None:
        self._code = message.code
        self._payload = message.payload
        self._mark = mark
        self.begun = False
        """Whether anything has been imported."""

    def run(self, is_idle: Callable[[], bool]) -> bool:
        """Import one module after the other while the slot has nothing to do; return false if one was not as expected.

        Then this process must not run a job.
        """
        if self._mark is not None and self._mark.exists():
            return True
        name = "a module"
        try:
            before = _random_numbers()
            for name in unpack_files(self._payload)[:_MOST]:
                if not is_idle():
                    break
                if not self.begun and self._mark is not None:
                    self._mark.touch()
                self.begun = True
                importlib.import_module(name)
            if not all(state == before[key] for key, state in _random_numbers().items() if key in before):
                raise ValueError("imports have used random numbers")  # noqa: TRY301 - as a failed import
        except KeyboardInterrupt:  # a signal, as in a function
            raise
        except BaseException as error:  # noqa: BLE001 - of others' modules, which may even raise SystemExit
            logger.warning("nothing is imported ahead in this slot any more: %s: %s", name, text_of(error))
            return False
        self.unmark()
        return True

    def unmark(self) -> None:
        """Remove the mark: the imports have ended, or they are given up though nothing is wrong with them."""
        if self._mark is not None:
            self._mark.unlink(missing_ok=True)

    def suits(self, message: RunStart | StartTask) -> bool:
        """Return whether this process may do what is assigned to it."""
        if not self.begun:
            return True
        code = message.options.code if isinstance(message, StartRun) else None
        return code is not None and code.identity == self._code


def _random_numbers() -> dict[str, bytes]:
    """Return the states of the generators of random numbers, of those libraries that are imported."""
    import torch

    states: dict[str, Any] = {"random": random.getstate(), "torch": torch.get_rng_state().numpy()}
    if (numpy := sys.modules.get("numpy.random")) is not None:
        states["numpy"] = numpy.get_state()
    return {name: pickle.dumps(state) for name, state in states.items()}
