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
