"""Campaign files: a whole campaign is validated before anything is submitted."""

from __future__ import annotations

import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from freetrain_parsl.campaign.files.campaign import Campaign
from freetrain_parsl.campaign.files.yaml_file import Variables
from freetrain_parsl.campaign.site.site import shipped_sites
from freetrain_parsl.errors import InvalidInput, UsageError
from freetrain_parsl.protocol.options import StagedPath

HERE = Path(__file__).parents[1]  # of the apps
APP = "slow_app.py:train"


@pytest.fixture(autouse=True)
def search_path(monkeypatch, tmp_path):
    """Isolate the imports of a campaign in its test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[name]


def campaign(text: str, directory: Path = HERE, given: dict[str, str] | None = None) -> Campaign:
    return Campaign.parse(text, "c.yaml", directory, Variables(given or {}, {}))


def test_a_training_has_the_options_and_arguments_of_its_item() -> None:
    read = campaign(f"""
name: one
trainings:
  - app: {APP}
    name: first
    min_nodes: 2
    max_nodes: 4
    priority: 2.5
    deadline: 2026-11-30 08:00
    epochs: 7
    samples: 1400
    seed: 3
    scaling: {{1: 10, 2: 18, 4: 30}}
    checkpoint_interval: 2 min
    rescale_costs: {{up: 4 s}}
    arguments:
      lr: 1e-3
      epochs: ${{N}}
""", given={"n": "7"})  # fmt: skip
    (training,) = read.trainings
    request = training.app.request(training.name)
    assert (read.name, training.name) == ("one", "first")
    assert training.arguments == {"lr": 0.001, "epochs": 7}
    assert (request.min_nodes, request.max_nodes, request.priority) == (2, 4, 2.5)
    assert request.deadline == datetime.fromisoformat("2026-11-30T08:00")
    assert (request.options.epochs, request.samples, request.options.seed) == (7, 1400, 3)
    assert (request.scaling(4), request.options.checkpoint_interval, request.costs.up) == (30, timedelta(minutes=2), 4)
    assert read.import_paths == (HERE,)
    assert read.variables == {"N": "7"}


def test_options_that_are_not_given_stay_those_of_the_app() -> None:
    (training,) = campaign(f"trainings: [{{app: '{APP}'}}]").trainings
    assert training.app.request(training.name).max_nodes == 2
    assert training.name == "slow_app"


def test_a_grid_makes_every_combination_and_repeats_differ_in_their_seed() -> None:
    read = campaign(f"""
trainings:
  - app: {APP}
    grid: {{lr: [0.1, 1e-3], epochs: [2, 3]}}
    repeat: 2
    seed: 10
    arguments: {{fail: false}}
""")
    assert [(item.name, item.arguments["lr"], item.arguments["epochs"]) for item in read.trainings[::2]] == [
        ("slow_app-lr0.1-epochs2-1", 0.1, 2),
        ("slow_app-lr0.1-epochs3-1", 0.1, 3),
        ("slow_app-lr0.001-epochs2-1", 0.001, 2),
        ("slow_app-lr0.001-epochs3-1", 0.001, 3),
    ]
    assert [item.app.request(item.name).options.seed for item in read.trainings[:2]] == [10, 11]
    assert all(item.arguments["fail"] is False for item in read.trainings)


def test_repeats_of_a_plain_name_are_numbered() -> None:
    read = campaign(f"trainings: [{{app: '{APP}', name: baseline, repeat: 3}}]")
    assert [training.name for training in read.trainings] == ["baseline-1", "baseline-2", "baseline-3"]


def test_repeats_begin_with_the_seed_of_the_app(tmp_path: Path) -> None:
    (tmp_path / "seeded.py").write_text(
        "from freetrain_parsl import training_app\n\n@training_app(seed=5)\ndef train(session): ...\n", encoding="utf-8"
    )
    (tmp_path / "c.yaml").write_text("trainings: [{app: 'seeded.py:train', repeat: 2}]", encoding="utf-8")
    read = Campaign.load(tmp_path / "c.yaml")
    assert [item.app.request(item.name).options.seed for item in read.trainings] == [5, 6]


def test_a_name_may_use_the_values_of_its_grid_and_only_has_characters_that_names_may_have() -> None:
    read = campaign(f"trainings: [{{app: '{APP}', name: 'a {{slow}}', grid: {{slow: ['x/y', '.']}}}}]")
    assert [item.name for item in read.trainings] == ["a_x_y", "a_."]


@pytest.mark.parametrize(("text", "limit"), [("", None), ("fuse: auto", None), ("fuse: 4", 4)])
def test_any_training_may_run_fused_with_those_of_the_same_function(text: str, limit: int | None) -> None:
    read = campaign(f"trainings: [{{app: '{APP}', {text}}}, {{app: '{APP}', repeat: 2, name: 'b{{repeat}}'}}]")
    fusions = [training.app.call_request((), training.arguments).fusion for training in read.trainings]
    assert len({fusion.key for fusion in fusions}) == 1
    assert [fusion.limit for fusion in fusions] == [limit, None, None]


@pytest.mark.parametrize(
    ("text", "steps"),
    [("", 0), ("snapshot_every: auto", 0), ("snapshot_every: 4", 4), ("snapshot_every: false", None)],
)
def test_copies_of_a_sharded_state_are_an_option(text: str, steps: int | None) -> None:
    (training,) = campaign(f"trainings: [{{app: '{APP}', {text}}}]").trainings
    assert training.app.request("t").options.snapshot_every == steps


def test_data_beside_the_campaign_file_are_staged_under_the_name_that_the_function_uses() -> None:
    (training,) = campaign(f"trainings: [{{app: '{APP}', stage: [data/train.npz]}}]").trainings
    assert training.app.stage == (StagedPath("data/train.npz", f"{HERE}/data/train.npz"),)


def test_a_training_may_be_kept_from_running_fused() -> None:
    (training,) = campaign(f"trainings: [{{app: '{APP}', fuse: false}}]").trainings
    assert training.app.call_request((), training.arguments).fusion is None


def test_an_app_may_be_in_an_importable_module(tmp_path: Path) -> None:
    package = tmp_path / "models_here"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "net.py").write_text((HERE / "slow_app.py").read_text())
    read = campaign("trainings: [{app: 'models_here.net:train'}]", tmp_path)
    assert read.import_paths == (tmp_path.resolve(),)
    assert read.trainings[0].name == "net"


def test_the_shipped_campaigns_are_right() -> None:
    files = sorted((shipped_sites()["local"].parent / "campaigns").glob("*.yaml"))
    assert files
    for file in files:
        assert Campaign.load(file).trainings


MANY = ", ".join(map(str, range(150)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x", "c.yaml:1: there are no 'trainings'"),
        ("trainings: x", "trainings: should be a list"),
        ("training: []", r"unknown key 'training' \(did you mean 'trainings'\?\)"),
        ("trainings: [{name: x}]", r"c.yaml:1: trainings\[1\].app: is missing; give it like 'app: path.py:function'"),
        ("trainings: [{app: slow_app.py}]", r"an app is named 'module:function' or 'path.py:function'"),
        ("trainings: [{app: 'none.py:train'}]", r"trainings\[1\].app: no such file: .*none.py"),
        ("trainings: [{app: 'no_such_module:train'}]", "importing no_such_module from .* failed: ModuleNotFoundError"),
        (
            "trainings: [{app: 'slow_app.py:tran'}]",
            r"has no 'tran' \(did you mean 'train'\?\); its training apps: train",
        ),
        ("trainings: [{app: 'slow_app.py:not_an_app'}]", "is not a training app: decorate it with @training_app"),
        (
            f"trainings: [{{app: '{APP}', max_node: 3}}]",
            r"unknown key 'trainings\[1\].max_node' \(did you mean 'max_nodes'",
        ),
        (f"trainings: [{{app: '{APP}', max_nodes: four}}]", "max_nodes: must be a whole number"),
        (f"trainings: [{{app: '{APP}', min_nodes: 5, max_nodes: 3}}]", r"max_nodes \(3\) is less than min_nodes \(5\)"),
        (f"trainings: [{{app: '{APP}', priority: 0}}]", "priority must be positive"),
        (f"trainings: [{{app: '{APP}', deadline: 0s}}]", "deadline: must be longer than zero"),
        (f"trainings: [{{app: '{APP}', deadline: 2026-13-01}}]", "deadline: '2026-13-01' is not a time such as"),
        (f"trainings: [{{app: '{APP}', deadline: soon}}]", "deadline: "),
        (f"trainings: [{{app: '{APP}', deadline: 0001-01-01}}]", "is out of range"),
        (
            f"trainings: [{{app: '{APP}', scaling: 3}}]",
            "scaling: must be a mapping of nodes to samples per second, a file, or 'learn'",
        ),
        (f"trainings: [{{app: '{APP}', scaling: none.csv}}]", "none.csv: cannot read the scaling curve"),
        (
            f"trainings: [{{app: '{APP}', scaling: {{2: 1}}}}]",
            "its scaling curve starts at 2; add a point at or below its least size, 1",
        ),
        (f"trainings: [{{app: '{APP}', arguments: {{lrr: 1}}}}]", r"takes no argument 'lrr' \(did you mean 'lr'\?\)"),
        (f"trainings: [{{app: '{APP}', arguments: {{session: 1}}}}]", "is the training session, which FreeTrain"),
        (f"trainings: [{{app: '{APP}', arguments: [1]}}]", "arguments: should be a mapping"),
        (f"trainings: [{{app: '{APP}', grid: {{lr: 1}}}}]", "'lr' should be a list of values"),
        (
            f"trainings: [{{app: '{APP}', grid: {{lr: [1]}}, arguments: {{lr: 2}}}}]",
            "'lr' is already an argument",
        ),
        (f"trainings: [{{app: '{APP}', name: 'x{{width}}', grid: {{lr: [1]}}}}]", r"a name may use \{lr\}, \{repeat\}"),
        (f"trainings: [{{app: '{APP}', name: same, grid: {{lr: [1, 2]}}}}]", "two training jobs are named 'same'"),
        (f"trainings: [{{app: '{APP}', snapshot_every: 0}}]", "must be auto, false or a number of steps of at least 1"),
        (f"trainings: [{{app: '{APP}', snapshot_every: true}}]", "of at least 1, got true"),
        (f"trainings: [{{app: '{APP}', fuse: 1}}]", r"\[1\].fuse: fuse must be auto, false or a whole number"),
        (f"trainings: [{{app: '{APP}', fuse: true}}]", "of at least 2, got true"),
        (f"trainings: [{{app: '{APP}', fuse: all}}]", "of at least 2, got 'all'"),
        (f"trainings: [{{app: '{APP}', fuse: [2]}}]", "of at least 2, got "),
        (f"trainings: [{{app: '{APP}', name: '-x'}}]", "training name '-x' must be 1 to 128 letters"),
        pytest.param(
            f"trainings: [{{app: '{APP}', grid: {{lr: [{MANY}], slow: [{MANY}]}}}}]",
            "more than 10000 training jobs",
            id="22500 training jobs",
        ),
    ],
)
def test_a_mistake_is_one_line_with_file_line_and_key(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        campaign(text)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("c.yaml:")


def test_an_import_that_fails_is_told_in_one_line(tmp_path: Path) -> None:
    """Importing runs user code, which may raise anything, with multi-line messages."""
    (tmp_path / "breaks.py").write_text("raise RuntimeError('first\\nsecond')")
    with pytest.raises(InvalidInput, match=r"importing breaks from .* failed: RuntimeError: first$"):
        campaign("trainings: [{app: 'breaks.py:train'}]", tmp_path)


def test_a_required_argument_that_is_missing_is_told(tmp_path: Path) -> None:
    (tmp_path / "needs.py").write_text(
        "from freetrain_parsl import training_app\n@training_app\ndef train(session, data): ...\n"
    )
    with pytest.raises(InvalidInput, match=r"train\(\): missing a required argument: 'data'"):
        campaign("trainings: [{app: 'needs.py:train'}]", tmp_path)


def test_a_file_whose_name_another_module_has_is_refused(tmp_path: Path) -> None:
    """The nodes would import the other module."""
    for name in ("json", "time"):  # a built-in module has no file
        (tmp_path / f"{name}.py").touch()
        with pytest.raises(InvalidInput, match=rf"another module '{name}' is loaded already .*; rename the file"):
            campaign(f"trainings: [{{app: '{name}.py:train'}}]", tmp_path)


def test_a_tracker_is_the_trainings_the_apps_or_the_campaigns(tmp_path) -> None:
    app = (HERE / "slow_app.py").read_text()
    (tmp_path / "apps.py").write_text(app + "\ntracked = train.options(tracker='csv')\n")
    text = """
tracker: {csv: {directory: shared}}
trainings:
  - {app: 'apps.py:train', name: a}
  - {app: 'apps.py:tracked', name: b}
  - {app: 'apps.py:tracked', name: c, tracker: {csv: {directory: own}}}
"""
    read = campaign(text, tmp_path)
    trackers = [training.app.request(training.name).trackers for training in read.trainings]
    assert [dict(spec.options) for (spec,) in trackers] == [{"directory": "shared"}, {}, {"directory": "own"}]
    assert campaign(f"trainings: [{{app: '{APP}'}}]").trainings[0].app.request("t").trackers is None


def test_the_module_of_a_tracker_may_be_next_to_the_campaign_file(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "apps").mkdir()
    (tmp_path / "apps" / "one_app.py").write_text((HERE / "slow_app.py").read_text())
    (tmp_path / "my_tracker.py").write_text("class Mine:\n    pass\n")
    text = "trainings: [{app: 'apps/one_app.py:train', name: a%s}]%s"
    for own, all_ in ((", tracker: 'my_tracker:Mine'", ""), ("", "\ntracker: 'my_tracker:Mine'")):
        (training,) = campaign(text % (own, all_), tmp_path).trainings
        (spec,) = training.app.request("a").trackers
        assert spec.as_json() == {"kind": "my_tracker:Mine", "options": {}, "import_path": str(tmp_path)}
        sys.modules.pop("my_tracker", None)
        sys.path.remove(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"tracker: tensorbord\ntrainings: [{{app: '{APP}'}}]",
            "c.yaml:1: tracker: there is no tracker 'tensorbord' (did",
        ),
        (f"trainings:\n  - app: {APP}\n    tracker: 7", "c.yaml:3: trainings[1].tracker: tracker is a name, or a"),
    ],
)
def test_a_tracker_that_cannot_work_is_refused_with_its_line(text, message) -> None:
    with pytest.raises(InvalidInput) as refused:
        campaign(text)
    assert str(refused.value).startswith(message)
