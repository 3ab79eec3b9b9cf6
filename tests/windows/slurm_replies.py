"""A runner that replays recorded output of a real Slurm."""

from __future__ import annotations

from pathlib import Path

from freetrain_parsl.errors import BatchSystemError

FIXTURES = Path(__file__).parent / "fixtures"

NOW = 1795262145.0
"""When the output of 22.05.8 was captured."""


class Replies:
    """Replays the commands of one version; `change` replaces replies, by the beginning of the command.

    A reply that is an exception is raised; a command without a reply is an error.
    """

    def __init__(self, version: str = "22.05.8", change: dict[str, str | Exception] | None = None) -> None:
        self.commands: list[str] = []
        self.answers: dict[str, str | Exception] = {
            f"{command} --version": f"slurm-wlm {version}\n" for command in ("squeue", "sbatch", "scancel", "scontrol")
        }
        self.answers["scancel"] = ""
        self.answers["squeue --noheader --user=ada"] = "24\tfreetrain-ab12-1\t\n22\twrap\t\n"
        for command, file in (
            ("squeue --noheader --all", "squeue.txt"),
            ("squeue --json", "squeue.json"),
            ("scontrol --all --details show nodes", "scontrol_show_nodes.txt"),
            ("scontrol --all --json show nodes", "scontrol_show_nodes.json"),
            ("scontrol --all show partition", "scontrol_show_partition.txt"),
            ("scontrol --all show reservation", "scontrol_show_reservation.txt"),
            ("scontrol show config", "scontrol_show_config.txt"),
        ):
            path = FIXTURES / f"slurm-{version}" / file
            if path.exists():
                self.answers[command] = path.read_text(encoding="utf-8")
        self.change = change or {}

    def __call__(self, *arguments: str) -> str:
        command = " ".join(arguments)
        self.commands.append(command)
        for answers in (self.change, self.answers):
            for beginning in sorted(answers, key=len, reverse=True):
                if command.startswith(beginning):
                    answer = answers[beginning]
                    if isinstance(answer, Exception):
                        raise answer
                    return answer
        raise BatchSystemError(f"{arguments[0]} failed: no such command {command!r}")
