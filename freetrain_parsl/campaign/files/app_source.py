"""What the source of a training app says, for checks that neither import its module nor run anything of it.

Importing a module may take seconds, and in a notebook it may be imported already, in an earlier version. Whatever the
source leaves open is not refused here: the driver imports the app and checks everything.
"""

from __future__ import annotations

import ast
import inspect
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
from freetrain_parsl.errors import InvalidTrainer
from freetrain_parsl.training.signature import bind_call, check_session

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from freetrain_parsl.app import TrainingApp
    from freetrain_parsl.campaign.files.yaml_file import Variables

__all__ = ["check_campaign", "signature_in_source"]

_DECORATOR = "training_app"
_PACKAGE = "freetrain_parsl"
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_REACH_GLOBALS = ("globals", "locals", "vars", "exec", "eval", "setattr")


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
    name, trainings
        Names of the campaign and of its trainings.

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
    named = [node for node in module.body if isinstance(node, _DEFINITIONS) and node.name == function]
    bound = sum(1 for _ in _bindings(module, function))
    if not bound:
        functions = (node for node in module.body if isinstance(node, ast.FunctionDef))
        raise no_such_app(place, function, [node.name for node in functions if _is_app(node, module)])
    if len(named) != 1 or bound != 1:  # defined by a condition, an import, a loop, …
        return None
    (node,) = named
    if not node.decorator_list:
        raise no_training_app(reference)
    if not isinstance(node, ast.FunctionDef) or len(node.decorator_list) != 1 or not _is_app(node, module):
        return None
    signature = _signature(node.args)
    try:
        check_session(function, signature)
    except InvalidTrainer as error:
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

    most = {"max_nodes": options["min_nodes"]} if "min_nodes" in options else {}  # unless the file has it, too
    TrainingApp(_any_training, AppOptions(name=name, **{**most, **options}))


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


def _bindings(module: ast.Module, name: str) -> Iterator[ast.AST]:
    """Return the places that may give the module a global of this name, or take it away."""
    names = (name, "__getattr__")
    for node in ast.walk(module):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if node.name in names:
                yield node
            case ast.Name(id=word, ctx=ast.Store() | ast.Del()) if word in names:
                yield node
            case ast.MatchAs(name=word) | ast.MatchStar(name=word) | ast.MatchMapping(rest=word) if word in names:
                yield node
            case ast.ExceptHandler(name=word) if word in names:
                yield node
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                if any((item.asname or item.name.partition(".")[0]) in (*names, "*", "modules") for item in aliases):
                    yield node
            case ast.Name(id=word) if word in _REACH_GLOBALS:
                yield node
            case ast.Attribute(value=ast.Name(id="sys"), attr="modules"):  # the module itself is in it
                yield node


def _is_app(node: ast.FunctionDef, module: ast.Module) -> bool:
    """Return whether a function has the decorator of training apps, and not another one of that name."""
    for decorator in node.decorator_list:
        match decorator.func if isinstance(decorator, ast.Call) else decorator:
            case ast.Name(id=root) if root == _DECORATOR:
                pass
            case ast.Attribute(value=ast.Name(id=root), attr=word) if word == _DECORATOR:
                pass
            case _:
                continue
        if all(_is_of_this_package(binding) for binding in _bindings(module, root)):
            return True
    return False


def _is_of_this_package(binding: ast.AST) -> bool:
    match binding:
        case ast.Import(names=aliases):
            places = [item.name for item in aliases]
        case ast.ImportFrom(module=str(place), level=0):
            places = [place]
        case _:
            return False
    return all(place.partition(".")[0] == _PACKAGE for place in places)


class _Source:
    """A default value, shown as it is written."""

    def __init__(self, node: ast.expr) -> None:
        self._text = ast.unparse(node)

    def __repr__(self) -> str:
        return self._text


def _signature(given: ast.arguments) -> inspect.Signature:
    kinds = inspect.Parameter
    positional = [*given.posonlyargs, *given.args]
    missing = [None] * (len(positional) - len(given.defaults))
    found = [
        kinds(
            item.arg,
            kinds.POSITIONAL_ONLY if number < len(given.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD,
            default=kinds.empty if default is None else _Source(default),
        )
        for number, (item, default) in enumerate(zip(positional, [*missing, *given.defaults], strict=True))
    ]
    if given.vararg is not None:
        found.append(kinds(given.vararg.arg, kinds.VAR_POSITIONAL))
    found += [
        kinds(item.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else _Source(default))
        for item, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    if given.kwarg is not None:
        found.append(kinds(given.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(found)
