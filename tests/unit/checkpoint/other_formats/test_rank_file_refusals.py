"""Rank files that are missing, altered, or of another kind are refused by name, and nothing is written."""

import os
import resource
import struct
import zipfile
from math import prod

import pytest
import torch

from tests.unit.checkpoint.other_formats.made_rank_files import SEPARATOR, convert, flip, load, make
from torchacc.checkpoint.other_formats import conversion, object_files
from torchacc.checkpoint.other_formats.pth import read_pth
from torchacc.checkpoint.other_formats.rank_conversion import (
    Output,
    consolidate_sharded_model_checkpoints,
)
from torchacc.errors import CheckpointError


class TestRefused:
    """What is wrong with a set of files is said, with the file and the tensor, and nothing is written."""

    @pytest.fixture
    def paths(self, tmp_path):
        return make("rows").save(tmp_path, 4)

    @pytest.fixture(autouse=True)
    def nothing_written(self, tmp_path):
        yield
        assert not (tmp_path / "consolidated.pth").exists()
        assert not list(tmp_path.glob(".*"))

    def refuse(self, folder, match):
        with pytest.raises(CheckpointError, match=match):
            consolidate_sharded_model_checkpoints(str(folder), verify=True)

    def change(self, path, change):
        content = load(path)
        change(content)
        torch.save(content, path)

    def test_a_missing_rank(self, tmp_path, paths):
        paths[2].unlink()
        self.refuse(tmp_path, "rank 2 of 4 is missing")

    def test_no_file(self, tmp_path):
        self.refuse(tmp_path, r"\*.pth: no rank file with a 'model'")

    def test_a_rank_twice(self, tmp_path, paths):
        (tmp_path / "rank-again.pth").write_bytes(paths[1].read_bytes())
        self.refuse(tmp_path, "rank-1-of-4-model.pth and .*rank-again.pth are both rank 1")

    def test_two_saves(self, tmp_path, paths):
        self.change(paths[3], lambda content: content["shard_metadata"].update(save_id="2"))
        self.refuse(tmp_path, "rank-0-of-4-model.pth and .*rank-3-of-4-model.pth are of different saves")

    @pytest.mark.parametrize("style", ["xla-flat", "xla-dim0"])
    @pytest.mark.parametrize(
        "change",
        [
            lambda optimizer: next(iter(optimizer["state"].values())).update(step=torch.tensor(12.0)),
            lambda optimizer: optimizer["param_groups"][0].update(lr=0.5),
        ],
        ids=["step", "lr"],
    )
    def test_two_saves_of_torch_xla_whose_optimizers_differ(self, tmp_path, style, change):
        paths = make(style).save(tmp_path, 2, separate=False)
        self.change(paths[1], lambda content: change(content["optimizer"]))
        self.refuse(tmp_path, "the optimizers in .*rank-0-of-2.pth and .*rank-1-of-2.pth have made other numbers")

    def test_a_target_that_is_no_file(self, tmp_path, paths):
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        with pytest.raises(CheckpointError, match="fifo is a device or the like, which a file would replace"):
            consolidate_sharded_model_checkpoints(str(tmp_path), save_path=str(fifo))
        with pytest.raises(CheckpointError, match="fifo is a device or the like, which a file would replace"):
            object_files.save({"a": 1}, fifo)
        assert fifo.is_fifo()

    def test_text_in_place_of_a_file(self, tmp_path):
        (tmp_path / "notes.pth").write_text("hello world")
        with pytest.raises(CheckpointError, match="notes.pth cannot be read .* not a file of torch.save"):
            object_files.load(tmp_path / "notes.pth")

    def test_two_world_sizes(self, tmp_path, paths):
        make("rows").save(tmp_path, 2)
        self.refuse(tmp_path, r"rank-0-of-2-model.pth is of 2 ranks and .*rank-0-of-4-model.pth of 4")

    @pytest.mark.parametrize("size", [0, 100, -1])
    def test_a_truncated_file(self, tmp_path, paths, size):
        paths[1].write_bytes(paths[1].read_bytes()[:size])
        self.refuse(tmp_path, "rank-1-of-4-model.pth cannot be read.*truncated")

    def test_metadata_that_contradicts_itself(self, tmp_path):
        for path in make("flat").save(tmp_path, 2):
            self.change(path, lambda content: content["shard_metadata"]["flatten_info"]["h.0.flat_param_0"][1].pop())
            self.change(path, lambda content: content["shard_metadata"]["flatten_info"]["h.0.flat_param_0"][0].pop())
        self.refuse(
            tmp_path, "rank-0-of-2-model.pth: its shard_metadata makes no sense .*h.0.flat_param_0 has 55 elements"
        )

    def test_no_metadata(self, tmp_path, paths):
        self.change(paths[1], lambda content: content.pop("shard_metadata"))
        self.refuse(tmp_path, "rank-1-of-4-model.pth has no 'shard_metadata'")

    def test_metadata_that_makes_no_sense(self, tmp_path, paths):
        for path in paths:
            self.change(path, lambda content: content["shard_metadata"].update(shard_info={"": {"w": {}}}))
        self.refuse(tmp_path, "rank-0-of-4-model.pth: its shard_metadata makes no sense")

    def test_other_metadata(self, tmp_path, paths):
        self.change(
            paths[1], lambda content: content["shard_metadata"]["shard_info"]["h.0"]["w"].update(_orig_size=[9])
        )
        self.refuse(tmp_path, "rank-0-of-4-model.pth and .*rank-1-of-4-model.pth are sharded differently")

    def test_a_missing_key(self, tmp_path, paths):
        self.change(paths[1], lambda content: content["model"].pop("h.0.w"))
        self.refuse(tmp_path, "rank-1-of-4-model.pth has no h.0.w, which .*rank-0-of-4-model.pth has")

    def test_a_missing_key_in_all(self, tmp_path, paths):
        for path in paths:
            self.change(path, lambda content: content["model"].pop("h.0.w"))
        self.refuse(tmp_path, "rank-0-of-4-model.pth has no h.0.w")

    def test_a_wrong_shape(self, tmp_path, paths):
        self.change(paths[1], lambda content: content["model"].update({"h.0.w": torch.zeros(3, 6, 2)}))
        self.refuse(
            tmp_path, r"rank-1-of-4-model.pth: h.0.w is float32 \(3, 6, 2\), where rank 0 of 4 has .*\(1, 6, 2\)"
        )

    def test_a_wrong_shape_in_all(self, tmp_path, paths):
        for path in paths:
            self.change(path, lambda content: content["model"].update({"h.0.w": torch.zeros(3, 6, 2)}))
        self.refuse(tmp_path, r"rank-0-of-4-model.pth: h.0.w is float32 \(3, 6, 2\), which is not one of 4 shards of")

    def test_the_same_elements_in_another_shape(self, tmp_path, paths):
        self.change(paths[1], lambda content: content["model"].update({"h.0.w": torch.zeros(1, 2, 6)}))
        self.refuse(
            tmp_path, r"rank-1-of-4-model.pth: h.0.w is float32 \(1, 2, 6\), where rank 0 of 4 has .*\(1, 6, 2\)"
        )
        for path in paths:
            self.change(path, lambda content: content["model"].update({"h.0.w": torch.zeros(6, 1, 2)}))
        self.refuse(tmp_path, r"rank-0-of-4-model.pth: h.0.w is float32 \(6, 1, 2\), which is not one of 4 shards of")

    @pytest.mark.parametrize(
        ("metadata", "match"),
        [
            ({"rank": "1"}, r"rank-1-of-4-model.pth: its shard_metadata has rank = '1': a whole number"),
            ({"rank": -1}, r"rank-1-of-4-model.pth: its shard_metadata has rank = -1"),
            ({"rank": 4}, r"rank-1-of-4-model.pth: its shard_metadata has rank = 4: less than its world_size, 4"),
            ({"world_size": None}, r"rank-1-of-4-model.pth: its shard_metadata has world_size = None"),
            ({"replica": "0"}, r"rank-1-of-4-model.pth: its shard_metadata has replica = '0'"),
            ({"splits_layers": True}, r"rank-1-of-4-model.pth was saved where config.dist.tp.size split layers"),
            ({"save_id": []}, r"rank-1-of-4-model.pth: its shard_metadata has save_id = \[\]"),
            ({"shard_info": [1]}, r"rank-1-of-4-model.pth: its shard_metadata has shard_info = \[1\]: a dict"),
            ({"flatten_info": 3}, r"rank-1-of-4-model.pth: its shard_metadata has flatten_info = 3: a dict"),
            ({"buffer_info": "x"}, r"rank-1-of-4-model.pth: its shard_metadata has buffer_info = 'x': a dict"),
            ({"tied": {"a": 1}}, r"rank-1-of-4-model.pth: its shard_metadata has tied = .*: names"),
            ({"parameters": {1: 2}}, r"rank-1-of-4-model.pth: its shard_metadata has parameters = .*: a list of names"),
        ],
    )
    def test_metadata_of_other_types(self, tmp_path, paths, metadata, match):
        self.change(paths[1], lambda content: content["shard_metadata"].update(metadata))
        self.refuse(tmp_path, match)

    @pytest.mark.parametrize(
        ("metadata", "match"),
        [
            ({"world_size": 10**9}, r"rank 4, 5, .*, 11 and 999,999,988 more of 1000000000 is missing"),
            ({"tied": {"a": "b"}}, "rank-0-of-4-model.pth: its shard_metadata says that a is tied to b, which is not"),
            (
                {"tied": {"h.0.b": "h.1.b"}},
                "rank-0-of-4-model.pth: its shard_metadata says that h.0.b is tied to h.1.b, and has both",
            ),
            (
                {"buffer_info": {"h.1.scale": {}}},
                "rank-0-of-4-model.pth: its shard_metadata does not say which dtype the buffer h.1.scale had",
            ),
        ],
    )
    def test_metadata_that_lies_in_all(self, tmp_path, paths, metadata, match):
        for path in paths:
            self.change(path, lambda content: content["shard_metadata"].update(metadata))
        self.refuse(tmp_path, match)

    @pytest.mark.parametrize("size", [[-4, -6, 2], "462", [4.0], [2**63]])
    def test_a_size_that_is_none(self, tmp_path, paths, size):
        for path in paths:
            self.change(path, lambda c: c["shard_metadata"]["shard_info"]["h.0"]["w"].update(_orig_size=size))
        self.refuse(tmp_path, "rank-0-of-4-model.pth: its shard_metadata makes no sense .*h.0.w has the size")

    def test_a_parameter_twice(self, tmp_path):
        for path in make("flat").save(tmp_path, 2):
            self.change(path, lambda c: c["shard_metadata"]["flatten_info"]["h.0.flat_param_0"][0].__setitem__(1, "w"))
        self.refuse(tmp_path, "rank-0-of-2-model.pth: its shard_metadata has h.0.w twice")

    def test_a_parameter_and_a_buffer_of_one_name(self, tmp_path):
        for path in make("xla").save(tmp_path, 2):
            self.change(path, lambda content: content["model"].update({"h.0.w": torch.zeros(1)}))
        self.refuse(tmp_path, "rank-0-of-2-model.pth has h.0.w twice")

    def test_a_name_that_is_none(self, tmp_path, paths):
        for path in paths:
            self.change(path, lambda content: content["model"].update({3: torch.zeros(1)}))
        self.refuse(tmp_path, "rank-0-of-4-model.pth: its model has the key 3")

    def test_a_parameter_twice_in_the_optimizer(self, tmp_path, paths):
        for path in tmp_path.glob("*-optimizer.pth"):
            self.change(path, lambda c: c["optimizer"]["param_groups"][0]["param_names"].__setitem__(0, "h.0.w"))
        with pytest.raises(CheckpointError, match="a parameter is in it twice"):
            convert(tmp_path, "optimizer")

    def test_a_folder_as_target(self, tmp_path, paths):
        (tmp_path / "there").mkdir()
        with pytest.raises(CheckpointError, match="there is a folder: name the file to write, such as .*there/model"):
            consolidate_sharded_model_checkpoints(str(tmp_path), save_path=str(tmp_path / "there"))
        assert not list((tmp_path / "there").iterdir())

    def test_one_name_for_two_files(self, tmp_path, paths):
        with pytest.raises(CheckpointError, match="x.pth would be written twice"):
            convert(tmp_path, "model", "optimizer", names={"model": "x.pth", "optimizer": "x.pth"})

    def test_no_pattern(self, tmp_path, paths):
        with pytest.raises(CheckpointError, match="is not a pattern of files"):
            consolidate_sharded_model_checkpoints(str(tmp_path), "")

    @pytest.mark.parametrize("limit", [0, 500, 4000])  # the last one is found while writing
    def test_a_limit_to_the_size_of_files(self, tmp_path, paths, limit):
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
        try:
            self.refuse(
                tmp_path,
                "consolidated.pth (takes more than 1,.*raise that limit|cannot be written: File too large.*nothing)",
            )
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)

    def test_a_wrong_dtype(self, tmp_path, paths):
        self.change(paths[1], lambda content: content["model"].update({"h.0.w": torch.zeros(1, 6, 2).half()}))
        self.refuse(tmp_path, "rank-1-of-4-model.pth: h.0.w is float16")

    def test_code(self, tmp_path, paths):
        class RunsCode:
            def __reduce__(self):
                return (os.mkdir, (str(tmp_path / "ran"),))

        self.change(paths[1], lambda content: content.update(extra=RunsCode()))
        self.refuse(tmp_path, "rank-1-of-4-model.pth holds a posix.mkdir.*could run code")
        assert not (tmp_path / "ran").exists()

    def test_a_flipped_bit(self, tmp_path, paths):
        region = read_pth(paths[1])["model"]["h.0.w"]
        data = bytearray(paths[1].read_bytes())
        data[region.offset + 5] ^= 1
        paths[1].write_bytes(data)
        self.refuse(
            tmp_path, "rank-1-of-4-model.pth is damaged: the checksum of its record .*, which holds h.0.w, is wrong"
        )

    def test_a_file_without_checksums(self, tmp_path, paths):
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            self.change(paths[1], lambda content: None)
        finally:
            torch.serialization.set_crc32_options(before)
        self.refuse(tmp_path, "rank-1-of-4-model.pth has no checksums: save it again without")

    def test_a_flipped_bit_in_the_pickle(self, tmp_path, paths):
        data = paths[1].read_bytes()
        flip(paths[1], data.index(b"parameters"))
        self.refuse(tmp_path, "rank-1-of-4-model.pth cannot be read.*Bad CRC-32.*damaged")

    def test_a_flipped_bit_in_a_record_that_is_no_tensor(self, tmp_path, paths):
        with zipfile.ZipFile(paths[1]) as archive:
            (info,) = (info for info in archive.infolist() if info.filename.endswith("/serialization_id"))
        lengths = struct.unpack_from("<HH", paths[1].read_bytes(), info.header_offset + 26)
        flip(paths[1], info.header_offset + 30 + sum(lengths))
        self.refuse(tmp_path, "rank-1-of-4-model.pth is damaged: the checksum of its record .*/serialization_id is")

    def test_a_full_disk(self, tmp_path, paths, monkeypatch):
        def pwrite(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", pwrite)
        self.refuse(tmp_path, "cannot be written: No space left on device")

    def test_a_disk_that_keeps_something_else(self, tmp_path, paths, monkeypatch):
        write = conversion.write_exactly
        monkeypatch.setattr(conversion, "write_exactly", lambda file, data, at: write(file, bytes(len(data)), at))
        self.refuse(tmp_path, "was written into .* and reads back otherwise")

    def test_too_little_room(self, tmp_path, paths, monkeypatch):
        usage = type("usage", (), {"free": 1000})
        monkeypatch.setattr(conversion.shutil, "disk_usage", lambda folder: usage)
        self.refuse(tmp_path, "has 1,000 bytes left, and .* are needed")

    def test_a_target_that_is_no_folder(self, tmp_path, paths):
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match="cannot be written: (File exists|Not a directory)"):
            convert(tmp_path, "model", target=tmp_path / "file")

    def test_an_input_as_target(self, tmp_path, paths):
        before = paths[0].read_bytes()
        with pytest.raises(CheckpointError, match="is one of the files that are read"):
            consolidate_sharded_model_checkpoints(str(tmp_path), save_path=str(paths[0]))
        assert paths[0].read_bytes() == before

    def test_groups_without_names(self, tmp_path, paths):
        for path in tmp_path.glob("*-optimizer.pth"):
            self.change(path, lambda content: content["optimizer"]["param_groups"].append({"params": []}))
        with pytest.raises(CheckpointError, match="which is which is not noted"):
            convert(tmp_path, "optimizer")

    def test_a_name_that_the_model_does_not_know(self, tmp_path, paths):
        for path in tmp_path.glob("*-optimizer.pth"):
            self.change(path, lambda c: c["optimizer"]["param_groups"][0]["param_names"].__setitem__(0, "x"))
        with pytest.raises(CheckpointError, match="its optimizer has x, which shard_metadata does not know"):
            convert(tmp_path, "optimizer")

    def test_a_state_that_is_not_sharded_like_its_parameter(self, tmp_path, paths):
        for path in tmp_path.glob("*-optimizer.pth"):
            self.change(path, lambda c: c["optimizer"]["state"][0].update(row=torch.zeros(77)))
        with pytest.raises(CheckpointError, match=r"the optimizer's row of wte.weight has the shape \(77,\)"):
            convert(tmp_path, "optimizer")

    def test_a_state_that_one_rank_lacks(self, tmp_path, paths):
        path = tmp_path / "rank-2-of-4-optimizer.pth"
        self.change(path, lambda content: content["optimizer"]["state"][0].pop("step"))
        with pytest.raises(
            CheckpointError, match="rank-2-of-4-optimizer.pth: the optimizer's state of wte.weight differs"
        ):
            convert(tmp_path, "optimizer")

    def test_an_optimizer_that_is_none(self, tmp_path, paths):
        for path in tmp_path.glob("*-optimizer.pth"):
            self.change(path, lambda content: content.update(optimizer={"state": []}))
        with pytest.raises(CheckpointError, match="is not what an optimizer's state_dict"):
            convert(tmp_path, "optimizer")

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"num_ranks": 0}, "0 ranks cannot be written"),
            ({"num_ranks": 2, "output": Output("safetensors")}, "options of consolidating"),
            ({"num_ranks": 2, "names": {"model": "x.pth"}}, "'x.pth' has to have two stars"),
            ({"patterns": {"model": "x*.pth"}}, r"has no files x\*.pth"),
        ],
    )
    def test_options_that_make_no_sense(self, tmp_path, paths, options, match):
        with pytest.raises(CheckpointError, match=match):
            convert(tmp_path, "model", **options)

    def test_units_that_are_cut_differently(self, tmp_path):
        made = make("xla-dim0")
        made.save(tmp_path, 2)
        key = f"_fsdp_wrapped_module.h.0._fsdp_shard{SEPARATOR}_fsdp_wrapped_module{SEPARATOR}w"
        for path in tmp_path.glob("*-model.pth"):
            self.change(path, lambda content: content["model"].update({key: torch.zeros(prod((1, 128)))}))
        with pytest.raises(CheckpointError, match="is not cut like the others"):
            convert(tmp_path, "model", num_ranks=3)


def test_without_the_folder(tmp_path):
    with pytest.raises(CheckpointError, match="is not a folder"):
        convert(tmp_path / "nowhere", "model")
