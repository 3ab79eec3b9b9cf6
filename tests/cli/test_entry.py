"""The entry point: what happens before and around the verbs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from freetrain_parsl.cli.verbs import VERBS
from freetrain_parsl.entry_points import own_entry_points

# Prints a line when imports start, and imports slowly; an extension module that is interrupted during its import may
# raise something other than KeyboardInterrupt.
SLOW_MODULE = """
import sys, time
print("importing", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    raise ImportError("numpy failed to import") from None
"""


@pytest.fixture
def importing(tmp_path):
    """Start the command with a `typer` that imports slowly; yield the process during the import."""
    (tmp_path / "typer.py").write_text(SLOW_MODULE)
    script = "import sys; sys.path.insert(0, sys.argv.pop()); from freetrain_parsl.cli import main; main()"
    processes = []

    def start(**options):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        processes.append(process)
        assert process.stdout.readline() == "importing\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_ctrl_c_during_imports_is_one_line_and_code_130(importing):
    # A test suite in the background of a shell ignores interrupts, and so would its children.
    process = importing(preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "freetrain: interrupted\n")


def test_a_command_that_ignores_interrupts_goes_on_ignoring_them(importing):
    """Shells start background jobs like this."""
    process = importing(preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)  # a wrong reaction would be immediate
    assert process.poll() is None


def test_ctrl_c_in_a_verb_is_code_130_without_a_traceback(monkeypatch, capsys):
    from freetrain_parsl.cli import main, verbs

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(verbs, "app_of", lambda *_: interrupted)
    with pytest.raises(SystemExit) as end:
        main()
    assert (end.value.code, capsys.readouterr().err) == (130, "freetrain: interrupted\n")


def test_the_entry_point_imports_no_verb():
    """Otherwise an interruption could arrive before the handler is installed."""
    script = "import sys, freetrain_parsl.cli; print(*[name for name in sys.modules if 'freetrain' in name])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ)
    assert set(done.stdout.split()) == {"freetrain_parsl", "freetrain_parsl._version", "freetrain_parsl.cli"}


_IMPORTED = """
import sys
from freetrain_parsl.cli import main
try:
    main()
finally:
    print(*sys.modules)
"""


def imported_by(*arguments):
    """Return the modules that a command imports which prints nothing to its standard output."""
    return set(
        subprocess.run([sys.executable, "-c", _IMPORTED, *arguments], stdout=subprocess.PIPE).stdout.decode().split()
    )


def test_a_verb_imports_no_other_and_neither_torch_nor_parsl(tmp_path):
    """Bad input is refused in a fraction of a second."""
    imported = imported_by("stop", str(tmp_path / "missing"))
    places = own_entry_points("freetrain.commands")
    modules = {place.partition(":")[0] for place in places.values()}
    assert modules & imported == {"freetrain_parsl.cli.runs.ending"}
    assert not imported & {"torch", "parsl", "highspy"}


@pytest.mark.parametrize("words", [[], ["--help"], ["statu"]])
def test_without_a_verb_all_are_known(words, monkeypatch, capsys):
    from freetrain_parsl.cli import main

    monkeypatch.setattr(sys, "argv", ["freetrain", *words])
    with pytest.raises(SystemExit):
        main()
    out, err = capsys.readouterr()
    assert all(f" {verb} " in out for verb in VERBS) or "Did you mean 'status'" in err
