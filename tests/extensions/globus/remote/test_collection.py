"""What of a campaign travels, and what never does."""

from __future__ import annotations

import pytest

from freetrain_parsl.campaign.files.yaml_file import Variables
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.globus.remote.collection import collect

CAMPAIGN = """\
trainings:
  - app: ../apps/net.py:train
    scaling: curve.yaml
  - app: installed.package:train
"""


@pytest.fixture
def project(tmp_path):
    """Write a project as people have them: apps beside campaigns, a repository, an environment, data, secrets."""
    files = {
        "campaigns/c.yaml": CAMPAIGN,
        "campaigns/curve.yaml": "{1: 10}",
        "campaigns/helper.py": "",
        "apps/net.py": "",
        "apps/models/block.py": "",
        "apps/data/train.npz": "x",
        "apps/.git/hooks/hook.py": "",
        "apps/.env": "TOKEN=1",
        "apps/secrets.py": "KEY = 1",
        "apps/venv/pyvenv.cfg": "",
        "apps/venv/lib/x.py": "",
        "apps/__pycache__/net.py": "",
        "apps/freetrain-run-1/parsl/x.py": "",
        "apps/run/campaign.sqlite": "",
        "apps/run/parsl/x.py": "",
        "unrelated/other.py": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_python_files_and_named_files_travel_and_nothing_else(project):
    found = collect(project / "campaigns" / "c.yaml", Variables())
    assert sorted(found.files) == [
        "apps/models/block.py",
        "apps/net.py",
        "campaigns/c.yaml",
        "campaigns/curve.yaml",
        "campaigns/helper.py",
    ]
    assert (found.campaign, found.left_out) == ("campaigns/c.yaml", ("apps/secrets.py",))


def test_further_files_travel_if_asked(project):
    (project / "words.txt").write_text("a b")
    found = collect(project / "campaigns" / "c.yaml", Variables(), [project / "words.txt"])
    assert found.files["words.txt"] == project / "words.txt"


@pytest.mark.parametrize(
    "name",
    [".env", "id_ed25519", "server.pem", "credentials.json", "my_secret.txt", "hf_token.txt", "token.py", ".netrc"],
)
def test_what_looks_like_a_secret_is_refused_even_if_asked_for(project, name):
    (project / name).write_text("x")
    with pytest.raises(InvalidInput, match="looks like a secret"):
        collect(project / "campaigns" / "c.yaml", Variables(), [project / name])


@pytest.mark.parametrize("name", ["tokens.py", "tokenizer.py", "token_stream.py", "keyboard.py", "environment.py"])
def test_ordinary_modules_do_not_look_like_secrets(project, name):
    (project / "apps" / name).write_text("")
    assert f"apps/{name}" in collect(project / "campaigns" / "c.yaml", Variables()).files


def test_absolute_paths_are_refused_with_file_and_line(project):
    file = project / "campaigns" / "c.yaml"
    file.write_text("name: x\ntrainings:\n  - app: /home/me/net.py:train\n")
    with pytest.raises(
        InvalidInput, match=r"c\.yaml:3: trainings\[1\]\.app: '/home/me/net\.py': give the path relative"
    ):
        collect(file, Variables())


def test_links_and_missing_files_are_refused_by_name(project):
    (project / "campaigns" / "curve.yaml").unlink()
    with pytest.raises(InvalidInput, match=r"curve\.yaml: no such file"):
        collect(project / "campaigns" / "c.yaml", Variables())
    (project / "campaigns" / "curve.yaml").symlink_to("/etc/hostname")
    with pytest.raises(InvalidInput, match=r"curve\.yaml: no such file, or a link"):
        collect(project / "campaigns" / "c.yaml", Variables())


def test_links_to_python_files_stay_here(project):
    (project / "apps" / "alias.py").symlink_to(project / "unrelated" / "other.py")
    (project / "apps" / "dangling.py").symlink_to(project / "nowhere.py")
    names = collect(project / "campaigns" / "c.yaml", Variables({}, {})).files
    assert "apps/net.py" in names
    assert not {"apps/alias.py", "apps/dangling.py"} & set(names)
