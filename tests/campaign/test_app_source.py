"""What a campaign may be refused for without importing its apps: exactly what importing them would refuse, too."""

from __future__ import annotations

import pytest

from freetrain_parsl.campaign.app_source import check_campaign, signature_in_source
from freetrain_parsl.campaign.yaml_file import Variables
from freetrain_parsl.errors import InvalidInput

APP = """
raise RuntimeError("nothing of this file is run")

@training_app(max_nodes=NODES)
def train(session, lr: float, *, momentum=0.5 + 0.4): ...

def plain(session): ...
"""


def check(tmp_path, training, source=APP):
    (tmp_path / "net.py").write_text(source)
    return check_campaign(f"trainings: [{training}]\n", "c.yaml", tmp_path, Variables({}))


def test_names_are_those_of_the_grid(tmp_path):
    """They are known before anything is imported."""
    name, trainings = check(tmp_path, "{app: 'net.py:train', grid: {lr: [0.1, 0.2]}}")
    assert (name, trainings) == ("c", ("net-lr0.1", "net-lr0.2"))


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ("{app: 'nut.py:train'}", r"c\.yaml:1: trainings\[1\]\.app: no such file: .*nut\.py"),
        ("{app: 'net.py:trian'}", r"has no 'trian' \(did you mean 'train'\?\); its training apps: train"),
        ("{app: 'net:trian'}", r"net has no 'trian'"),
        ("{app: 'net.py:plain'}", r"net\.py:plain is not a training app: decorate it"),
        ("{app: 'net.py:train', arguments: {lx: 1}}", r"no argument 'lx'.*; it takes: lr, momentum"),
        (
            "{app: 'net.py:train'}",
            r"missing a required argument: 'lr'; .*: lr, momentum=0\.5 \+ 0\.4",
        ),
        ("{app: 'net.py:train', arguments: {lr: 1}, max_nods: 2}", "unknown key .*max_nods.*did you mean 'max_nodes'"),
        ("{app: 'net.py:train', arguments: {lr: 1}, priority: high}", "priority: must be a number, got 'high'"),
        ("{app: 'net.py:train', arguments: {lr: 1}}, {app: 'net.py:train', arguments: {lr: 2}}", "two trainings are"),
    ],
)
def test_what_is_wrong_is_refused_with_its_line(tmp_path, training, message):
    with pytest.raises(InvalidInput, match=message) as caught:
        check(tmp_path, training)
    assert str(caught.value).startswith("c.yaml:1: ")


def test_a_file_that_is_not_python_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match=r"importing net from .* failed: SyntaxError: .*net\.py, line 2"):
        check(tmp_path, "{app: 'net.py:train'}", "import torch\ndef train(session:\n")


@pytest.mark.parametrize(
    "source",
    [
        "from elsewhere import train",
        "from elsewhere import *",
        "import elsewhere as train",
        "train = make(training_app)",
        "@training_app\ndef train(session): ...\ntrain = train.options(max_nodes=2)",
        "if NEW:\n    @training_app\n    def train(session): ...\nelse:\n    train = None",
        "@other\n@training_app\ndef train(session): ...",
        "globals().update(apps)",
        "def __getattr__(name): ...",
    ],
)
def test_what_only_an_import_can_show_is_not_refused(tmp_path, source):
    """The driver imports it, and refuses it if need be."""
    assert check(tmp_path, "{app: 'net.py:train', arguments: {x: 1}}", source) == ("c", ("net",))
    assert signature_in_source("package.module:train", tmp_path) is None
