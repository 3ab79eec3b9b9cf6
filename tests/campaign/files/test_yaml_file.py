"""YAML is read as written: no key is ignored, no scalar changes its meaning, every error names its line."""

from __future__ import annotations

import pytest

from freetrain_parsl.campaign.files.yaml_file import Section, Variables
from freetrain_parsl.errors import InvalidInput


def section(text: str, given: dict[str, str] | None = None, environment: dict[str, str] | None = None) -> Section:
    return Section.parse(text, "f.yaml", Variables(given, environment or {}))


def test_free_values_follow_yaml_1_2() -> None:
    """Texts that YAML 1.1 reads as false, 600 or a date stay texts; a number that it reads as a text is a number."""
    text = "a: [1e-3, 1.5, 7, no, on, 00:10:00, 2026-01-02, ~, true, '3', .inf, 0x10]"
    assert section(text).value("a") == [
        0.001, 1.5, 7, "no", "on", "00:10:00", "2026-01-02", None, True, "3", float("inf"), "0x10",
    ]  # fmt: skip


def test_getters_read_scalars_as_they_are_written() -> None:
    read = section("account: 007\nqos: no\nempty:\n")
    assert (read.text("account"), read.text("qos"), read.text("empty"), read.text("absent")) == (
        "007",
        "no",
        None,
        None,
    )


def test_variables_come_from_the_command_line_then_the_environment_then_their_default() -> None:
    text = "a: ${ACCOUNT}/${QOS:-regular}/${HOME}\nb: $${SHELL} $USER ${X:+y}\nc: ${N}"
    read = section(text, {"account": "given", "n": "3"}, {"ACCOUNT": "env", "HOME": "/h"})
    assert read.text("a") == "given/regular//h"
    assert read.text("b") == "${SHELL} $USER ${X:+y}", "shell syntax is unchanged"
    assert read.value("c") == 3, "the value of a variable may be a number"


def test_a_variable_without_a_value_is_refused_with_the_ways_to_give_it() -> None:
    read = section("block:\n  account: ${ACCOUNT}\n")
    with pytest.raises(InvalidInput) as refused:
        read.section("block").text("account")
    assert str(refused.value) == (
        "f.yaml:2: block.account needs a value for ${ACCOUNT}; give it with --set account=…, or export ACCOUNT=…"
    )


def test_a_setting_that_no_file_asks_for_is_refused() -> None:
    variables = Variables.parse(["acount=x"])
    Section.parse("a: ${ACCOUNT:-}", "f.yaml", variables).text("a")
    with pytest.raises(InvalidInput, match=r"--set acount=….*\(did you mean 'account'\?\)"):
        variables.refuse_unused()
    with pytest.raises(InvalidInput, match="write --set name=value"):
        Variables.parse(["account"])


def test_an_unknown_key_is_refused_with_its_line_and_the_nearest_known_one() -> None:
    read = section("planner:\n  startup: 5 s\n  min_usefull: 3 s\n").section("planner")
    read.duration("startup"), read.duration("min_useful")
    with pytest.raises(InvalidInput, match=r"f.yaml:3: unknown key 'planner.min_usefull' \(did you mean 'min_useful'"):
        read.done()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", r"f.yaml:1: not YAML: expected ',' or '\]'"),
        ("a: 1\n\tb: 2", r"f.yaml:2: not YAML: "),
        ("a: 1\nb: \x00", "f.yaml:2: not YAML: the character #x00 is not allowed"),
        ("- a\n- b", "f.yaml:1: must be a list of 'key: value'"),
        ("", "f.yaml:1: must be a list of 'key: value'"),
        ("a: 1\na: 2", "f.yaml:2: a is duplicated"),
        ("? [a]\n: 1", "f.yaml:1: a key must be a word"),
        ("a: 1\n---\nb: 1", "f.yaml:2: not YAML: "),
    ],
)
def test_what_is_no_mapping_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        section(text)


@pytest.mark.parametrize(
    ("text", "read", "message"),
    [
        ("a: x", lambda s: s.count("a"), "f.yaml:1: a: must be a whole number of at least 1, got 'x'"),
        ("a: 0", lambda s: s.count("a"), "must be a whole number of at least 1, got '0'"),
        ("a: 1.5", lambda s: s.count("a"), "must be a whole number"),
        ("a: x", lambda s: s.number("a"), "must be a number, got 'x'"),
        ("a: maybe", lambda s: s.flag("a"), "must be true or false, got 'maybe'"),
        ("a: slrum", lambda s: s.choice("a", ["slurm", "pbs"]), r"must be slurm or pbs, got 'slrum' \(did you mean"),
        ("a: 5", lambda s: s.duration("a"), "f.yaml:1: a: a duration must be written like"),
        ("a: 5", lambda s: s.memory("a"), "f.yaml:1: a: an amount of memory must be written like"),
        ("a: [x]", lambda s: s.text("a"), "a: should be a text, not a list or a mapping"),
        ("a: x", lambda s: s.section("a"), "a: should be a mapping"),
        ("a: x", lambda s: s.sections("a"), "a: should be a list"),
        ("a: [x]", lambda s: s.sections("a"), "a: should be a list"),
        ("b: x", lambda s: s.required("a", "y"), "a: is missing; give it like 'a: y'"),
        ("a: &x [*x]", lambda s: s.value("a"), "f.yaml:1: not YAML: the anchor 'x' is not there, or contains itself"),
        ("a: {[1]: 2}", lambda s: s.value("a"), "keys must be words or numbers"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(text, read, message) -> None:
    with pytest.raises(InvalidInput, match=message):
        read(section(text))
