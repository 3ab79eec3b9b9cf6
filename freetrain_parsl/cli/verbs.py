"""The verbs of the ``freetrain`` command: entry points, each imported from its own module when it is used."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any, Final

import typer

from freetrain_parsl import __version__
from freetrain_parsl.entry_points import EntryPoints, own_entry_points
from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.screen import say

__all__ = ["VERBS", "app_of"]

_GROUP: Final = "freetrain.commands"

VERBS: Final = EntryPoints[Any](_GROUP, "command")
"""Verb -> its function, or its group of commands: our own in the order of the help, then those of others."""


def app_of(word: str = "") -> typer.Typer:
    """Build the command line.

    Parameters
    ----------
    word
        The first word of the command line. If it is a verb, no other verb is imported; the help lists all of them.
    """
    app = typer.Typer(
        name="freetrain",
        help="Train neural networks on the idle nodes of a cluster.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for name, verb in _verbs(word).items():
        if isinstance(verb, typer.Typer):
            app.add_typer(verb, name=name)
        else:
            app.command(name)(verb)
    return app


def _verbs(word: str) -> dict[str, Any]:
    """Return the verb that is the first word, or all, but for those that are broken."""
    own = own_entry_points(_GROUP)
    if word in own:  # without a look at what is installed, which is slow
        return {word: resolve_name(own[word])}
    if word in VERBS:
        return {word: VERBS[word]}
    return {name: verb for name in VERBS if (verb := _unless_broken(name)) is not None}


def _unless_broken(name: str) -> Any:
    try:
        return VERBS[name]
    except InvalidSettings as error:
        say(f"freetrain: {error}", err=True)
        return None


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"freetrain {__version__}")
        raise typer.Exit


def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    pass
