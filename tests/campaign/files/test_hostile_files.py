"""Any file is read or rejected with a one-line error, in bounded time and memory; no code in it is run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from freetrain_parsl.campaign.files.campaign import Campaign
from freetrain_parsl.campaign.files.yaml_file import Section, Variables
from freetrain_parsl.campaign.site.site import Site, shipped_sites
from freetrain_parsl.errors import FreeTrainError, InvalidInput, UsageError
from freetrain_parsl.extensions.replay.trainer_files import read_trainers
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.strict_yaml import LARGEST, read_text
from freetrain_parsl.sweep import NameTemplate

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parents[1]  # of the apps
HEAD = "trainings:\n  - app: slow_app.py:train\n"
DIGITS = "9" * 5000
BOMB = "    arguments:\n      a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"      {name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def refusal_of(call: Callable[[], object]) -> str | None:
    """Return the one-line error message; ``None`` if the file is valid."""
    try:
        call()
    except FreeTrainError as error:
        message = str(error)
    else:
        return None
    assert "\n" not in message
    return message


def campaign(text: str) -> Campaign:
    return Campaign.parse(text, "f.yaml", HERE, Variables({}, {"A": "1"}))


def site(text: str) -> Site:
    return Site.parse(text, "f.yaml", Variables({}, {"A": "1"}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"    max_nodes: {DIGITS}", "max_nodes: must be a whole number of at least 1, got '999.*…'$"),
        ("    max_nodes: 99999999999", "max_nodes must be at most 1,000,000"),
        ("    seed: ٣", "seed: must be a whole number"),
        ("    seed: 18446744073709551616", "seed: must be at most"),
        ("    priority: nan", "priority: must be a number"),
        ("    priority: 1e400", "priority: must be a number"),
        ("    checkpoint_interval: 0 s", "checkpoint_interval: must be longer than zero"),
        ("    checkpoint_interval: 99999999999999999999 d", "a duration must be written like"),
        ("    checkpoint_interval: 9999 d", "a duration may be up to 3650 days"),
        (f"    arguments: {{lr: {DIGITS}}}", "999 is too large for a number; quotes make a text of it"),
        ("    arguments: {lr: 1e400}", "1e400 is too large for a number"),
        ("    arguments: {lr: !!timestamp 2020-99-99}", "f.yaml:3: not YAML: the tag .*timestamp.* is not supported"),
        ("    arguments: {lr: !!python/object/apply:os.system [id]}", "the tag .* is not supported"),
        ("    name: '{lr[0]}'\n    grid: {lr: [1, 2]}", r"cannot be filled; a name may use \{lr\}, \{repeat\}"),
        ("    name: 'x{lr:>900000000}'\n    grid: {lr: [1, 2]}", "cannot be filled"),
        ("    name: 'x{lr:3}'\n    grid: {lr: [[1], [2]]}", r"'\[1\]' cannot be formatted with '3'"),
        ('    name: "a\\0b"', r"name: contains the control character '\\x00'"),
        ('    name: "a\\ud800b"', "contains the control character"),
        ('    name: "\\UFFFFFFFF"', "an escape or a number is out of range"),
        ('    "a\\nb": 1', "a key must be a word"),
        ("    grid: {1: [1, 2]}", "argument '1' is not a valid Python parameter name"),
        ("    arguments: {lr: {a: 1, a: 2}}", "the key 'a' is duplicated"),
        (f"    scaling: {'a' * 5000}.csv", "cannot read the scaling curve: File name too long"),
        ("    scaling: ~no-such-user/x.csv", "there is no user 'no-such-user'"),
        ("    repeat: 100000", "more than 10000 training jobs"),
        (f"    arguments: {{lr: {'[' * 200}{']' * 200}}}", "f.yaml:3: not YAML: it is nested more than 20 levels deep"),
        ("    arguments: &x {lr: *x}", "f.yaml:3: not YAML: the anchor 'x' is not there, or contains itself"),
        (BOMB, "its aliases expand to more than 100,000 values"),
    ],
)  # fmt: skip
def test_a_hostile_campaign_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        campaign(HEAD + text)
    assert re.match(r"f\.yaml:\d+: ", str(refused.value))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "app",
    ['"a\\0b.py:x"', "~nouser/x.py:x", f"{'a' * 300}.py:x", "a/../a:x"],
    ids=["control character", "user", "long", "directory"],
)
def test_an_app_that_cannot_be_a_path_is_refused(app: str) -> None:
    with pytest.raises(InvalidInput, match=r"^f\.yaml:2: trainings\[1\]\.app: "):
        campaign(f"trainings:\n  - app: {app}\n")


def test_a_module_that_exits_when_it_is_imported_is_refused(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text("raise SystemExit('usage: leaves.py FILE')")
    with pytest.raises(InvalidInput, match=r"importing leaves from .* failed: SystemExit: usage: leaves.py FILE"):
        Campaign.parse("trainings: [{app: 'leaves.py:train'}]", "f.yaml", tmp_path, Variables({}, {}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"trainings: {{max_restarts: {DIGITS}}}", "must be a whole number"),
        ("checkpoints: {directory: ~no-such-user/x}", "there is no user 'no-such-user' with a home directory"),
        ('checkpoints: {directory: "a\\0b"}', "contains the control character"),
        ("checkpoints: {interval: 0 s}", "must be longer than zero"),
        ("checkpoints: {least_free: 99999999 TB}", "an amount of memory"),
        ("block: {nodes: 99999999999}", "must be at most 10,000"),
        ("node: {slots: 1000000000}", "must be at most 1,024"),
        ("network: {driver_address: 'a;b'}", "must be an address or a name of letters"),
        ("network: {node_interface: '$(id)'}", "must be an address or a name of letters"),
    ],
)
def test_a_hostile_site_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        site(f"system: local\n{text}\n")
    assert str(refused.value).startswith("f.yaml:2: ")


def test_names_of_accelerators_hold_nothing_special_to_a_shell() -> None:
    """They become part of the command that starts the workers."""
    with pytest.raises(InvalidInput, match="must be a number, or a list of names"):
        site("system: slurm\nnode: {accelerators: ['a;b']}")
    assert site("system: slurm\nnode: {accelerators: ['0.0', 'GPU-ab:1']}").node.accelerators == ("0.0", "GPU-ab:1")


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{a: " * 50_000, "- " * 50_000, "a: &a [*a]", "? " * 1000, "%YAML " + DIGITS]
)
def test_no_nesting_exhausts_the_stack(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"^f\.yaml:\d+: not YAML: "):
        site(text)


def test_a_file_that_does_not_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="/dev/zero: cannot read the campaign file: it has more than 1,000,000 char"):
        read_text(Path("/dev/zero"), "campaign file")
    (tmp_path / "large.csv").write_bytes(b"9" * (LARGEST + 1))
    with pytest.raises(InvalidInput, match="cannot read the scaling curve: it has more than"):
        ScalingCurve.from_file(tmp_path / "large.csv")


@pytest.mark.parametrize(
    "text", ["1: !!timestamp x", "1: 2026-13-45T99:99:99", "\0", f"1: {DIGITS}", "[" * 5000, "&a {1: *a}"]
)
def test_a_hostile_curve_or_list_of_trainers_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(UsageError, match=r"f\.yaml:1: ") as refused:
        ScalingCurve.from_file(tmp_path / "f.yaml")
    assert "\n" not in str(refused.value)
    (tmp_path / "f.yaml").write_text(f"- name: a\n  max: 2\n  curve: {{{text}}}" if text[0] == "1" else text)
    with pytest.raises(UsageError, match=r"f\.yaml:[123]: "):
        read_trainers(tmp_path / "f.yaml", {})


TOKENS = ["9" * 400, "-1", "nan", "1e999", "~", "[", "]", "{", "}", ": ", "&a ", "*a", "!!int ", "!x ", "'", '"', "\n",
          "\n  ", "\t", "${A}", "${", "$${", "|", "> ", "---\n", "#", "\0", "\x85", "\ud7ff", "é", "- ", "? ", " d",
          "{lr[0]}", "{lr:>99}", "%", "<<: ", "\\ud800", "\\UFFFFFFFF", "1e300 d"]  # fmt: skip
FULL = (
    HEAD
    + """    name: 'r-{lr:.2f}-{repeat}'
    max_nodes: 4
    repeat: 2
    scaling: {1: 1500, 2: 2700}
    checkpoint_interval: 10 s
    rescale_costs: {up: 1 s, down: 00:00:02}
    arguments: {epochs: 3, slow: '${A}'}
    grid: {lr: [0.1, 2e-3]}
"""
)
SOURCES = [(campaign, FULL), *((site, file.read_text()) for file in shipped_sites().values())]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_mutated_file_is_read_or_refused_in_one_line(data: st.DataObject) -> None:
    read, text = data.draw(st.sampled_from(SOURCES))
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.integers(0, len(text)))
        end = min(len(text), begin + data.draw(st.integers(0, 8)))
        text = text[:begin] + data.draw(st.sampled_from(TOKENS)) + text[end:]
    refusal = refusal_of(lambda: read(text))
    assert refusal is None or re.match(r"f\.yaml:\d+: .+$", refusal)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60))
@example("{lr[0]}")
@example("{lr.__class__.__mro__}")
@example("{:>9999999999}")
def test_a_name_template_is_refused_or_makes_a_name(text: str) -> None:
    names: list[str] = []
    refusal = refusal_of(lambda: names.append(NameTemplate(text, ("lr",)).fill({"lr": 0.1})))
    assert (refusal is None) == bool(names)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{0,128}", name) for name in names)


@pytest.mark.parametrize(
    ("template", "name"), [("a{lr:.0e}", "a1e-03"), ("{{x}}{lr:>8}", "_x_0.001"), ("{lr}", "0.001")]
)
def test_a_name_may_use_plain_formats(template: str, name: str) -> None:
    assert NameTemplate(template, ("lr",)).fill({"lr": 0.001}) == name


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text("ab: '\n"),
        st.lists,
    )
)
def test_free_values_are_read_as_json_writes_them(value: object) -> None:
    """Every JSON value that is not nested too deeply is YAML for the same value."""
    text = json.dumps({"a": value})
    read: list[object] = []
    refusal = refusal_of(lambda: read.append(Section.parse(text, "f.yaml", Variables({}, {})).value("a")))
    assert read == [value] if refusal is None else re.search("levels deep|digits", refusal)
