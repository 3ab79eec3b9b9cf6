"""What a campaign may be refused for without importing its apps: exactly what importing them would refuse, too."""

from __future__ import annotations

import pytest

from freetrain_parsl.campaign.files.app_source import check_campaign, signature_in_source
from freetrain_parsl.campaign.files.yaml_file import Variables
from freetrain_parsl.errors import InvalidInput

IMPORT = "from freetrain_parsl import training_app\n"
APP = """
from freetrain_parsl import training_app

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
        (
            "{app: 'net.py:train', arguments: {lr: 1}}, {app: 'net.py:train', arguments: {lr: 2}}",
            "two training jobs are",
        ),
    ],
)
def test_what_is_wrong_is_refused_with_its_line(tmp_path, training, message):
    with pytest.raises(InvalidInput, match=message) as caught:
        check(tmp_path, training)
    assert str(caught.value).startswith("c.yaml:1: ")


@pytest.mark.parametrize("imported", ["from freetrain_parsl import training_app", "import freetrain_parsl as ft"])
def test_a_decorator_of_this_package_is_known(tmp_path, imported):
    decorator = "ft.training_app" if imported.endswith("ft") else "training_app(max_nodes=2)"
    with pytest.raises(InvalidInput, match="no argument 'x'"):
        check(
            tmp_path,
            "{app: 'net.py:train', arguments: {x: 1}}",
            f"{imported}\n@{decorator}\ndef train(session): ...",
        )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class train: ...", "is not a training app"),
        ("async def train(session): ...", "is not a training app"),
        (f"{IMPORT}@training_app\ndef train(): ...", "failed: InvalidApp: .* has no parameter for the session"),
        (f"{IMPORT}@training_app\ndef train(session=None): ...", "has no parameter for the session"),
        (f"{IMPORT}@training_app\ndef train(session, lr, lr): ...", "SyntaxError: duplicate argument 'lr'"),
        ("@training_app\ndef train(session): ...\nreturn 1", "SyntaxError: 'return' outside function"),
    ],
)
def test_what_no_import_can_accept_is_refused(tmp_path, source, message):
    with pytest.raises(InvalidInput, match=message):
        check(tmp_path, "{app: 'net.py:train'}", source)


@pytest.mark.parametrize("name", ["net.txt", "net.two.py", ".py"])
def test_a_file_that_cannot_be_imported_is_refused(tmp_path, name):
    (tmp_path / name).write_text(APP)
    with pytest.raises(InvalidInput, match="an app is in a file that can be imported"):
        check_campaign(f"trainings: [{{app: './{name}:train'}}]\n", "c.yaml", tmp_path, Variables({}))


def test_two_files_of_one_name_are_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "net.py").write_text(APP)
    text = "trainings: [{app: 'a/net.py:train', name: a, arguments: {lr: 1}}, {app: 'b/net.py:train', name: b}]\n"
    with pytest.raises(InvalidInput, match=r"trainings\[2\]\.app: net\.py: another module 'net' is loaded already"):
        check_campaign(text, "c.yaml", tmp_path, Variables({}))


def test_options_that_no_app_accepts_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match="training name '_a' must be 1 to 128 letters"):
        check(tmp_path, "{app: 'net.py:train', name: _a, arguments: {lr: 1}}")
    with pytest.raises(InvalidInput, match="min_nodes"):
        check(tmp_path, "{app: 'net.py:train', arguments: {lr: 1}, min_nodes: 3, max_nodes: 2}")
    check(tmp_path, "{app: 'net.py:train', arguments: {lr: 1}, min_nodes: 3}")  # the app may have more at most


def test_a_package_is_found_before_a_file(tmp_path):
    """As in an import; a directory without ``__init__.py`` is found after packages elsewhere."""
    for path, source in (("net.py", APP), ("net/__init__.py", ""), ("bare/inner.py", "")):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(source)
    with pytest.raises(InvalidInput, match="net has no 'train'"):
        signature_in_source("net:train", tmp_path)
    assert signature_in_source("bare.inner:train", tmp_path) is None


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
        "match apps:\n    case {**train}: pass",
        "import train.sub",
        "eval('exec(text)')",
        "from elsewhere import training_app\n@training_app\ndef train(session): ...",
        "import elsewhere\n@elsewhere.training_app\ndef train(session): ...",
        "def training_app(function): ...\n@training_app\ndef train(session): ...",
        f"@training_app\ndef train(session): ...\nx = {'-' * 20_000}1",  # too deep for the parser of any Python,
    ],
)
def test_what_only_an_import_can_show_is_not_refused(tmp_path, source):
    """The driver imports it, and refuses it if need be."""
    assert check(tmp_path, "{app: 'net.py:train', arguments: {x: 1}}", source) == ("c", ("net",))
    assert signature_in_source("package.module:train", tmp_path) is None
