"""Differences between a node's Python environment and the driver's: which are refused, and their messages."""

from __future__ import annotations

import sys

import pytest

from freetrain_parsl.executor.environment import compare, describe_environment
from freetrain_parsl.protocol.codec import Envelope, ProtocolError, decode, encode
from freetrain_parsl.protocol.messages import TO_DRIVER, Hello

OURS = {"python": "3.11.7", "freetrain": "0.1.0", "parsl": "2026.7.27", "torch": "2.6.0+cpu", "dill": "0.4.0"}


def test_a_process_describes_the_interpreter_and_every_package_that_matters() -> None:
    found = describe_environment()
    assert found["executable"] == sys.executable
    assert found.keys() == {"python", "executable", "freetrain", "parsl", "torch", "dill"}


def test_an_environment_fits_itself() -> None:
    assert compare("n1", describe_environment(), describe_environment()) == ("", False)


@pytest.mark.parametrize("change", [{"python": "3.11.2"}, {"torch": "2.6.0+cu126"}, {"executable": "/other/python"}])
def test_what_does_not_matter_is_no_difference(change) -> None:
    """Bytecode is compatible within a minor version, and nodes have another build of torch than login nodes."""
    assert compare("n1", {**OURS, **change}, OURS) == ("", False)


def test_what_a_node_does_not_tell_is_not_compared() -> None:
    assert compare("n1", {}, OURS) == ("", False)


@pytest.mark.parametrize(
    "change", [{"python": "3.12.1"}, {"python": "2.11.7"}, {"freetrain": "0.2"}, {"parsl": "2027"}]
)
def test_what_keeps_functions_and_messages_from_being_read_is_refused(change) -> None:
    assert compare("n1", {**OURS, **change}, OURS)[1]


@pytest.mark.parametrize("change", [{"torch": "2.7.0"}, {"dill": "0.3.9"}])
def test_other_differences_are_warnings(change) -> None:
    assert not compare("n1", {**OURS, **change}, OURS)[1]


def test_the_message_is_one_line_with_the_node_all_differences_and_the_remedy() -> None:
    text, _ = compare("nid0012", {**OURS, "python": "3.12.1", "dill": "0.3", "executable": "/sw/bin/python"}, OURS)
    assert text == (
        "node nid0012 cannot run training jobs of this driver: it has python 3.12.1 (driver: 3.11.7), dill 0.3 "
        "(driver: "
        "0.4.0) in /sw/bin/python; set `node.python` (in Python: `node_python=`) to an interpreter with the driver's "
        "versions"
    )


@pytest.mark.parametrize(
    ("versions", "valid"),
    [
        (describe_environment(), True),
        ({}, True),
        ([], False),
        ({"python": 3}, False),
        ({"python": "3\n"}, False),
        (dict.fromkeys(map(str, range(99)), ""), False),
    ],
)
def test_what_a_slot_tells_of_its_environment_is_checked(versions, valid) -> None:
    frames = encode(Envelope(Hello("t", "n", "0", 1, versions)))
    if valid:
        assert decode(frames, TO_DRIVER).message.versions == versions
    else:
        with pytest.raises(ProtocolError, match="its 'versions' is"):
            decode(frames, TO_DRIVER)
