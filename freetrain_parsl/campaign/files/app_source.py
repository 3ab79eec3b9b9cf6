"""What the source of a training app says, for checks that neither import its module nor run anything of it.

Importing a module may take seconds, and in a notebook it may be imported already, in an earlier version. Whatever the
source leaves open is not refused here: the driver imports the app and checks everything.
"""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.files.apps import (
    another_module,
    check_arguments,
    check_call,
    import_failure,
    no_such_app,
    no_training_app,
    parse_reference,
)
from freetrain_parsl.campaign.files.entries import CampaignFile, TrainingNames
from freetrain_parsl.errors import InvalidApp
from freetrain_parsl.training.signature import bind_call, check_session

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from freetrain_parsl.app import TrainingApp
    from freetrain_parsl.campaign.files.yaml_file import Variables

__all__ = ["check_campaign", "signature_in_source"]

_DECORATOR = "training_app"
_PACKAGE = "freetrain_parsl"
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_BIND_ANY = {"*", "__getattr__", "globals", "locals", "vars", "exec", "eval", "setattr"}


def check_campaign(
    text: str, file: str, directory: Path, variables: Variables, apps: Mapping[str, TrainingApp] | None = None
) -> tuple[str, tuple[str, ...]]:
    """Refuse what is invalid in a campaign file, as far as this shows without importing the apps.

    Parameters
    ----------
    text, file, directory, variables
        As of `Campaign.parse`.
    apps
        Apps that exist in this process, by their references.

    Returns
    -------
    name, training jobs
        Names of the campaign and of its training jobs.

    Raises
    ------
    InvalidInput
        A value is invalid, an app does not exist, or does not take an argument; the message gives file and line.
    """
    campaign = CampaignFile.parse(text, file, directory, variables)
    names = TrainingNames()
    signatures: dict[str, inspect.Signature | None] = {}
    files: dict[str, Path] = {}  # module -> its file
    for entry in campaign.entries:
        reference, section = entry.reference, entry.section
        app = None if apps is None else apps.get(reference)
        if app is None and reference not in signatures:
            section.checked(_refuse_another_file, files, reference, directory, key="app")
            signatures[reference] = section.checked(signature_in_source, reference, directory, key="app")
        for point in entry.points():
            names.add(entry, point.name)
            if app is not None:
                section.checked(check_arguments, app, point.arguments, key=entry.arguments_key)
                section.checked(app.options, name=point.name, **entry.options)
                continue
            section.checked(_check_options, point.name, entry.options)
            if (signature := signatures[reference]) is not None:
                bind = partial(_bind, reference.rpartition(":")[2], signature)
                section.checked(check_call, signature, point.arguments, bind, key=entry.arguments_key)
    return campaign.name, tuple(names.names)


def signature_in_source(reference: str, directory: Path) -> inspect.Signature | None:
    """Return the signature of an app's function; ``None`` if only importing its module could show it.

    Parameters
    ----------
    reference, directory
        As of `load_app`.

    Raises
    ------
    InvalidInput
        The file does not exist or is not Python, or the function does not exist, is not a ``@training_app``, or has no
        parameter for the session.
    """
    place, function, file = parse_reference(reference, directory)
    file = _module_file(place, directory) if file is None else file
    if file is None:
        return None
    try:
        module = ast.parse(file.read_bytes(), filename=file.name)
        compile(module, file.name, "exec", dont_inherit=True)  # it finds more than the parser
    except (RecursionError, MemoryError):  # the limit of the driver may be another one
        return None
    except (OSError, SyntaxError, ValueError) as error:
        raise import_failure(file.stem, file.parent, error) from None
    bound, ours = _bound(module), _decorators(module)
    if not bound.keys().isdisjoint(_BIND_ANY):
        return None
    definitions = {node.name: node for node in module.body if isinstance(node, _DEFINITIONS)}
    if function not in bound:
        raise no_such_app(place, function, [name for name, node in definitions.items() if ours & _names(node)])
    if bound[function] != 1 or (node := definitions.get(function)) is None:  # a condition, an import, a loop, …
        return None
    if not node.decorator_list:
        raise no_training_app(reference)
    if not isinstance(node, ast.FunctionDef) or len(node.decorator_list) != 1 or not ours & _names(node):
        return None
    signature = _signature(node.args)
    try:
        check_session(function, signature)
    except InvalidApp as error:
        raise import_failure(file.stem, file.parent, error) from None
    return signature


def _refuse_another_file(files: dict[str, Path], reference: str, directory: Path) -> None:
    """Refuse a file whose module has the name of an earlier one's."""
    _, _, file = parse_reference(reference, directory)
    if file is not None and (other := files.setdefault(file.stem, file)) != file:
        raise another_module(file, file.stem, other)


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    """Refuse options that are invalid whatever the app's own are."""
    from freetrain_parsl.app import TrainingApp
    from freetrain_parsl.app_options import AppOptions

    TrainingApp(_any_training, AppOptions(name=name, **options))


def _any_training(session: object) -> None:
    """Stand for the function of an app that has not been imported."""


def _bind(name: str, signature: inspect.Signature, /, **arguments: Any) -> None:
    bind_call(name, signature, (), arguments)


def _module_file(name: str, directory: Path) -> Path | None:
    """Return the file of a module beside the campaign; ``None``: it is elsewhere, or may be.

    As in an import, a package is found before a file, and one without ``__init__.py`` after any other.
    """
    base = directory.joinpath(*name.split("."))
    packages = list(base.relative_to(directory).parents)[:-1]
    if not all((directory / package / "__init__.py").is_file() for package in packages):
        return None
    return next((path for path in (base / "__init__.py", base.with_name(f"{base.name}.py")) if path.is_file()), None)


def _bound(module: ast.Module) -> Counter[str]:
    """Count how often each name may be bound anywhere in a module, and the uses of what may bind any name."""
    found: Counter[str] = Counter()
    for node in ast.walk(module):
        words = [getattr(node, field, None) for field in ("name", "asname", "rest")]  # definitions, imports, patterns
        found.update(word.partition(".")[0] for word in words if isinstance(word, str))
        if isinstance(node, ast.Name) and (not isinstance(node.ctx, ast.Load) or node.id in _BIND_ANY):
            found[node.id] += 1
    return found


def _decorators(module: ast.Module) -> set[str]:
    """Return how a module may write the decorator of training apps."""
    found = set()
    for node in module.body:
        match node:
            case ast.ImportFrom(module=str(place), names=names) if place.partition(".")[0] == _PACKAGE:
                found |= {item.asname or item.name for item in names if item.name == _DECORATOR}
            case ast.Import(names=names):
                found |= {f"{item.asname or item.name}.{_DECORATOR}" for item in names if item.name == _PACKAGE}
    return found


def _names(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> set[str]:
    """Return the decorators of a definition without their arguments."""
    return {ast.unparse(item.func if isinstance(item, ast.Call) else item) for item in node.decorator_list}


class _Source(str):
    """A default value, shown as it is written."""

    __slots__ = ()
    __repr__ = str.__str__


def _signature(given: ast.arguments) -> inspect.Signature:
    """Return the signature of a function with these parameters; none of its defaults is computed."""

    def shown(default: ast.expr) -> ast.expr:
        return ast.Call(ast.Name("shown", ast.Load()), [ast.Constant(ast.unparse(default))], [])

    given.defaults = [shown(item) for item in given.defaults]
    given.kw_defaults = [None if item is None else shown(item) for item in given.kw_defaults]
    for item in ast.walk(given):
        if isinstance(item, ast.arg):
            item.annotation = None
    function = ast.fix_missing_locations(ast.Expression(ast.Lambda(given, ast.Constant(None))))
    return inspect.signature(eval(compile(function, "", "eval"), {"shown": _Source}))  # noqa: S307 - nothing of the user
