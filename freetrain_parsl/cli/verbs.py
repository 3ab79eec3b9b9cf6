"""The verbs of the ``freetrain`` command, each imported from its own module when it is used."""

from __future__ import annotations

import importlib
from typing import Final

import typer

from freetrain_parsl import __version__
from freetrain_parsl.screen import say

__all__ = ["VERBS", "app_of"]

VERBS: Final = {
    "demo": "freetrain_parsl.extensions.demo.command:demo",
    "init": "freetrain_parsl.cli.init:init",
    "check": "freetrain_parsl.extensions.checking.command:check",
    "run": "freetrain_parsl.cli.runs.run:run",
    "status": "freetrain_parsl.cli.runs.status:status",
    "dashboard": "freetrain_parsl.extensions.dashboard.command:dashboard",
    "logs": "freetrain_parsl.cli.runs.logs:logs",
    "stop": "freetrain_parsl.cli.runs.stop:stop",
    "cancel": "freetrain_parsl.cli.runs.cancel:cancel",
    "resume": "freetrain_parsl.cli.runs.resume:resume",
    "clean": "freetrain_parsl.cli.runs.clean:clean",
    "report": "freetrain_parsl.cli.runs.report:report",
    "replay": "freetrain_parsl.extensions.replay.command:replay",
    "simulate": "freetrain_parsl.extensions.simulate.command:simulate",
    "windows": "freetrain_parsl.cli.windows:windows",
    "plan": "freetrain_parsl.cli.plan:plan",
    "explain": "freetrain_parsl.cli.runs.explain:explain",
    "allocate": "freetrain_parsl.extensions.resources.command:allocate",
    "checkpoints": "freetrain_parsl.cli.runs.checkpoints:checkpoints",
    "globus": "freetrain_parsl.extensions.globus.storage.command:globus",
    "remote": "freetrain_parsl.extensions.globus.remote.command:remote",
}
"""Verb -> where its function is, or its group of commands: in the order of the help."""


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
        module, _, function = VERBS[name].partition(":")
        verb = getattr(importlib.import_module(module), function)
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
