"""README and documentation are correct: links are valid, commands exist, lists are complete. Code: test_docs_code."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import typer.main

from freetrain_parsl import (
    CheckpointSettings,
    FreeTrainExecutor,
    PlannerSettings,
    RateLimits,
    TrainingSession,
    TrainingSettings,
)
from freetrain_parsl.app_options import AppOptions
from freetrain_parsl.cli.commands import app
from freetrain_parsl.planning.policies import MilpPolicy

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")])
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def test_internal_links_lead_somewhere():
    """Relative links point to files of the repository."""
    links = [(page, link) for page in PAGES for link in _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))]
    internal = [(page, link) for page, link in links if not link.startswith(("http://", "https://", "#"))]
    assert len(internal) > len(PAGES)
    assert [(page, link) for page, link in internal if not (page.parent / link.partition("#")[0]).exists()] == []


@pytest.mark.slow
def test_documentation_builds_without_warnings(tmp_path):
    """`sphinx-build -W` passes: no broken reference, no page outside the tables of contents."""
    pytest.importorskip("myst_parser", reason="needs the extra 'docs'")
    pytest.importorskip("furo", reason="needs the extra 'docs'")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", DOCS, tmp_path / "html"]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr


def _command_options() -> dict[str, set[str]]:
    group = typer.main.get_command(app)
    verbs = group.commands  # type: ignore[attr-defined]  # a group, since there are several verbs
    return {
        verb: {name for parameter in command.params for name in parameter.opts if name.startswith("--")}
        for verb, command in verbs.items()
    }


def test_command_page_is_complete():
    """The command's page has a section for each verb, and in it exactly the verb's options."""
    page = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## `freetrain (\w+)`\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE))
    documented = {verb: set(re.findall(r"^\| `(--[\w-]+)` \|", text, re.MULTILINE)) for verb, text in sections.items()}
    assert documented == _command_options()


@pytest.mark.parametrize("group", ["checkpoints", "remote"])
def test_the_sections_of_groups_are_complete(group):
    """The section of a verb with verbs of its own lists exactly their options."""
    page = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    section = re.search(rf"^## `freetrain {group}`\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    assert section is not None
    rows = re.findall(r"^\| (`.*?`) \| `(--[\w-]+)` \|", section[1], re.MULTILINE)
    documented = {(verb, option) for verbs, option in rows for verb in re.findall(r"`(\w+)`", verbs)}
    commands = typer.main.get_command(app).commands[group].commands  # type: ignore[attr-defined]  # as above
    assert documented == {
        (verb, name)
        for verb, command in commands.items()
        for parameter in command.params
        for name in parameter.opts
        if name.startswith("--")
    }


def test_commands_in_the_docs_exist():
    """`freetrain VERB` and `make TARGET` only refer to existing verbs and targets."""
    verbs, targets = set(), set()
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        text = page.read_text(encoding="utf-8")
        verbs |= {(page, verb) for verb in re.findall(r"(?:`|\$ )freetrain ([a-z]+)", text)}
        targets |= {(page, target) for target in re.findall(r"(?:`|\$ )make ([a-z-]+)", text)}
    known = _command_options()
    makefile = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {(page, verb) for page, verb in verbs if verb not in known} == set()
    assert {(page, target) for page, target in targets if target not in makefile} == set()


def test_journal_page_is_complete():
    """The journal's page lists exactly the kinds of records, with their fields."""
    from freetrain_parsl.protocol.journal import KINDS

    page = (DOCS / "reference" / "journal.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?`) \| .*? \| (.*) \|$", page, re.MULTILINE)
    documented = {kind: detail for kinds, detail in rows for kind in re.findall(r"`(\w+)`", kinds)}
    assert documented.keys() == KINDS.keys()
    for kind, record in KINDS.items():
        names = {item.name for item in fields(record)} - {"subject"}
        assert {name for name in names if f"`{name}`" not in documented[kind]} == set(), kind


def test_the_life_of_a_training_is_drawn_as_it_is():
    """The table of phases lists those of the state machine, each with its successors."""
    from freetrain_parsl.executor.jobs.training.states import TRANSITIONS

    page = (DOCS / "explanation" / "life-of-a-training.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| .*? \| (.*?)\|$", page, re.MULTILINE)
    drawn = {phase: set(re.findall(r"`(\w+)`", following)) for phase, following in rows}
    assert drawn == {phase.__name__: {one.__name__ for one in after} for phase, after in TRANSITIONS.items()}


def test_error_page_is_complete():
    """The errors' page lists exactly the errors of the tree, with their `transient`."""
    from freetrain_parsl import errors

    page = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| `(\w+)` \|.*\| (yes|no) \|$", page, re.MULTILINE))
    tree = {name: getattr(errors, name) for name in errors.__all__ if name != "FreeTrainError"}
    assert documented == {name: "yes" if error.transient else "no" for name, error in tree.items()}


def _documented(page: Path, heading: str) -> set[str]:
    """Names in the first column of the tables below a heading."""
    text = page.read_text(encoding="utf-8")
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert section is not None
    rows = re.findall(r"^\| (`.*?`) \|", section[1], re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_settings_page_is_complete():
    """The settings' page lists exactly the settings of planner, executor and default policy."""
    page = DOCS / "howto" / "choose-settings.md"
    parameters = {
        "The planner": PlannerSettings,
        "The executor": FreeTrainExecutor,
        "Training jobs": TrainingSettings,
        "Load on the batch system": RateLimits,
        "Checkpoints": CheckpointSettings,
        "The policy": MilpPolicy,
    }
    for heading, kind in parameters.items():
        assert _documented(page, heading) == set(inspect.signature(kind).parameters)


def test_options_page_is_complete():
    """The page on training apps lists all options of the decorator, and all methods of the session."""
    page = DOCS / "howto" / "write-a-training-app.md"
    options = {item.name for item in fields(AppOptions)}
    assert _documented(page, "Options, for all calls or for one") == options
    verbs = page.read_text(encoding="utf-8").split("## The session's methods")[1].split("## Recipes")[0]
    for name in (name for name in dir(TrainingSession) if not name.startswith("_")):
        assert re.search(rf"`{name}\b", verbs), name


@pytest.mark.parametrize("site", ["perlmutter", "polaris"])
def test_a_page_that_starts_from_zero_sets_the_variables_of_the_sites_file(site):
    """All of those without a default, and no other."""
    variables = re.findall(r"\$\{(\w+)(:-)?", (ROOT / "configs" / f"{site}.yaml").read_text(encoding="utf-8"))
    page = (DOCS / "start" / f"{site}.md").read_text(encoding="utf-8")
    exported = {
        pair.partition("=")[0] for line in re.findall(r"^\$ export (.*)$", page, re.MULTILINE) for pair in line.split()
    }
    assert {name for name, default in variables if not default} <= exported <= {name for name, _ in variables}
    assert f"--config {site}" in page


@pytest.mark.parametrize(
    ("name", "page_name", "count"), [("llm", "large-models", 2), ("lora", "fine-tuning-sweeps", 1)]
)
def test_parts_of_an_app_are_shown_as_they_are(name, page_name, count):
    """Such a page shows parts of the app, in its words."""
    app = (ROOT / "apps" / f"{name}.py").read_text(encoding="utf-8")
    page = (DOCS / "howto" / f"{page_name}.md").read_text(encoding="utf-8")
    parts = re.findall(rf"^<!-- part of apps/{name}.py -->\n```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(parts) == count
    assert [part for part in parts if part not in app] == []
