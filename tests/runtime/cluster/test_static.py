from __future__ import annotations

import zlib

import pytest

from elastune.core.errors import UserError
from elastune.core.run import Place
from elastune.runtime.placement import FIRST_PORT, PORTS, first_host, from_environment, port

TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_JOB_ID": "123",
    "SLURM_STEP_ID": "4",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "head,node[03-05,9]-ib",
    "SLURM_STEP_NODELIST": "node[03-05,9]-ib",
}

MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "3146055681",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MASTER = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29501"}
MEET = FIRST_PORT + zlib.crc32(b"3146055681") % PORTS


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({}, None),
        ({"PATH": "/bin", "MASTER_ADDR": "x"}, None),
        ({"RANK": "first"}, None),
        (TORCHRUN, Place(2, 4, 0, rendezvous="env://")),
        ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}, Place(0, 1, 0, rendezvous="")),
        ({**SRUN, **TORCHRUN}, Place(2, 4, 0, rendezvous="env://")),
        (SRUN, Place(3, 8, 1, rendezvous=f"tcp://node03-ib:{FIRST_PORT + 123 * 31 + 4}")),
        (
            {**without(SRUN, "SLURM_STEP_ID", "SLURM_JOB_ID"), "SLURM_STEPID": "4", "SLURM_JOBID": "123"},
            Place(3, 8, 1, rendezvous=f"tcp://node03-ib:{FIRST_PORT + 123 * 31 + 4}"),
        ),
        (
            without(SRUN, "SLURM_STEP_NODELIST"),
            Place(3, 8, 1, rendezvous=f"tcp://head:{FIRST_PORT + 123 * 31 + 4}"),
        ),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "4"}, Place(3, 4, 1, rendezvous=f"tcp://node03-ib:{port(123, 4)}")),
        ({**SRUN, "MASTER_ADDR": "10.0.0.7"}, Place(3, 8, 1, rendezvous=f"tcp://10.0.0.7:{port(123, 4)}")),
        ({**SRUN, "MASTER_ADDR": "h", "MASTER_PORT": "29501"}, Place(3, 8, 1, rendezvous="tcp://h:29501")),
        ({**SRUN, "MASTER_ADDR": "fd00::1", "MASTER_PORT": "1"}, Place(3, 8, 1, rendezvous="tcp://[fd00::1]:1")),
        # an allocation without a step (salloc), a batch script with and without a step number, an interactive step
        (without(SRUN, "SLURM_PROCID", "SLURM_STEP_ID", "SLURM_LOCALID"), None),
        ({**without(SRUN, "SLURM_STEP_ID"), "SLURM_PROCID": "0"}, None),
        ({**SRUN, "SLURM_STEP_ID": "4294967291", "SLURM_PROCID": "0"}, None),
        ({**SRUN, "SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"}, None),
        ({**SRUN, "SLURM_STEP_ID": "batch"}, None),
        (MPIRUN, Place(1, 4, 1, rendezvous=f"tcp://127.0.0.1:{MEET}")),
        ({**MPIRUN, **SRUN}, Place(1, 4, 1, rendezvous=f"tcp://127.0.0.1:{MEET}")),  # Slurm has started mpirun's daemon
        ({**MPIRUN, **MASTER, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, Place(1, 4, 1, rendezvous="tcp://10.0.0.7:29501")),
        ({**MPICH, **MASTER}, Place(3, 4, 1, rendezvous="tcp://10.0.0.7:29501")),
        ({**MPICH, "PMI_RANK": "0", "PMI_SIZE": "1"}, None),
        # one task, such as a shell: an ordinary machine
        ({**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
    ],
)
def test_places(env: dict[str, str], place: Place | None) -> None:
    assert from_environment(env) == place


@pytest.mark.parametrize(
    ("env", "rule"),
    [
        ({**TORCHRUN, "RANK": "4"}, "RANK must be a whole number from 0 to 3"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK"),
        ({**TORCHRUN, "RANK": "one"}, "RANK"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE"),
        ({**TORCHRUN, "WORLD_SIZE": "²"}, "WORLD_SIZE"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT"),
        ({**TORCHRUN, "MASTER_ADDR": " "}, "MASTER_ADDR"),
        (without(TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK"),
        (without(TORCHRUN, "MASTER_PORT"), "MASTER_PORT"),
        ({**SRUN, "SLURM_PROCID": "8"}, "SLURM_PROCID"),
        ({**SRUN, "SLURM_NTASKS": "many"}, "SLURM_NTASKS"),
        ({**SRUN, "MASTER_PORT": "0"}, "MASTER_PORT"),
        ({**SRUN, "SLURM_STEP_NODELIST": "node[03-"}, "node list"),
        (without(SRUN, "SLURM_NTASKS"), "SLURM_NTASKS"),
        (without(SRUN, "SLURM_JOB_ID"), "SLURM_JOBID"),
        (without(SRUN, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "SLURM_JOB_NODELIST"),
    ],
)
def test_broken_environments(env: dict[str, str], rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        from_environment(env)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("login.site.org", "login.site.org"),
        ("node[03-05,9]-ib", "node03-ib"),
        ("node[9,03-05],other", "node9"),
        ("a-b,c[1-2]", "a-b"),
        ("rack[0-1]n[2-3],x", "rack0n2"),
        ("n[007]", "n007"),
    ],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize(
    "nodelist", ["", "n[", "n[]", "n[a]", "n[1-2", "n1,,n2", "n 1", "n[1],", "n;reboot", "n[1--2]"]
)
def test_no_node_list(nodelist: str) -> None:
    with pytest.raises(UserError):
        first_host(nodelist)


def test_ports_stay_below_those_of_outgoing_connections_and_differ_between_steps() -> None:
    ports = [port(job, step) for job in (1, 77, 2**31) for step in range(31)]
    assert len(set(ports)) == len(ports)
    assert min(ports) >= FIRST_PORT
    assert max(ports) < FIRST_PORT + PORTS <= 32768


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (without(MPIRUN, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE must be set"),
        (without(MPIRUN, "OMPI_COMM_WORLD_RANK"), "OMPI_COMM_WORLD_RANK must be set"),
        ({**MPIRUN, "OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK must be a whole number from 0 to 3"),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "-x MASTER_ADDR=HOST"),
        ({**MPIRUN, "MASTER_ADDR": "h"}, "MASTER_PORT must be set"),
        ({"PMI_RANK": "0"}, "PMI_SIZE must be set"),
        ({"PMI_SIZE": "2"}, "PMI_RANK must be set"),
        (MPICH, "need an address at which they meet"),
        ({**MPICH, "PMI_SIZE": "many"}, "PMI_SIZE must be a whole number"),
    ],
)
def test_half_of_what_mpirun_says_is_refused(env: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        from_environment(env)
