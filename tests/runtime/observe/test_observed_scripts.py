"""Real scripts under torchrun, right ones and ones with one planted mistake: kind, file and line are named."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastune.core.errors import UserError
from elastune.runtime.observe.command import check_command
from elastune.train.program.command import parse_command

SCRIPTS = Path(__file__).parents[2] / "programs" / "observed"
TORCHRUN = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node {{workers}}"
SHORT_S = 30.0  # until a run that hangs, as after a branch of one rank, is ended
FAULTS = {
    "ddp.py": "overlap, missing, set_epoch, rate, loss, averaged twice, not reduced, sum, BatchNorm, buffers, seeds, "
    "weights, evaluation, branch",
    "by_accelerate.py": "overlap, missing, rate, loss, averaged twice, not reduced, sum, BatchNorm, buffers, seeds, "
    "evaluation, branch",
}
RIGHT = {
    "ddp.py": f"{TORCHRUN} {SCRIPTS}/ddp.py --batch-size {{batch_per_worker}}",
    "ddp.py with dropout": f"{TORCHRUN} {SCRIPTS}/ddp.py --batch-size {{batch_per_worker}} --fault 'none with dropout'",
    "fsdp2.py": f"{TORCHRUN} {SCRIPTS}/fsdp2.py {{batch_per_worker}}",
    "by_accelerate.py": f"{TORCHRUN} {SCRIPTS}/by_accelerate.py --batch-size {{batch_per_worker}}",
    "by_trainer.py": f"{TORCHRUN} {SCRIPTS}/by_trainer.py {{batch_per_worker}}",
    "by_lightning.py": f"{sys.executable} {SCRIPTS}/by_lightning.py {{workers}} {{batch_per_worker}}",
}
IN_CI = {("ddp.py", "averaged twice")}


def soaked(script: str, fault: str) -> object:
    return pytest.param(
        script, fault, marks=[] if (script, fault) in IN_CI else [pytest.mark.soak], id=f"{script}-{fault}"
    )


@pytest.mark.parametrize(
    ("script", "fault"), [soaked(script, fault) for script, faults in FAULTS.items() for fault in faults.split(", ")]
)
def test_a_planted_fault_is_named_with_file_and_line(script: str, fault: str) -> None:
    command = parse_command(f"{TORCHRUN} {SCRIPTS}/{script} --batch-size {{batch_per_worker}} --fault {{fault}}")
    checked = check_command(command, {"batch_size": 64, "fault": fault}, time_s=SHORT_S)
    assert [each.kind for each in checked.differences] == [fault]
    file, _, line = checked.differences[0].line.rpartition(":")
    assert Path(file).name == script
    text = (SCRIPTS / script).read_text().splitlines()[int(line) - 1]
    assert fault in text.partition("  # ")[2]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[] if name == "fsdp2.py" else [pytest.mark.soak], id=name)
        for name, command in RIGHT.items()
    ],
)
def test_a_right_script_raises_no_alarm(command: str) -> None:
    checked = check_command(parse_command(command), {"batch_size": 64})
    assert not checked.differences
    assert checked.steps == 8
    assert checked.workers == 2


@pytest.mark.soak
def test_a_batch_that_grows_with_the_processes_is_named() -> None:
    checked = check_command(parse_command(f"{TORCHRUN} {SCRIPTS}/ddp.py --batch-size 32"), {})
    assert checked.differences[0].kind == "batch"
    assert "32 rows on 1 process and 64 on 2" in checked.differences[0].finding


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("python train.py", "must say how many processes"),
        (f"{sys.executable} -c 'print(1)' {{workers}}", "must take an optimizer step"),
        (f"{sys.executable} -c 'raise ValueError(5)' {{workers}}", "ended with 1: ValueError: 5"),
        (f"{sys.executable} -c 'import time; time.sleep(60)' {{workers}}", "none within"),
    ],
)
def test_a_command_that_shows_nothing_is_refused(command: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        check_command(parse_command(command), {}, time_s=3.0)


def test_a_killed_check_leaves_no_command_behind(tmp_path: Path) -> None:
    script, written = tmp_path / "sleeps.py", tmp_path / "pid"
    script.write_text(
        f"import os, pathlib, time\nfile = pathlib.Path({str(written)!r})\n"
        "file.with_suffix('.part').write_text(str(os.getpid()))\nfile.with_suffix('.part').rename(file)\n"
        "time.sleep(300)\n"
    )
    words = [sys.executable, "-m", "elastune", "check", "--command", f"{sys.executable} {script} {{workers}}"]
    check = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        appears(written)
    finally:
        check.send_signal(signal.SIGKILL)
        check.wait()
    command, end = int(written.read_text()), time.monotonic() + 60
    while is_alive(command):
        assert time.monotonic() < end, "the command outlives the check"
        time.sleep(0.02)


def appears(file: Path) -> None:
    end = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < end, f"no {file}"
        time.sleep(0.02)


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
