"""Training apps of cells travel to another process as they were, and a change of them is found."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest
import yaml

from freetrain_parsl import training_app
from freetrain_parsl.errors import ForeignCheckpoint, InvalidApp, InvalidInput
from freetrain_parsl.extensions.notebook.cells import CellCampaign, load_apps

CELL = """
FACTOR = {factor}

def helper(x):
    return FACTOR * x

@training_app(max_nodes={nodes})
def train(session, lr=0.1):
    return helper(lr)
"""


@pytest.fixture
def cell(monkeypatch):
    """Run a cell, as a kernel does: in the module ``__main__``; return the app that it defines."""
    main = type(sys)("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)

    def run(factor=2, nodes=1):
        main.training_app = training_app
        exec(CELL.format(factor=factor, nodes=nodes), main.__dict__)
        return main.train

    return run


def campaign_of(app, tmp_path, **entry):
    return CellCampaign.of([{"app": app, **entry}], "sweep", tmp_path)


def test_an_app_travels_with_what_it_uses(cell, tmp_path):
    """The app read from the run directory computes what it did in the notebook, whatever the cell is now."""
    campaign_of(cell(factor=3), tmp_path).write(tmp_path / "notebook")
    cell(factor=4)
    app = load_apps(tmp_path / "notebook")["train"]
    assert app.func(None, 2) == 6


def test_files_are_private_and_of_this_user_only(cell, tmp_path):
    """Nobody else can read the pickle, and one that others could have written is not read."""
    directory = tmp_path / "notebook"
    campaign_of(cell(), tmp_path).write(directory)
    assert stat.S_IMODE((directory / "cells.pickle").stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    (directory / "cells.pickle").chmod(0o620)
    with pytest.raises(ForeignCheckpoint, match=r"cells\.pickle"):
        load_apps(directory)


def test_a_cell_that_is_run_again_has_not_changed(cell, tmp_path):
    """Neither the same text nor a comment is a change."""
    campaign_of(cell(), tmp_path).write(tmp_path / "notebook")
    assert campaign_of(cell(), tmp_path).changes_since(tmp_path / "notebook") == []


@pytest.mark.parametrize(
    ("again", "changed"),
    [({"factor": 5}, ["__main__.FACTOR"]), ({"nodes": 2}, ["the options of train"])],
    ids=["code", "options"],
)
def test_a_changed_cell_is_noticed(cell, tmp_path, again, changed):
    """The names of what has changed are given, wherever it is defined."""
    campaign_of(cell(), tmp_path).write(tmp_path / "notebook")
    assert campaign_of(cell(**again), tmp_path).changes_since(tmp_path / "notebook") == changed


def test_damaged_digests_are_refused_by_name(cell, tmp_path):
    """A file that was tampered with does not count as unchanged."""
    campaign = campaign_of(cell(), tmp_path)
    campaign.write(tmp_path / "notebook")
    (tmp_path / "notebook" / "code.json").write_text('{"train": {}}')
    with pytest.raises(InvalidInput, match=r"code\.json cannot be read"):
        campaign.changes_since(tmp_path / "notebook")


def test_the_campaign_file_has_the_values_of_the_cell(cell, tmp_path):
    """NumPy's values, tuples and paths become plain ones; texts stay texts, and variables are not replaced."""
    import numpy as np

    text = campaign_of(
        cell(),
        tmp_path,
        grid={"lr": np.logspace(-3, -1, 3), "mode": ("1e-3", "${HOME}")},
        arguments={"count": np.int64(3), "place": tmp_path},
        scaling={1: 900.0, 2: 1700.0},
    ).text
    training = yaml.safe_load(text)["trainings"][0]
    assert training["grid"] == {"lr": np.logspace(-3, -1, 3).tolist(), "mode": ["1e-3", "$${HOME}"]}
    assert training["arguments"] == {"count": 3, "place": str(tmp_path)}
    assert training["scaling"] == {1: 900.0, 2: 1700.0}
    assert training["name"] == "train-lr{lr}-mode{mode}"
    assert '"1e-3"' in text


def test_paths_are_those_of_the_notebook(tmp_path):
    """An app in a file is named relative to the notebook, although the campaign file is elsewhere."""
    text = CellCampaign.of([{"app": "apps/net.py:train", "scaling": "curve.csv"}], "sweep", tmp_path).text
    training = yaml.safe_load(text)["trainings"][0]
    assert training == {"app": f"{tmp_path}/apps/net.py:train", "scaling": f"{tmp_path}/curve.csv"}


@pytest.mark.parametrize("curve", ["curve.csv", Path("curve.csv")])
def test_curves_of_kinds_of_nodes_are_files_of_the_notebook_too(tmp_path, curve):
    scaling = {"gpu": curve, "cpu": "~/curve.csv", "old": "learn"}
    text = CellCampaign.of([{"app": "net.py:train", "scaling": scaling}], "sweep", tmp_path).text
    found = yaml.safe_load(text)["trainings"][0]["scaling"]
    assert found == {"gpu": f"{tmp_path}/curve.csv", "cpu": str(Path.home() / "curve.csv"), "old": "learn"}


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ("train", "training job 1: give a dict"),
        ({"grid": {}}, "training job 1 has no 'app'"),
        ({"app": len}, "not a training app: decorate it"),
        ({"app": 3}, "'app' is 3, not a training app$"),
        ({"app": "a.py:train", "arguments": {"net": object()}}, r"training job 1: arguments: <object .* cannot be in"),
        ({"app": "a.py:train", "arguments": {"lr": float("nan")}}, "training job 1: arguments: nan cannot be in"),
        ({"app": "a.py:train", "arguments": {None: 1}}, "the key None is neither"),
    ],
)
def test_what_a_campaign_cannot_have_is_refused(training, message, tmp_path):
    """The message names the training job and the key."""
    with pytest.raises(InvalidInput, match=message):
        CellCampaign.of([training], "sweep", tmp_path)


def test_two_apps_of_one_name_are_refused(cell, tmp_path):
    """Their functions would be one name of the module."""
    first, second = cell(), cell()
    with pytest.raises(InvalidInput, match=r"training job 2: another training app is named train\(\)"):
        CellCampaign.of([{"app": first}, {"app": second}], "sweep", tmp_path)


def test_an_app_that_cannot_travel_is_refused_by_what_it_uses(tmp_path, cell):
    """The message names the global; nothing is written."""
    app = cell()
    sys.modules["__main__"].FACTOR = (number for number in range(3))
    with pytest.raises(InvalidApp, match="global 'FACTOR'"):
        campaign_of(app, tmp_path).write(tmp_path / "notebook")
    assert not (tmp_path / "notebook").exists()
