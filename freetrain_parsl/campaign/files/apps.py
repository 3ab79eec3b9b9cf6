"""Find the training apps that a campaign names, here and later on the nodes."""

from __future__ import annotations

import inspect
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.files.yaml_file import user_path
from freetrain_parsl.errors import InvalidInput, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType

    from freetrain_parsl.app import TrainingApp

__all__ = [
    "another_module",
    "check_arguments",
    "check_call",
    "import_failure",
    "load_app",
    "load_function",
    "no_such_app",
    "no_training_app",
    "parse_reference",
]


def load_app(reference: str, directory: Path) -> tuple[TrainingApp, Path]:
    """Import an app; return also the directory that must be on the module search path, here and on the nodes.

    Parameters
    ----------
    reference
        ``module:function``, or ``path.py:function`` with the path relative to `directory`.
    directory
        Directory of the campaign file; modules in it can be imported too.

    Raises
    ------
    InvalidInput
        The module or function does not exist, cannot be imported, or is not a ``@training_app``.
    """
    from freetrain_parsl.app import TrainingApp

    app, module, import_path = _find_in_module(reference, directory)
    if app is None:
        place, function, _ = parse_reference(reference, directory)
        there = [name for name, value in vars(module).items() if isinstance(value, TrainingApp)]
        raise no_such_app(place, function, there)
    if not isinstance(app, TrainingApp):
        raise no_training_app(reference)
    return app, import_path


def load_function(reference: str, directory: Path) -> Callable[..., Any]:
    """Import a training function, decorated or not.

    Parameters
    ----------
    reference, directory
        As of `load_app`.

    Raises
    ------
    InvalidInput
        The module or function does not exist, or cannot be imported.
    """
    function, module, _ = _find_in_module(reference, directory)
    if not callable(function):
        place, name, _ = parse_reference(reference, directory)
        there = [key for key, value in vars(module).items() if inspect.isfunction(getattr(value, "func", value))]
        raise InvalidInput(f"{place} has no function {name!r}{did_you_mean(name, there)}")
    found: Callable[..., Any] = function
    return found


def _refuse_modules_of_anybody(directory: Path) -> None:
    """Refuse a directory that any user may write: imports look there first, here and on the nodes.

    Raises
    ------
    InvalidInput
        It is one, such as ``/tmp``.
    """
    try:
        mode = stat.S_IMODE(directory.stat().st_mode)
    except OSError:  # the import fails, and says why
        return
    if mode & stat.S_IWOTH:
        raise InvalidInput(
            f"{directory} can be changed by any user (mode {mode:04o}), who could put a json.py or torch.py there; "
            "move the app to a directory of yours"
        )


def _find_in_module(reference: str, directory: Path) -> tuple[Any, ModuleType, Path]:
    """Return what a reference names, ``None`` if there is nothing, its module, and where that was imported from."""
    place, function, file = parse_reference(reference, directory)
    import_path = directory.resolve() if file is None else file.parent
    _refuse_modules_of_anybody(import_path)
    module = _import(place if file is None else file.stem, import_path)
    if file is not None:
        loaded = getattr(module, "__file__", None)  # a built-in module has none
        if loaded is None or Path(loaded).resolve() != file:
            raise another_module(file, file.stem, loaded or "built in")
    return getattr(module, function, None), module, import_path


def parse_reference(reference: str, directory: Path) -> tuple[str, str, Path | None]:
    """Return the module or path that a reference names, the function, and the file if it is a path.

    Raises
    ------
    InvalidInput
        It is not a reference, or there is no such file, or none that can be imported.
    """
    place, colon, function = reference.rpartition(":")
    if not (colon and place and function.isidentifier()):
        raise InvalidInput(f"an app is named 'module:function' or 'path.py:function', got {reference[:80]!r}")
    if not (place.endswith(".py") or "/" in place):
        if "." in place and (directory / place).is_file():
            raise InvalidInput(f"{place}: an app is in a file that can be imported: NAME.py")
        return place, function, None
    file = _find(directory / user_path(place))
    if file.suffix != ".py" or "." in file.stem:
        raise InvalidInput(f"{file.name}: an app is in a file that can be imported: NAME.py, with no other dot")
    return place, function, file


def another_module(file: Path, name: str, other: object) -> InvalidInput:
    """Describe that the module of a file has a name that another module has."""
    return InvalidInput(f"{file.name}: another module {name!r} is loaded already ({other}); rename the file")


def no_such_app(place: str, function: str, there: Sequence[str]) -> InvalidInput:
    """Describe that a module has no such training app, but these."""
    return InvalidInput(
        f"{place} has no {function!r}{did_you_mean(function, there)}; its training apps: {', '.join(there) or 'none'}"
    )


def no_training_app(reference: str) -> InvalidInput:
    """Describe that a function is not a training app."""
    return InvalidInput(f"{reference} is not a training app: decorate it with @training_app")


def check_arguments(app: TrainingApp, arguments: Mapping[str, Any]) -> None:
    """Reject arguments that the app's function does not accept; see `check_call`."""
    check_call(inspect.signature(app.func), arguments, app.check_arguments)


def check_call(signature: inspect.Signature, arguments: Mapping[str, Any], bind: Callable[..., object]) -> None:
    """Reject arguments that a training function does not accept.

    Parameters
    ----------
    signature
        Of the function.
    arguments
        By name, without the session.
    bind
        Raises TypeError if the function cannot be called with them.

    Raises
    ------
    InvalidInput
        It lists the argument and the valid ones.
    """
    session, *others = signature.parameters or [""]
    takes_any = any(item.kind is item.VAR_KEYWORD for item in signature.parameters.values())
    for name in arguments:
        if not name.isidentifier():
            raise InvalidInput(f"argument {name!r} is not a valid Python parameter name")
        if name == session:
            raise InvalidInput(f"argument {name!r} is the training session, which FreeTrain supplies")
        if name not in others and not takes_any:
            known = ", ".join(others) or "none"
            raise InvalidInput(f"the app takes no argument {name!r}{did_you_mean(name, others)}; it takes: {known}")
    try:
        bind(**arguments)
    except TypeError as error:
        raise InvalidInput(str(error)) from None


def _find(path: Path) -> Path:
    try:
        file = path.resolve()
        found = file.is_file()
    except (OSError, RuntimeError) as error:  # the name is too long, or symbolic links form a loop
        raise InvalidInput(f"{str(path)[:80]!r}…: {getattr(error, 'strerror', None) or error}") from None
    if not found:
        raise InvalidInput(f"no such file: {file}")
    return file


def _import(name: str, path: Path) -> ModuleType:
    from freetrain_parsl.executor.payloads.app_modules import import_app_module

    try:
        return import_app_module(name, str(path))
    except (Exception, SystemExit) as error:  # importing runs the user's code, which may raise anything, or exit
        raise import_failure(name, path, error) from error


def import_failure(name: str, path: Path, error: BaseException) -> InvalidInput:
    """Describe that a module cannot be imported."""
    return InvalidInput(f"importing {name} from {path} failed: {type(error).__name__}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no reason was given"])[0]
