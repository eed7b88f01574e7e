import pytest

from torchacc.launch.hang import RankStatus, are_apart, describe, find_hung_rank, is_stuck
from torchacc.launch.progress import Phase, Progress

IN_COLLECTIVE = """Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/usr/lib/python3.11/queue.py", line 171 in get

Current thread 0x00007f0000000002 (most recent call first):
  File "/venv/torch/distributed/distributed_c10d.py", line 3000 in all_gather_into_tensor
  File "/venv/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/home/me/train.py", line 9 in <module>
"""
ELSEWHERE = """Current thread 0x00007f0000000002 (most recent call first):
  File "/home/me/train.py", line 7 in forward
  File "/venv/torch/nn/modules/module.py", line 1786 in _call_impl
  File "/venv/torch/nn/modules/module.py", line 1775 in _wrapped_call_impl
  File "/venv/torch/nn/modules/module.py", line 1775 in inner
  File "/venv/torch/distributed/run.py", line 9 in <module>
"""


def record(step=57, phase=Phase.FORWARD, since=100.0, own_steps=3):
    return Progress(step=step, own_steps=own_steps, phase=phase, since=since)


def standing(rank, stack, **where):
    return RankStatus(rank=rank, progress=record(**where), stack=stack)


def test_the_culprit_is_the_one_outside_of_a_collective():
    waiting = [standing(rank, IN_COLLECTIVE, since=50.0) for rank in (0, 1, 3)]
    assert find_hung_rank([*waiting, standing(2, ELSEWHERE)]).rank == 2
    assert find_hung_rank([*waiting, standing(2, ELSEWHERE, step=58)]).rank == 2
    assert find_hung_rank([*waiting, standing(2, "")]).rank == 2  # stopped: it cannot say


def test_of_several_the_culprit_is_the_least_far():
    free = [standing(0, ELSEWHERE, step=58), standing(1, ELSEWHERE), standing(2, ELSEWHERE, phase=Phase.BACKWARD)]
    assert find_hung_rank(free).rank == 1
    assert find_hung_rank([standing(0, ELSEWHERE), standing(1, ELSEWHERE, since=99.0)]).rank == 1


def test_ranks_are_apart_in_other_steps_or_parts_of_one():
    assert are_apart([record(), record(phase=Phase.BACKWARD)])
    assert are_apart([record(), record(step=58)])
    assert not are_apart([record(), record(since=7.0), record(phase=Phase.ENDING)])


def test_nobody_is_blamed_where_each_waits_for_others():
    assert find_hung_rank([standing(rank, IN_COLLECTIVE) for rank in range(2)]) is None
    assert find_hung_rank([]) is None


@pytest.mark.parametrize(
    ("records", "stuck"),
    [
        ([record(), record()], True),
        ([record(), record(since=170.0)], False),  # one gets on
        ([record(own_steps=0), record(own_steps=0)], False),  # the first step may compile
        ([record(own_steps=0), record()], True),
        ([record(), record(since=170.0, phase=Phase.ENDING)], True),
        ([record(phase=Phase.ENDING)], False),
        ([], False),
    ],
)
def test_a_job_is_stuck_when_nobody_gets_on(records, stuck):
    assert is_stuck(records, now=180.0, limit_secs=60.0) is stuck


def test_where_a_rank_is_is_said_with_its_step():
    assert (
        describe(standing(2, ""), "node7", 161.0) == "rank 2 on node7 has been in the forward pass of step 58 for 61 s"
    )
    saving = standing(0, "", phase=Phase.SAVING)
    assert describe(saving, "node7", 161.0) == "rank 0 on node7 has been saving a checkpoint, after step 57, for 61 s"
