"""The reference of both files documents exactly the keys that the code reads."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from freetrain_parsl.campaign.files.campaign import Campaign
from freetrain_parsl.campaign.files.yaml_file import Section, Variables
from freetrain_parsl.campaign.site.site import Site

HERE = Path(__file__).parents[1]  # of the apps
REFERENCE = Path(__file__).parents[3] / "docs" / "reference"


@pytest.fixture
def read_keys(monkeypatch):
    """Collect the keys that are read, by section."""
    keys: dict[str, set[str]] = defaultdict(set)
    done = Section.done

    def note(section: Section) -> None:
        keys[section._title].update(section._known)
        done(section)

    monkeypatch.setattr(Section, "done", note)
    return keys


def documented(page: str, heading: str, system: str | None = None) -> set[str]:
    """Names in the first column of a heading's table; for one system, if the second column names systems."""
    text = (REFERENCE / page).read_text(encoding="utf-8")
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert section is not None
    rows = re.findall(r"^\| (`.*?`) \|(?: ([\w, ]+) \|)?", section[1], re.MULTILINE)
    return {
        name
        for names, systems in rows
        for name in re.findall(r"`(\w+)`", names)
        if system is None or systems == "all" or system in systems.split(", ")
    }


@pytest.mark.parametrize("system", ["local", "slurm", "pbs"])
def test_the_sites_page_is_complete(system, read_keys) -> None:
    Site.parse(f"system: {system}", "s.yaml", Variables({}, {}))
    assert documented("site.md", "Top level") == read_keys.pop("")
    for section in ("block", "node"):
        assert documented("site.md", f"`{section}`", system) == read_keys.pop(section)
    for section, keys in read_keys.items():
        assert documented("site.md", f"`{section}`") == keys


def test_the_campaigns_page_is_complete(read_keys) -> None:
    Campaign.parse("trainings: [{app: 'slow_app.py:train'}]", "c.yaml", HERE, Variables({}, {}))
    assert documented("campaign.md", "Top level") == read_keys[""]
    assert documented("campaign.md", "A training job") == read_keys["trainings[1]"]
