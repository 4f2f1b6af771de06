"""Floor 1: which process this is among those that train together, as torchrun, MPI or Slurm have said it.

Launchers tell each process its number in environment variables, each in words of its own; here they become one World,
and what contradicts itself one clear line. How the processes then talk to each other is `ranks`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from nlpconvert.errors import UsageError

LOOPBACK = "127.0.0.1"
FIRST_PORT, PORTS = 20_000, 12_000
"""Ports are derived below those that Linux hands out by itself."""


@dataclass(frozen=True)
class World:
    """This process among `size`: its number, its number among the `local_size` on this machine, and who started it (""
    for nobody).

    `address` and `port`: where the first process can be met; "" and 0 for a process that is alone.
    """

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    launcher: str = ""
    address: str = ""
    port: int = 0
    local_size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that speaks and writes."""
        return self.rank == 0


@dataclass(frozen=True)
class Launcher:
    """One row: the variables of a launcher.

    `local_size` counts the processes on this machine, `machines` the machines, `job` is what all processes of a run
    have in common.
    """

    name: str
    rank: str
    local_rank: str
    size: str
    local_size: str = ""
    machines: str = ""
    job: tuple[str, ...] = ()


# The innermost first: `srun torchrun` and `mpirun torchrun` start torchruns, whose workers are the processes meant.
LAUNCHERS: tuple[Launcher, ...] = (
    Launcher("torchrun", "RANK", "LOCAL_RANK", "WORLD_SIZE", local_size="LOCAL_WORLD_SIZE"),
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher("MPICH", "PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", local_size="MPI_LOCALNRANKS", job=("PMI_ID",)),
    Launcher(
        "Slurm",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NTASKS",
        machines="SLURM_NNODES",
        job=("SLURM_JOB_ID", "SLURM_JOBID"),
    ),
)
_TORCHRUN, _OPEN_MPI, _MPICH, _SLURM = LAUNCHERS


def find(environment: Mapping[str, str], parent: int) -> World:
    """The world that the environment tells of; a process alone where it tells of none.

    `parent`: the number of the process that started this one, from which a port is derived where all run on one machine
    and none was said. Raises UsageError in one line for numbers that are none, that contradict each other, or that lack
    a part.
    """
    told = [row for row in LAUNCHERS if _speaks(row, environment)]
    if not told:
        return World()
    row = told[0]
    rank, local_rank, size, local_size = _numbers(row, environment)
    if row is _TORCHRUN and "TORCHELASTIC_RUN_ID" not in environment:
        # Variables set by hand, or by a script from another launcher's: then both must say the same.
        for other in told[1:]:
            theirs = _numbers(other, environment)
            if (theirs[0], theirs[2]) != (rank, size):
                raise UsageError(
                    f"{row.rank}={rank} of {row.size}={size}, but {other.name} says {other.rank}={theirs[0]} of "
                    f"{other.size}={theirs[2]}: unset the ones that are not meant"
                )
    if size == 1:
        return World(launcher=row.name)
    address, port = _meeting(row, environment, local_rank == rank, size, parent)
    return World(rank, local_rank, size, row.name, address, port, local_size)


def _speaks(row: Launcher, environment: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process."""
    if row is _SLURM:
        # In a batch script, or a shell that salloc gave, the job's numbers are there and no task runs beside this one:
        # only srun makes steps.
        within_a_step = any(name in environment for name in ("SLURM_STEP_ID", "SLURM_STEPID"))
        in_a_job = any(name in environment for name in ("SLURM_JOB_ID", "SLURM_JOBID"))
        tasks = environment.get("SLURM_STEP_NUM_TASKS", environment.get(row.size, "1"))
        return row.rank in environment and tasks != "1" and (within_a_step or not in_a_job)
    if row is _MPICH and row.local_rank not in environment and _speaks(_SLURM, environment):
        return False  # `srun --mpi=pmi2` speaks PMI as well
    return row.rank in environment or row.size in environment


def _numbers(row: Launcher, environment: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Rank, local rank, size, how many are here. UsageError where one lacks, is no number, or does not fit."""
    size_name = "SLURM_STEP_NUM_TASKS" if row is _SLURM and "SLURM_STEP_NUM_TASKS" in environment else row.size
    rank = _number(row, row.rank, environment)
    size = _number(row, size_name, environment)
    if size < 1 or not 0 <= rank < size:
        raise UsageError(f"{row.name}: {row.rank}={rank} does not fit {size_name}={size}: ranks go from 0 to size - 1")
    if row.local_rank in environment:
        local_rank = _number(row, row.local_rank, environment)
    elif size == 1:
        local_rank = 0
    else:
        raise UsageError(f"{row.name}: {row.rank} is set and {row.local_rank} is not; set it, or use torchrun")
    if not 0 <= local_rank <= rank:
        raise UsageError(f"{row.name}: {row.local_rank}={local_rank} does not fit {row.rank}={rank}")
    local_size = _number(row, row.local_size, environment) if row.local_size in environment else size
    if not local_rank < local_size <= size:
        raise UsageError(
            f"{row.name}: {row.local_size}={local_size} does not fit {row.local_rank}={local_rank} and "
            f"{size_name}={size}"
        )
    return rank, local_rank, size, local_size


def _number(row: Launcher, name: str, environment: Mapping[str, str]) -> int:
    if name not in environment:
        there = next(each for each in (row.rank, row.size, row.local_rank) if each in environment)
        raise UsageError(f"{row.name}: {there} is set and {name} is not; set it, or unset {there}")
    try:
        return int(environment[name])
    except ValueError:
        raise UsageError(f"{row.name}: {name}={environment[name]!r} is no whole number") from None


def _meeting(
    row: Launcher, environment: Mapping[str, str], alone_here: bool, size: int, parent: int
) -> tuple[str, int]:
    """Where the first process is met. UsageError for several machines and no MASTER_ADDR."""
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if port and not (port.isdecimal() and 0 < int(port) < 65_536):
        raise UsageError(f"MASTER_PORT={port!r} is no port (1 to 65535)")
    if not address and not _one_machine(row, environment, alone_here, size):
        raise UsageError(
            f"{row.name}: {size} processes on several machines, and MASTER_ADDR does not say where the first one is: "
            "set it (and MASTER_PORT) to a name that all of them can reach"
        )
    if not port and row is _TORCHRUN:
        raise UsageError("torchrun: WORLD_SIZE is set and MASTER_PORT is not: use torchrun, or set both for all ranks")
    return address or LOOPBACK, int(port) if port else _derived_port(row, environment, parent)


def _one_machine(row: Launcher, environment: Mapping[str, str], alone_here: bool, size: int) -> bool:
    """Whether all processes run on this machine, as far as the launcher tells; else whether nothing speaks against."""
    machines = environment.get("SLURM_STEP_NUM_NODES", environment.get(row.machines, "")) if row.machines else ""
    if machines:
        return machines == "1"
    local = environment.get(row.local_size, "") if row.local_size else ""
    return local == str(size) if local else alone_here


def _derived_port(row: Launcher, environment: Mapping[str, str], parent: int) -> int:
    """A port that all processes of one run find alike, and two runs on one machine seldom."""
    common = [environment[name] for name in row.job if name in environment]
    if "SLURM_STEP_ID" in environment:
        common.append(environment["SLURM_STEP_ID"])
    words = "/".join(common) if common else str(parent)
    return FIRST_PORT + int.from_bytes(hashlib.sha256(words.encode()).digest()[:4], "big") % PORTS
