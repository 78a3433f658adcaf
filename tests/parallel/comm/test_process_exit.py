"""A process whose objects must not be destroyed ends, in a limited time, and with the code that it wanted."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

HANGS = """
import sys, time
from elastune.parallel.comm import process_exit
process_exit.EXIT_LIMIT_S = 0.5
class Endless:
    def __del__(self):
        print("destroyed", flush=True)
        time.sleep(60)
endless = Endless()
if sys.argv[1] == "kept":
    process_exit.keep_for_ever(endless, "a test")
elif sys.argv[1] == "other kept":
    process_exit.keep_for_ever([], "a test")
else:
    del Endless.__del__
sys.exit(5)
"""


def end_of(how: str) -> tuple[subprocess.CompletedProcess[str], float]:
    begun = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", HANGS, how], capture_output=True, text=True, timeout=50)
    return ended, time.monotonic() - begun


def test_what_is_kept_is_not_destroyed_and_the_exit_code_stays() -> None:
    ended, _ = end_of("kept")
    assert (ended.returncode, ended.stdout, ended.stderr) == (5, "", "")


def test_an_end_that_hangs_is_limited_and_reported_in_one_line() -> None:
    """The hang is in the end of the interpreter, where no thread of Python runs any more."""
    ended, seconds = end_of("other kept")
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "destroyed\n")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("elastune: process ")
    assert line.endswith("did not end within 0.5 s after a test, so it was killed")
    assert seconds < 20


def test_a_process_that_keeps_nothing_ends_as_any_other() -> None:
    ended, _ = end_of("nothing")
    assert (ended.returncode, ended.stderr) == (5, "")


def test_functions_of_atexit_run_where_the_main_thread_is_lost() -> None:
    lost = """
import atexit, threading, time
from elastune.parallel.comm.process_exit import end_without_main_thread
atexit.register(print, "tracker ends", flush=True)
threading.Thread(target=end_without_main_thread, args=(7,)).start()
time.sleep(60)
"""
    ended = subprocess.run([sys.executable, "-c", lost], capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "tracker ends\n", "")
