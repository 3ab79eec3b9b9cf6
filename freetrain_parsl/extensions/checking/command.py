"""``freetrain check``: whether a training function has the same results wherever and however it runs."""

from __future__ import annotations

import inspect
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from freetrain_parsl.campaign.files.apps import check_call, load_function
from freetrain_parsl.campaign.files.yaml_file import Section, Variables
from freetrain_parsl.cli.sources import errors_in_one_line
from freetrain_parsl.errors import FreeTrainError, InvalidInput
from freetrain_parsl.extensions.checking.report import CheckReport
from freetrain_parsl.screen import say, say_json, say_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["check"]

_EXIT_CODES = {"holds": 0, "differs": 1, "does not run": 2}


def check(
    reference: str = typer.Argument(metavar="FILE.py:FUNCTION", help="The training function, or module:function."),
    settings: list[str] = typer.Option([], "--set", metavar="NAME=VALUE", help="Argument of the function; repeatable."),
    limit: float = typer.Option(120.0, min=1.0, help="Seconds that its steps may take in one process."),
    float32: bool = typer.Option(False, "--float32", help="Compare in float32: only large differences are seen."),
    json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> None:
    """Run a few steps of a training function in several ways, and tell what makes the results differ.

    Exit code 0: it holds; 1: a cause was found; 2: the function does not run.
    """
    with _errors(json):
        arguments = _arguments(settings)
        function = load_function(reference, Path())

        from freetrain_parsl.extensions.checking.run import Checker, call_of  # it imports torch

        plain = getattr(function, "training_function", function)
        check_call(inspect.signature(plain), arguments, lambda **given: call_of(function, **given))
        report = Checker(call_of(function, **arguments), limit=limit, double=not float32, progress=_progress()).run()
    if json:
        say_json(report.as_json())
    else:
        say_text(f"{report}\n")
    raise typer.Exit(_EXIT_CODES[report.verdict.value])


@contextmanager
def _errors(json: bool) -> Iterator[None]:
    """End the command as other read-only ones do; with ``--json`` also with a report, and after Ctrl-C with a line."""
    with errors_in_one_line("check"):
        try:
            yield
        except FreeTrainError as error:
            if json:
                say_json(CheckReport("", failure=str(error)).as_json())
            raise
        except KeyboardInterrupt:
            say("freetrain check: interrupted; its processes were ended", err=True)
            raise


def _progress() -> Callable[[str], None]:
    """Return what prints a line for each comparison that begins, in a terminal."""
    if not sys.stderr.isatty():
        return lambda _: None
    return lambda phase: say(f"checking: {phase} …", err=True)


def _arguments(settings: Iterable[str]) -> dict[str, Any]:
    """Read values as campaign files have them: numbers, truth values, texts, lists."""
    found: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (equals and name.isidentifier()):
            raise InvalidInput(f"--set {setting}: write --set name=value")
        found |= Section.parse(f"{name}: {value}", f"--set {name}", Variables(environment={})).values()
    return found
