"""What others register is found by name, and what is wrong with it is said in one line and disturbs nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

from freetrain_parsl.campaign.directories import RUN_KINDS
from freetrain_parsl.campaign.site.home import HOME_KINDS
from freetrain_parsl.cli.verbs import VERBS
from freetrain_parsl.entry_points import own_entry_points
from freetrain_parsl.executor.batch.systems import SYSTEMS
from freetrain_parsl.executor.htex.node_start import STARTS
from freetrain_parsl.executor.jobs.port import JOBS
from freetrain_parsl.executor.values.tracker import TRACKERS
from freetrain_parsl.planning.objectives.base import OBJECTIVES
from freetrain_parsl.planning.policies import POLICIES
from freetrain_parsl.training.data.staging import COPIES
from freetrain_parsl.training.extension import SESSIONS

ROOT = Path(__file__).parents[1]
GROUPS = {
    "freetrain.policies": POLICIES,
    "freetrain.objectives": OBJECTIVES,
    "freetrain.windows": SYSTEMS,
    "freetrain.trackers": TRACKERS,
    "freetrain.jobs": JOBS,
    "freetrain.sessions": SESSIONS,
    "freetrain.commands": VERBS,
    "freetrain.storage": HOME_KINDS,
    "freetrain.runs": RUN_KINDS,
    "freetrain.starts": STARTS,
    "freetrain.copies": COPIES,
}

MODULE = """
from freetrain_parsl.executor.batch.slurm import SlurmSystem
from freetrain_parsl.planning.policies import EqualSharePolicy

class Fair(EqualSharePolicy):
    name = "fair"

class Flux(SlurmSystem):
    name, title = "flux", "Flux"

def steady(trainer, nodes):
    return 1.0

class Noting:
    def __init__(self, since=0):
        self.since = since

def greet(name: str = "you"):
    \"\"\"Greet somebody.\"\"\"
    print(f"hello {name}")
"""

ENTRY_POINTS = """
[freetrain.policies]
fair = acme:Fair
milp = acme:Fair
missing = acme_missing:Nothing
odd = acme:greet

[freetrain.objectives]
steady = acme:steady

[freetrain.windows]
broken = acme_missing:Nothing
flux = acme:Flux

[freetrain.sessions]
broken = acme_missing:Nothing

[freetrain.trackers]
noting = acme:Noting

[freetrain.jobs]
broken = acme_missing:Nothing

[freetrain.storage]
bucket = acme_missing:Nothing

[freetrain.commands]
greet = acme:greet
broken = acme:nothing
"""

SCRIPT = """
import sys
from freetrain_parsl.campaign.files.yaml_file import Variables
from freetrain_parsl.campaign.site.home import HOME_KINDS
from freetrain_parsl.campaign.site.site import Site
from freetrain_parsl.errors import InvalidInput, InvalidSettings
from freetrain_parsl.executor.batch.systems import SYSTEMS
from freetrain_parsl.executor.jobs.port import JOBS
from freetrain_parsl.executor.values.tracker import parse_trackers
from freetrain_parsl.planning.objectives.base import resolve_objective
from freetrain_parsl.planning.policies import POLICIES, resolve_policy
from freetrain_parsl.training.data.staging import COPIES
from freetrain_parsl.training.extension import SESSIONS

try:
    print(eval(sys.argv[1]))
except (InvalidInput, InvalidSettings) as error:
    print(error)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Install two distributions in a directory; return the environment in which they are found."""
    place = tmp_path_factory.mktemp("site")
    (place / "acme.py").write_text(MODULE)
    for name, points in (("acme", ENTRY_POINTS), ("other", "[freetrain.objectives]\nsteady = acme:steady\n")):
        described = place / f"{name}-1.0.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (described / "entry_points.txt").write_text(points)
    path = os.pathsep.join([str(place), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}


def python(environment, *arguments):
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def evaluated(environment, expression):
    """Return what an expression gives in a process of its own, or the text of its error."""
    return python(environment, "-c", SCRIPT, expression)[1].removesuffix("\n")


_BROKEN = "cannot be loaded from acme_missing:Nothing: ModuleNotFoundError:"
_SITE = "system: local\\ncheckpoints:\\n  bucket: {name: x}\\n"
_POLICIES = "equal-share, fair, fcfs, milp, missing, odd, ones, ones-published, optimus, tiresias, window"
_TRACKERS = "csv, mlflow, tensorboard, wandb, noting, module:Class"


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("POLICIES.find('fair')", "<class 'acme.Fair'>"),
        ("resolve_policy('fair').name", "fair"),
        ("resolve_policy('fcfs').name", "fcfs"),
        ("resolve_policy('milp')", "policy 'milp' is registered by freetrain-parsl and acme; uninstall all but one"),
        ("resolve_policy('missing')", f"policy 'missing' of acme {_BROKEN} No module named 'acme_missing'"),
        ("resolve_policy('fairy')", f"unknown policy 'fairy'; available: {_POLICIES}"),
        ("[kind.__name__ for kind in HOME_KINDS.usable()]", "['GlobusHome']"),
        (
            f"Site.parse('{_SITE}', 's.yaml', Variables())",
            f"s.yaml:3: checkpoints.bucket: kind of home 'bucket' of acme {_BROKEN} No module named 'acme_missing'",
        ),
        ("resolve_objective('steady')", "objective 'steady' is registered by acme and other; uninstall all but one"),
        ("resolve_objective('deadline') is resolve_objective('deadline')", "True"),
        ("list(SYSTEMS), SYSTEMS['flux'].title", "(['local', 'slurm', 'pbs', 'broken', 'flux'], 'Flux')"),
        ("parse_trackers({'noting': {'since': 3}})[0].make().since", "3"),
        ("[kind.__name__ for kind in JOBS.usable()]", "['FusionKind']"),
        ("[kind.__name__ for kind in SESSIONS.usable()]", "['Sharding']"),
        ("[system.name for system in SYSTEMS.usable()]", "['local', 'slurm', 'pbs', 'flux']"),
        ("parse_trackers('notin')", f"there is no tracker 'notin' (did you mean 'noting'?); known: {_TRACKERS}"),
    ],
)
def test_entry_points_of_other_distributions(environment, expression, said):
    """Objects are found by name; names that are taken twice, broken or unknown are refused in a line."""
    assert evaluated(environment, expression) == said


def test_what_is_registered_as_something_else_is_refused(environment):
    said = evaluated(environment, "POLICIES['odd']")
    assert re.fullmatch(r"policy 'odd' of acme .*: TypeError: <function .*> is not a subclass .*", said)


def test_commands_of_other_distributions(environment):
    """They are run, and listed after our own; those that are broken are named on the error stream."""
    freetrain = ("-c", "from freetrain_parsl.cli import main; main()")
    assert python(environment, *freetrain, "greet", "--name", "me") == (0, "hello me\n", "")
    code, out, err = python(environment, *freetrain, "--help")
    assert code == 0
    assert out.index(" checkpoints ") < out.index(" greet ")
    assert re.fullmatch("freetrain: command 'broken' of acme cannot be loaded from acme:nothing: .*\n", err)
    assert python(environment, *freetrain, "broken")[0::2] == (2, err)
    assert "broken" not in python(environment, *freetrain, "status", "nowhere")[2]


@pytest.mark.parametrize("group", GROUPS)
def test_our_own_are_all_there(group):
    """Each can be loaded, and pyproject.toml says the same as the file that is read."""
    own = own_entry_points(group)
    assert own
    assert list(own) == [name for name in GROUPS[group] if name in own]
    assert all(GROUPS[group][name] is not None for name in own)
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition(f'[project.entry-points."{group}"]\n')[2].partition("\n[")[0]
    assert dict(re.findall(r'^([\w-]+) = "(.*)"$', section, re.MULTILINE)) == own


def test_the_file_is_as_the_standard_library_reads_it():
    """It has the format of entry points, and no group that nothing reads."""
    parser = ConfigParser(delimiters=("=",))
    parser.read(ROOT / "freetrain_parsl" / "entry_points.txt")
    assert {group: dict(parser[group]) for group in parser.sections()} == {g: own_entry_points(g) for g in GROUPS}


def test_a_name_can_be_set_for_a_process():
    POLICIES["own"] = POLICIES["fcfs"]
    assert POLICIES.find("own") is POLICIES["fcfs"]
    assert "own" in list(POLICIES)
    del POLICIES["own"]
    assert "own" not in POLICIES
