"""Recorded output of a real OpenPBS, and a runner that replays it."""

from __future__ import annotations

import json
from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures" / "openpbs-23.06.06"

NOW = 1795228055.0
HEAD_START = 1795228645.0
"""When the top job was planned to start on all nodes: 02:37:25 UTC."""

COMMANDS = {
    ("qstat", "-f"): "jobs.json",
    ("qstat", "-x"): "history.json",
    ("qstat", "-Qf"): "queues.json",
    ("qstat", "-Bf"): "server.json",
    ("pbsnodes", "-av"): "nodes.json",
    ("pbs_rstat", "-f"): "reservations.txt",
    ("qmgr", "-c"): "scheduler.txt",
}


def text(name):
    return (FIXTURES / name).read_text(encoding="utf-8")


def content(name):
    return json.loads(text(name))


def with_hole():
    """Remove job 2004: node pbs1[6] is idle until the top job starts."""
    jobs, nodes = content("jobs.json"), content("nodes.json")
    del jobs["Jobs"]["2004.pbs1"]
    free = nodes["nodes"]["pbs1[6]"]
    free["state"] = "free"
    del free["jobs"]
    free["resources_assigned"] = {}
    return {"jobs.json": jobs, "nodes.json": nodes}


class Answers:
    """Returns the fixtures or `changed` (file name -> content or error) instead of running commands; records them."""

    def __init__(self, changed=None):
        self.changed = dict(changed or {})
        self.asked = []

    def __call__(self, *arguments):
        self.asked.append(arguments)
        name = COMMANDS.get(arguments[:2], arguments[0])
        found = self.changed.get(name)
        if isinstance(found, Exception):
            raise found
        if callable(found):
            return found(*arguments)
        if found is None:
            return text(name) if name in COMMANDS.values() else ""
        return found if isinstance(found, str) else json.dumps(found)

    def names(self):
        return [" ".join(arguments[:2]) for arguments in self.asked]
