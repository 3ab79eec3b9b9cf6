"""What the source of a training app says, for checks that neither import its module nor run anything of it.

Importing a module may take seconds, and in a notebook it may be imported already, in an earlier version. Whatever the
source leaves open is not refused here: the driver imports the app and checks everything.
"""

from __future__ import annotations

import ast
import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

from freetrain_parsl.campaign.apps import (
    check_arguments,
    check_call,
    import_failure,
    no_such_app,
    no_training_app,
    parse_reference,
)
from freetrain_parsl.campaign.entries import CampaignFile, TrainingNames
from freetrain_parsl.training.signature import bind_call

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from freetrain_parsl.app import TrainingApp
    from freetrain_parsl.campaign.yaml_file import Variables

__all__ = ["check_campaign", "signature_in_source"]

_DECORATOR = "training_app"


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
        A value is invalid, an app does not exist, or it does not take an argument; the message gives file and line.
    """
    campaign = CampaignFile.parse(text, file, directory, variables)
    names = TrainingNames()
    signatures: dict[str, inspect.Signature | None] = {}
    for entry in campaign.entries:
        reference, section = entry.reference, entry.section
        app = None if apps is None else apps.get(reference)
        if app is None and reference not in signatures:
            signatures[reference] = section.checked(signature_in_source, reference, directory, key="app")
        for point in entry.points():
            names.add(entry, point.name)
            if app is not None:
                section.checked(check_arguments, app, point.arguments, key=entry.arguments_key)
                section.checked(app.options, name=point.name, **entry.options)
            elif (signature := signatures[reference]) is not None:
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
        The file does not exist or is not Python, or the function does not exist or is not a ``@training_app``.
    """
    place, function, file = parse_reference(reference, directory)
    file = _module_file(place, directory) if file is None else file
    if file is None:
        return None
    try:
        module = ast.parse(file.read_bytes(), filename=file.name)
    except (OSError, SyntaxError, ValueError) as error:
        raise import_failure(file.stem, file.parent, error) from None
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    named = [node for node in functions if node.name == function]
    bound = sum(1 for _ in _bindings(module, function))
    if not bound:
        raise no_such_app(place, function, [node.name for node in functions if _training_app(node)])
    if len(named) != 1 or bound != 1:  # defined by a condition, an import, a loop, …
        return None
    if not named[0].decorator_list:
        raise no_training_app(reference)
    return _signature(named[0].args) if len(named[0].decorator_list) == 1 and _training_app(named[0]) else None


def _bind(name: str, signature: inspect.Signature, /, **arguments: Any) -> None:
    bind_call(name, signature, (), arguments)


def _module_file(name: str, directory: Path) -> Path | None:
    """Return the file of a module beside the campaign; ``None``: it is elsewhere."""
    base = directory.joinpath(*name.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _bindings(module: ast.Module, name: str) -> Iterator[ast.AST]:
    """Return the places that may give the module a global of this name."""
    for node in ast.walk(module):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                if node.name in (name, "__getattr__"):
                    yield node
            case ast.Name(id=word, ctx=ast.Store()) if word == name:
                yield node
            case ast.alias(name=word, asname=alias) if (alias or word) in (name, "*"):
                yield node
            case ast.Name(id="globals" | "vars" | "exec" | "setattr"):
                yield node


def _training_app(node: ast.FunctionDef) -> bool:
    """Return whether a function has the decorator of training apps."""
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        word = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
        if word == _DECORATOR:
            return True
    return False


class _Source:
    """A default value, shown as it is written."""

    def __init__(self, node: ast.expr) -> None:
        self._text = ast.unparse(node)

    def __repr__(self) -> str:
        return self._text


def _signature(given: ast.arguments) -> inspect.Signature | None:
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
    return inspect.Signature(found) if found else None  # without a session: refused when it is imported
