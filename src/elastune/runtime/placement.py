"""The rank and the device of a worker: from torchrun, srun or mpirun, and from this machine's accelerators.

Nothing here initialises CUDA in the calling process: after that, the process could not fork workers that use CUDA.
Reading the environment is pure and leaves the device at "cpu"; ``assign`` chooses the device.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from elastune.core.errors import UserError
from elastune.core.run import Place

PROBE_LIMIT_S = 60.0
_PROBE = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
# Files of drivers: NVIDIA, NVIDIA under WSL, AMD. Without any of them no probe is needed, which imports torch.
_DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/dxg", "/dev/kfd")


@cache
def devices() -> tuple[str, ...]:
    """The devices that workers can use: ``("cuda:0", ...)`` as torch numbers them, or ``("cpu",)`` without any.

    If a driver is present, another process asks torch, so that its build and CUDA_VISIBLE_DEVICES count.
    """
    if not (any(Path(name).exists() for name in _DRIVER_FILES) or shutil.which("nvidia-smi")):
        return ("cpu",)
    try:
        probe = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_LIMIT_S)
    except subprocess.TimeoutExpired:
        return ("cpu",)
    answer = probe.stdout.strip().rpartition("\n")[2]
    count = int(answer) if probe.returncode == 0 and answer.isdigit() else 0
    return tuple(f"cuda:{index}" for index in range(count)) or ("cpu",)


def least_used_first(names: Sequence[str], of_run: Sequence[str], of_others: Sequence[str]) -> list[str]:
    """Sort devices in the order in which a run's next workers get them.

    Devices of the run's own workers come last, however busy the others are: NCCL allows one worker of a run on a GPU.

    Args:
        names: The devices.
        of_run: The device of each worker of the run.
        of_others: The device of each other worker.
    """
    return sorted(names, key=lambda name: (of_run.count(name), of_others.count(name)))


def assign(device: str, local_rank: int, available: Sequence[str]) -> str:
    """Return the device of worker ``local_rank``. Workers get the CUDA devices in turn.

    Args:
        device: "cpu", "cuda" (any CUDA device), "cuda:N" (this one), or "auto" (any CUDA device, or else the CPU).
        local_rank: The worker's number on this host.
        available: The devices of this host.

    Raises:
        UserError: If this host does not have the device.
    """
    gpus = [name for name in available if name.startswith("cuda:")]
    if device == "cpu" or (device == "auto" and not gpus):
        return "cpu"
    if device in ("cuda", "auto") and gpus:
        return gpus[local_rank % len(gpus)]
    if device in gpus:
        return device
    offer = ", ".join(("cpu", "auto", *(("cuda", *gpus) if gpus else ())))
    raise UserError("the device must be one that this machine has", device, f"choose one of {offer}")


# --- the place of a worker that torchrun, srun or mpirun has started, from its environment ---

# Slurm numbers the steps of srun from 0 and keeps the top for its own: batch script, interactive shell, and so on.
FIRST_RESERVED_STEP = 0xFFFFFFF0
# Ports below those that Linux gives to outgoing connections (32768 and up), so that no such connection has ours.
FIRST_PORT, PORTS = 16384, 16384
_OPEN_MPI = "OMPI_COMM_WORLD"


def from_environment(env: Mapping[str, str]) -> Place | None:
    """Return the place that torchrun, srun or mpirun gave this process; None if none of them has started it.

    - torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. All are needed if the first two are set.
    - srun: a step of at least two tasks, which meet at the first node unless MASTER_ADDR and MASTER_PORT are set.
      A step of one task (such as a shell on a node) and a batch script are ordinary processes and start workers.
    - mpirun (Open MPI's variables, or those that MPICH and others share): at least two processes. On one host they meet
      by Open MPI's name of the job, else by MASTER_ADDR and MASTER_PORT.

    Raises:
        UserError: For a missing or wrong variable.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        return _torchrun(env)
    if any(name in env for name in (f"{_OPEN_MPI}_RANK", f"{_OPEN_MPI}_SIZE")):  # before Slurm, which may run mpirun
        return _mpirun(env, f"{_OPEN_MPI}_RANK", f"{_OPEN_MPI}_SIZE", f"{_OPEN_MPI}_LOCAL_RANK")
    if "SLURM_PROCID" in env and _in_srun(env):
        return _srun(env)
    if "PMI_RANK" in env or "PMI_SIZE" in env:
        return _mpirun(env, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")
    return None


def refuse_launcher(env: Mapping[str, str], what: str) -> None:
    """Refuse ``what`` (as "a study") in a process that a launcher has started beside others: each would start it.

    Raises:
        UserError: For one of several processes of torchrun, srun or mpirun.
    """
    place = from_environment(env)
    if place is not None and place.world > 1:
        fix = "start it without torchrun, srun or mpirun, with --workers and --cluster (in Python workers=, cluster=)"
        raise UserError(f"one process starts {what}", f"rank {place.rank} of {place.world}", fix)


def on_this_host(env: Mapping[str, str]) -> int | None:
    """How many workers the launcher has started on this host; None if it does not report that."""
    names = ("LOCAL_WORLD_SIZE", f"{_OPEN_MPI}_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")
    value = next((env[name] for name in names if env.get(name)), "")
    return int(value) if value.isdigit() else None


def _torchrun(env: Mapping[str, str]) -> Place:
    world = _number(env, "WORLD_SIZE", 1)
    rank = _number(env, "RANK", 0, world - 1)
    local_rank = _number(env, "LOCAL_RANK", 0)
    _number(env, "MASTER_PORT", 1, 65535)
    _text(env, "MASTER_ADDR")
    return Place(rank, world, local_rank, rendezvous="env://" if world > 1 else "")


def _in_srun(env: Mapping[str, str]) -> bool:
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    return step.isdigit() and int(step) < FIRST_RESERVED_STEP


def _srun(env: Mapping[str, str]) -> Place | None:
    # SLURM_NTASKS may be the job's number if the step has fewer tasks; SLURM_STEP_NUM_TASKS is the step's number.
    world = _number(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS", 1)
    rank = _number(env, "SLURM_PROCID", 0, world - 1)
    local_rank = _number(env, "SLURM_LOCALID", 0)
    if world == 1:
        return None
    nodes = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in env else "SLURM_JOB_NODELIST"
    host = _text(env, "MASTER_ADDR") if "MASTER_ADDR" in env else first_host(_text(env, nodes))
    step = _number(env, "SLURM_STEP_ID" if "SLURM_STEP_ID" in env else "SLURM_STEPID", 0)
    job = _number(env, "SLURM_JOB_ID" if "SLURM_JOB_ID" in env else "SLURM_JOBID", 0)
    meet = _number(env, "MASTER_PORT", 1, 65535) if "MASTER_PORT" in env else port(job, step)
    return Place(
        rank, world, local_rank, rendezvous=f"tcp://[{host}]:{meet}" if ":" in host else f"tcp://{host}:{meet}"
    )


def _mpirun(env: Mapping[str, str], rank_name: str, size_name: str, local_name: str) -> Place | None:
    world = _number(env, size_name, 1)
    rank = _number(env, rank_name, 0, world - 1)
    if world == 1:
        return None
    local_rank = _number(env, local_name, 0) if local_name in env else rank
    job = env.get("PMIX_NAMESPACE", "") or env.get("OMPI_MCA_ess_base_jobid", "")
    if "MASTER_ADDR" in env or "MASTER_PORT" in env:
        return Place(rank, world, local_rank, rendezvous=_master(env))
    if on_this_host(env) != world or not job:
        rule = "processes of mpirun on several hosts need an address at which they meet"
        fix = "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 (MPICH: -genv NAME VALUE)"
        raise UserError(rule, "no MASTER_ADDR", fix)
    meet = FIRST_PORT + zlib.crc32(job.encode()) % PORTS
    return Place(rank, world, local_rank, rendezvous=f"tcp://127.0.0.1:{meet}")


def _master(env: Mapping[str, str]) -> str:
    return f"tcp://{_text(env, 'MASTER_ADDR')}:{_number(env, 'MASTER_PORT', 1, 65535)}"


def port(job: int, step: int) -> int:
    """Return a port that all tasks of a step compute alike, and that other steps of the job do not use."""
    return FIRST_PORT + (job * 31 + step) % PORTS


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list, on which task 0 runs: ``node03-ib`` of ``node[03-05,9]-ib,other``.

    Raises:
        UserError: If ``nodelist`` is not such a list.
    """
    item = r"\d+(?:-\d+)?"
    group = rf"\[{item}(?:,{item})*\]"
    entry = rf"(?:[A-Za-z0-9_.-]|{group})+"
    if not re.fullmatch(rf"{entry}(?:,{entry})*", nodelist):
        fix = "it looks like node[03-05,9]; run under srun, which sets it"
        raise UserError("SLURM_STEP_NODELIST must be a Slurm node list", nodelist, fix)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodelist).partition(",")[0]


def _text(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "").strip()
    if not value:
        raise UserError(f"{name} must be set by the launcher", "nothing", "start the file by torchrun, srun or mpirun")
    return value


def _number(env: Mapping[str, str], name: str, low: int, high: int | None = None) -> int:
    value = _text(env, name)
    if not re.fullmatch(r"[0-9]{1,18}", value) or int(value) < low or (high is not None and int(value) > high):
        span = f"at least {low}" if high is None else f"from {low} to {high}"
        raise UserError(f"{name} must be a whole number {span}", value, "start the file by torchrun, srun or mpirun")
    return int(value)
