"""Two stages on different devices, each killed in the middle and started again, end as if nothing had happened."""

import pytest

from tests.e2e.training import MODEL, carry_out, data, write_file

STEPS = 9
KILL = "@9:5"
"""SIGKILL after five steps, which a save in the background may outlive or not."""


@pytest.mark.slow
@pytest.mark.xla
@pytest.mark.timeout(1800)
def test_two_stages_that_are_killed_end_as_if_they_were_not(tmp_path):
    def make(name):
        folder = tmp_path / name
        folder.mkdir()

        def stage(devices, engine, **more):
            training = {
                "batch_size": 2, "max_steps": STEPS, "log_every_steps": 4, "eval_every_steps": 3, "save_every_steps": 2,
            }  # fmt: skip
            return {
                "model_config": "model_config_tiny",  # with dropout, so that random numbers count
                "data": data(folder),
                "scheduler": {"name": "linear", "warmup_steps": 2},
                "training": training,
                "distributed": {"devices": devices, "engine": engine},
                **more,
            }

        stages = {"first": stage(4, "xla"), "second": stage(2, "native", init_from="first")}
        return write_file(folder, stages, tiny=MODEL)

    def carry_out_both(file, *, killed):
        if killed:
            carry_out(file, f"first{KILL}", returncode=-9)
        found = carry_out(file, "first")
        if killed:
            carry_out(file, f"second{KILL}", num_processes=2, returncode=1)
        return found | carry_out(file, "second", num_processes=2)

    whole, killed = make("whole"), make("killed")
    expected, found = carry_out_both(whole, killed=False), carry_out_both(killed, killed=True)

    for stage in ("first", "second"):
        assert len(expected[stage]["losses"]) == len(expected[stage]["made"]) == STEPS
        assert 3 <= found[stage]["made"][0] <= 5, "the first step after a checkpoint, not of the run"
        assert expected[stage]["evaluations"].keys() == {"3", "6", "9"}
        for key in ("losses", "norms", "rates", "evaluations", "finished"):
            assert found[stage][key] == expected[stage][key], f"{key} of the {stage} stage"
        weights = [file.parent / "runs" / stage / "final" / "model.safetensors" for file in (whole, killed)]
        assert weights[0].read_bytes() == weights[1].read_bytes()
    assert found["second"]["losses"][0] < found["first"]["losses"][3], (
        "the second stage starts from the first one's weights"
    )
