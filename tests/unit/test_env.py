import os

import pytest

from torchacc import env
from torchacc.env import Job, read_job
from torchacc.errors import ConfigError


def test_a_process_that_nobody_launched_is_alone():
    job = read_job({})
    assert job == Job(rank=0, num_processes=1, local_rank=0, local_num_processes=1)
    assert not job.launched


def test_the_launchers_variables_are_read():
    variables = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    job = read_job(variables)
    assert job == Job(rank=5, num_processes=8, local_rank=1, local_num_processes=4)
    assert job.launched


def test_without_local_variables_all_processes_are_on_this_machine():
    assert read_job({"RANK": "1", "WORLD_SIZE": "2"}) == Job(
        rank=1, num_processes=2, local_rank=1, local_num_processes=2
    )


def test_an_empty_variable_counts_as_unset():
    assert read_job({"RANK": "", "WORLD_SIZE": ""}) == Job()


def test_the_processs_own_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert (read_job().rank, read_job().num_processes) == (1, 3)


@pytest.mark.parametrize("rank", ["2", "-1"])
def test_a_rank_outside_of_the_job_is_refused(rank):
    with pytest.raises(ConfigError, match=rf"RANK={rank} with WORLD_SIZE=2: a rank lies between 0 and 1"):
        read_job({"RANK": rank, "WORLD_SIZE": "2"})


def test_a_number_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"WORLD_SIZE='two' is not a whole number"):
        read_job({"WORLD_SIZE": "two"})


def test_a_default_never_replaces_the_users_value(monkeypatch):
    monkeypatch.setenv("TORCHACC_TEST", "theirs")
    assert not env.set_default("TORCHACC_TEST", "ours")
    assert env.get("TORCHACC_TEST") == "theirs"


def test_a_default_is_set_where_there_is_no_value(monkeypatch):
    monkeypatch.setenv("TORCHACC_TEST", "restored by monkeypatch")
    monkeypatch.delenv("TORCHACC_TEST")
    assert env.get("TORCHACC_TEST") is None
    assert env.set_default("TORCHACC_TEST", "ours")
    assert env.get("TORCHACC_TEST") == "ours"


def test_a_flag_is_added_beside_others_and_never_over_the_users(monkeypatch):
    monkeypatch.setenv("SOME_FLAGS", "--theirs=1")
    assert env.add_flag("SOME_FLAGS", "--ours=false")
    assert env.get("SOME_FLAGS") == "--theirs=1 --ours=false"
    assert not env.add_flag("SOME_FLAGS", "--ours=true")
    assert env.get("SOME_FLAGS") == "--theirs=1 --ours=false"


def test_what_a_library_has_set_is_replaced_and_what_the_user_has_given_is_not(tmp_path, monkeypatch):
    own = tmp_path / "environ"
    own.write_bytes(b"GIVEN=1\0OTHER=2\0")
    monkeypatch.setattr(env, "_OWN", own)
    for name, value in (("GIVEN", "1"), ("MADE", "1"), ("CHANGED", "3")):
        monkeypatch.setenv(name, value)
        env.replace_default(name, default="1", value="2")
    env.replace_default("ABSENT", default="1", value="2")
    assert [os.environ.get(name) for name in ("GIVEN", "MADE", "CHANGED", "ABSENT")] == ["1", "2", "3", None]
    monkeypatch.setattr(env, "_OWN", tmp_path / "none")
    monkeypatch.setenv("MADE", "1")
    env.replace_default("MADE", default="1", value="2")
    assert os.environ["MADE"] == "1"


SRUN = {
    "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "5", "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_NODEID": "1", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "5",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip


def test_srun_and_mpirun_tell_what_torchrun_tells():
    assert read_job(SRUN) == Job(rank=3, num_processes=5, local_rank=1, local_num_processes=2)
    assert read_job({**SRUN, "SLURM_NODEID": "2"}).local_num_processes == 1
    assert read_job(MPIRUN) == Job(rank=1, num_processes=2, local_rank=1, local_num_processes=2)


def test_mpirun_that_srun_has_started_counts_before_it():
    assert read_job({**SRUN, **MPIRUN}).num_processes == 2


def test_a_launcher_that_srun_has_started_counts_before_it():
    assert read_job({**SRUN, "RANK": "0", "WORLD_SIZE": "8"}).num_processes == 8


def test_a_batch_script_is_one_process():
    batch = {name: value for name, value in SRUN.items() if "STEP" not in name}
    assert read_job({**batch, "SLURM_PROCID": "0"}) == Job()


def test_variables_of_a_scheduler_that_are_missing_are_named():
    with pytest.raises(ConfigError, match="SLURM_LOCALID is not set: export RANK, WORLD_SIZE"):
        read_job({name: value for name, value in SRUN.items() if name != "SLURM_LOCALID"})


def set_variables(monkeypatch, variables):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "restored by monkeypatch")
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_processes_of_one_machine_meet_on_it(monkeypatch):
    set_variables(monkeypatch, {**MPIRUN, "PMIX_NAMESPACE": "1"})
    env.set_meeting_point()
    port = env.get("MASTER_PORT")
    assert env.get("MASTER_ADDR") == "127.0.0.1"
    monkeypatch.delenv("MASTER_PORT")
    monkeypatch.setenv("PMIX_NAMESPACE", "2")  # another job on the machine
    env.set_meeting_point()
    assert env.get("MASTER_PORT") != port


def test_processes_of_several_machines_are_told_where_they_meet(monkeypatch):
    set_variables(monkeypatch, SRUN)
    with pytest.raises(ConfigError, match="5 processes, 2 of them on this machine, and MASTER_ADDR"):
        env.set_meeting_point()
    monkeypatch.setenv("MASTER_ADDR", "first")
    env.set_meeting_point()
    assert (env.get("MASTER_ADDR"), 20000 <= int(env.get("MASTER_PORT")) < 30000) == ("first", True)


def test_several_launchers_of_a_machine_are_refused(monkeypatch):
    set_variables(monkeypatch, SRUN)
    with pytest.raises(ConfigError, match="srun has started 2 of `torchacc launch` on this machine"):
        env.refuse_several_launchers("torchacc launch")
    monkeypatch.setenv("SLURM_NODEID", "2")
    env.refuse_several_launchers("torchacc launch")
