"""Inspection of processes through /proc."""

from __future__ import annotations

import os
import subprocess
import sys

from freetrain_parsl.cluster import processes
from tests.support.daemons import wait_until


def test_this_process_runs_and_an_earlier_one_of_its_id_does_not():
    own = processes.process_info(os.getpid())
    assert (own.parent, own.session, own.alive) == (os.getppid(), os.getsid(0), True)
    assert processes.is_running(own.pid, own.started)
    assert not processes.is_running(own.pid, own.started - 1)


def test_a_name_with_spaces_and_brackets_does_not_confuse_the_reader(tmp_path):
    odd = tmp_path / "a) R 1 (b"
    odd.symlink_to("/bin/sleep")
    with processes.spawn([str(odd), "60"], env={}) as child:
        info = processes.process_info(child.pid)
        assert (info.parent, info.session) == (os.getpid(), child.pid)
        child.kill()


def test_a_zombie_is_not_alive():
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not processes.process_info(child.pid).alive
    child.wait()
    assert processes.process_info(child.pid) is None


def test_a_process_is_found_by_its_session_or_by_its_mark():
    mark = {processes.MARK: "test/1/n00"}
    with processes.spawn(["sleep", "60"], env=mark) as child:
        # The kernel shows no environment for a moment while it replaces the program.
        wait_until(lambda: processes.marked("test/1/") == [child.pid], 30, lambda: "the mark")
        by_session = processes.members({child.pid: "test/1/n00"})
        by_mark = processes.members({2**22 + 1: "test/1/n00"})
        assert [info.pid for info in by_session["test/1/n00"]] == [child.pid]
        assert [info.pid for info in by_mark["test/1/n00"]] == [child.pid]
        assert child.pid in processes.descendants()
        processes.terminate(by_mark["test/1/n00"])
        assert child.wait() == -15
    assert processes.members({child.pid: "test/1/n00"}) == {}
