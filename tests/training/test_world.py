"""Which process this is: variables as each launcher sets them, and what contradicts itself."""

from __future__ import annotations

import pytest

from nlpconvert.errors import UsageError
from nlpconvert.training.world import FIRST_PORT, LAUNCHERS, PORTS, World, find

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-1234@1",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NNODES": "1",
    "SLURM_STEP_NUM_NODES": "1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def without(told: dict[str, str], *names: str, **changed: str) -> dict[str, str]:
    return {name: value for name, value in told.items() if name not in names} | changed


def test_nobody_has_said_anything() -> None:
    assert find({}, 1) == World()


def test_torchrun() -> None:
    assert find(TORCHRUN, 1) == World(3, 1, 4, "torchrun", "node0", 29500, 2)


@pytest.mark.parametrize(("told", "name"), [(OPEN_MPI, "Open MPI"), (SLURM, "Slurm"), (MPICH, "MPICH")])
def test_one_machine_needs_no_address(told: dict[str, str], name: str) -> None:
    """Both ranks derive the same port, from the job or from the process that started them."""
    found = find(told, 4321)
    assert (found.rank, found.local_rank, found.size, found.launcher, found.local_size) == (1, 1, 2, name, 2)
    assert found.address == "127.0.0.1" and FIRST_PORT <= found.port < FIRST_PORT + PORTS
    numbers = [name for row in LAUNCHERS for name in (row.rank, row.local_rank)]
    other = find({key: "0" if key in numbers else value for key, value in told.items()}, 4321)
    assert other.port == found.port


def test_a_given_address_is_used() -> None:
    found = find({**OPEN_MPI, "MASTER_ADDR": "a", "MASTER_PORT": "7"}, 1)
    assert (found.address, found.port) == ("a", 7)


def test_one_task_is_alone() -> None:
    assert find({**SLURM, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}, 1) == World()
    assert find({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, 1) == World(launcher="Open MPI")


def test_a_batch_script_or_salloc_without_srun_is_alone() -> None:
    """The job's numbers are there, but no step was started and nobody runs beside it."""
    assert find(without(SLURM, "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", SLURM_PROCID="0"), 1) == World()
    assert find({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}, 1) == World()


def test_slurm_variables_by_themselves() -> None:
    told = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "2"}
    assert find(told, 1).rank == 1


def test_the_innermost_launcher_counts() -> None:
    """srun or mpirun may start torchruns, and mpirun may start its processes by srun."""
    assert find({**SLURM, **TORCHRUN}, 1).launcher == "torchrun"
    assert find({**OPEN_MPI, **TORCHRUN}, 1).rank == 3
    assert find({**SLURM, **MPICH, "SLURM_PROCID": "0"}, 1).launcher == "MPICH"
    assert find({**SLURM, "PMI_RANK": "1", "PMI_SIZE": "2"}, 1).launcher == "Slurm"  # srun --mpi=pmi2


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"RANK": "0"}, "RANK is set and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set and RANK is not"),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 does not fit WORLD_SIZE=4"),
        ({**TORCHRUN, "RANK": "one"}, "RANK='one' is no whole number"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_WORLD_SIZE=2 does not fit LOCAL_RANK=2"),
        (without(TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK is not"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT='99999' is no port"),
        (without(TORCHRUN, "MASTER_PORT"), "MASTER_PORT is not"),
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR does not say"),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "2"}, "MASTER_ADDR does not say where the first one is"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, "does not fit"),
        (without({**OPEN_MPI, **TORCHRUN}, "TORCHELASTIC_RUN_ID"), "but Open MPI says OMPI_COMM_WORLD_RANK=1 of"),
    ],
)
def test_contradictions_are_one_line(told: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as found:
        find(told, 1)
    assert words in str(found.value) and "\n" not in str(found.value)


def test_variables_copied_from_another_launcher_may_agree() -> None:
    """A common wrapper: RANK and WORLD_SIZE set from Open MPI's own."""
    told = {**OPEN_MPI, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n", "MASTER_PORT": "5"}
    assert find(told, 1) == World(1, 1, 2, "torchrun", "n", 5, 2)
