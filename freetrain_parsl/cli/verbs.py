"""The verbs of the ``freetrain`` command, each imported from its own module when it is used."""

from __future__ import annotations

import importlib
from typing import Final

import typer

from freetrain_parsl import __version__
from freetrain_parsl.screen import say

__all__ = ["VERBS", "app_of"]

VERBS: Final = (
    "demo",
    "init",
    "check",
    "run",
    "status",
    "dashboard",
    "logs",
    "stop",
    "cancel",
    "resume",
    "clean",
    "report",
    "replay",
    "simulate",
    "windows",
    "plan",
    "explain",
    "allocate",
    "checkpoints",
    "globus",
    "remote",
)
"""In the order of the help. The module of a verb has a function, or a group of commands, of the same name."""


def app_of(word: str | None = None) -> typer.Typer:
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
    for name in (word,) if word in VERBS else VERBS:
        verb = getattr(importlib.import_module(f"freetrain_parsl.cli.{name}"), name)
        if isinstance(verb, typer.Typer):
            app.add_typer(verb, name=name)
        else:
            app.command()(verb)
    return app


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
