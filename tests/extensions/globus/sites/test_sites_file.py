"""The list of sites is read strictly; what is wrong is refused with file and line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.globus.sites.sites_file import SitesFile

if TYPE_CHECKING:
    from pathlib import Path

UUID = "ba20ef31-f9b5-4ce9-97e3-f8e6f0477688"
SITE = """\
system: local
checkpoints:
  directory: /scratch/ft
  globus:
    collection: aaaaaaaa-0000-4000-8000-000000000000
    path: /ft
    lease: LEASE
    home: {collection: cccccccc-0000-4000-8000-000000000000, path: HOME}
"""


def read(tmp_path: Path, text: str) -> SitesFile:
    for name, home, lease in (("a", "/home/ft", "10 min"), ("b", "/home/ft", "10 min"), ("other", "/x", "10 min")):
        site = SITE.replace("HOME", home).replace("LEASE", lease)
        (tmp_path / f"{name}.yaml").write_text(site.replace("path: /ft", f"path: /{name}"))
    (tmp_path / "no_home.yaml").write_text("system: local\n")
    (tmp_path / "unknown.yaml").write_text("system: slurm\nblock: {partition: '${NO_SUCH_THING}'}\n")
    (tmp_path / "sites.yaml").write_text(text)
    return SitesFile.load(tmp_path / "sites.yaml")


def test_a_list_of_sites(tmp_path: Path) -> None:
    listed = read(
        tmp_path,
        f"look: 5 min\nhysteresis: 1\nsites:\n  - {{name: here, config: a.yaml}}\n"
        f"  - {{name: there, endpoint: {UUID}, config: unknown.yaml, from_home: {{megabytes_per_second: 250}}}}\n",
    )
    here, there = listed.sites
    assert (here.endpoint, there.endpoint) == ("", UUID)
    assert here.config == str(tmp_path / "a.yaml")
    assert there.rates.from_home.bytes_per_second == 250e6
    assert (listed.settings.look.total_seconds(), listed.settings.hysteresis, listed.status_period) == (300, 1, 60)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("look: 5 min\n", r"sites.yaml:1: there are no 'sites'"),
        ("sites:\n  - {name: a b, config: a.yaml}\n", r"sites.yaml:2: sites\[1\].name: must be up to 31 letters"),
        ("sites:\n  - {name: home, config: a.yaml}\n", r"sites.yaml:2: .* not 'home'"),
        ("sites:\n  - {name: a}\n", r"sites.yaml:2: sites\[1\].config: is missing"),
        (
            "sites:\n  - {name: a, config: a.yaml, endpoint: 7}\n",
            r"yaml:2: .*endpoint: site a: the endpoint '7'",
        ),
        ("sites:\n  - {name: a, config: a.yaml, colour: red}\n", r"sites.yaml:2: unknown key 'sites\[1\].colour'"),
        ("sites:\n  - {name: a, config: x.yaml}\n", r"sites.yaml:2: sites\[1\].config: .*x.yaml"),
        ("sites:\n  - {name: a, config: no_home.yaml}\n", r"sites.yaml:2: .* has no checkpoints.globus"),
        ("sites:\n  - {name: a, config: a.yaml}\n  - {name: a, config: b.yaml}\n", r"sites.yaml:3: .* named 'a'"),
        ("sites:\n  - {name: a, config: a.yaml}\n  - {name: b, config: other.yaml}\n", r"yaml:3: .* need the same"),
        (
            "sites:\n  - {name: a, config: a.yaml}\n  - {name: b, config: a.yaml}\n",
            r"yaml:3: .* directory is that of 'a'",
        ),
        ("look: 0.5 s\nsites:\n  - {name: a, config: a.yaml}\n", r"sites.yaml:1: look: must be at least 1 s"),
        ("hysteresis: -1\nsites:\n  - {name: a, config: a.yaml}\n", r"sites.yaml:1: .*hysteresis must be zero or more"),
        ("sites:\n  - {name: a, config: a.yaml, to_home: {megabytes_per_second: 0}}\n", r"must be more than zero"),
    ],
)
def test_what_is_wrong_is_refused_with_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read(tmp_path, text)
