import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from tests.unit.data.numbered_samples import Numbers, Stream, expected, flat, read, read_shards
from torchacc.data import AsyncLoader, shard_loader
from torchacc.errors import DataError

# Order


@pytest.mark.parametrize("data_parallel_size", [1, 2, 3, 4])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("count", [24, 25, 5])
def test_devices_share_the_order_of_the_plain_loader(data_parallel_size, shuffle, count):
    torch.manual_seed(3)
    order = flat(read(DataLoader(Numbers(count), batch_size=2, shuffle=shuffle)))
    assert (order != sorted(order)) is shuffle
    torch.manual_seed(3)
    shards = read_shards(lambda: DataLoader(Numbers(count), batch_size=2, shuffle=shuffle), data_parallel_size)
    assert shards == expected(order, 2, data_parallel_size)
    assert set(flat(flat(shards))) == set(range(count))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("make_generator", [lambda: None, lambda: torch.Generator().manual_seed(5)])
def test_one_device_is_the_plain_loader_epoch_after_epoch(num_workers, make_generator):
    """And leaves the random state as the plain loader does, so that the model's own draws stay the same."""

    def make():
        return DataLoader(Numbers(6), 2, shuffle=True, num_workers=num_workers, generator=make_generator())

    torch.manual_seed(0)
    plain = make()
    epochs = [read(plain) for _ in range(3)]
    state = torch.get_rng_state()
    torch.manual_seed(0)
    sharded = shard_loader(make(), data_parallel_size=1, shards=range(1))
    assert [read(sharded) for _ in range(3)] == epochs
    assert torch.equal(torch.get_rng_state(), state)
    assert epochs[0] != epochs[1]


def test_persistent_workers_serve_several_epochs():
    def make():
        return DataLoader(Numbers(6), 2, shuffle=True, num_workers=1, persistent_workers=True)

    torch.manual_seed(0)
    plain = make()
    epochs = [read(plain) for _ in range(2)]
    torch.manual_seed(0)
    sharded = shard_loader(make(), data_parallel_size=1, shards=range(1))
    assert [read(sharded) for _ in range(2)] == epochs


def test_a_loader_with_workers_that_has_run_before():
    loader = DataLoader(Numbers(8), 2, num_workers=1, persistent_workers=True)
    assert len(read(loader)) == 4
    assert read(shard_loader(loader, data_parallel_size=2, shards=range(1, 2))) == [[2, 3], [6, 7]]


def test_draws_are_made_by_iter_not_by_next():
    torch.manual_seed(0)
    expected_order = read(shard_loader(DataLoader(Numbers(8), 2, shuffle=True), data_parallel_size=1, shards=range(1)))
    torch.manual_seed(0)
    batches = iter(shard_loader(DataLoader(Numbers(8), 2, shuffle=True), data_parallel_size=1, shards=range(1)))
    state = torch.get_rng_state()
    assert read(batches) == expected_order
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("shards", [range(4), range(1, 3)])
def test_a_process_of_several_devices_gets_their_batches_joined(shards):
    def make(seed=1):
        return DataLoader(Numbers(22), 3, shuffle=True, generator=torch.Generator().manual_seed(seed))

    alone = read_shards(make, 4)
    together = read(shard_loader(make(), data_parallel_size=4, shards=shards))
    assert together == [flat(alone[shard][step] for shard in shards) for step in range(2)]


def test_samplers_of_torch_keep_their_draws():
    weights = torch.arange(1.0, 13.0)
    for make in (
        lambda: WeightedRandomSampler(weights, 12),
        lambda: SubsetRandomSampler(range(2, 12)),
        lambda: RandomSampler(Numbers(12), replacement=True, num_samples=70),
        lambda: [5, 3, 1, 0],
    ):
        torch.manual_seed(2)
        order = flat(read(DataLoader(Numbers(12), 2, sampler=make())))
        torch.manual_seed(2)
        assert read_shards(lambda make=make: DataLoader(Numbers(12), 2, sampler=make()), 2) == expected(order, 2, 2)


@pytest.mark.parametrize(("count", "steps"), [(16, 2), (15, 1), (23, 2)])
def test_drop_last_drops_an_incomplete_round(count, steps):
    loader = shard_loader(DataLoader(Numbers(count), 2, drop_last=True), data_parallel_size=4, shards=range(4))
    assert read(loader) == [list(range(8 * step, 8 * step + 8)) for step in range(steps)]
    assert len(loader) == steps


def test_nothing_left_is_an_error_with_the_arithmetic():
    loader = shard_loader(DataLoader(Numbers(6), 2, drop_last=True), data_parallel_size=4, shards=range(4))
    with pytest.raises(DataError, match=r"3 batches for 4 data-parallel devices.*3 // 4 = 0 steps.*at most 1/2"):
        iter(loader)
    with pytest.raises(DataError, match="gave no batch"):
        iter(shard_loader(DataLoader(Numbers(0), 2), data_parallel_size=2, shards=range(2)))
    with pytest.raises(DataError, match="gave no batch"):
        list(shard_loader([], data_parallel_size=2, shards=range(2)))
    with pytest.raises(DataError, match="3 // 4 = 0 steps"):
        list(shard_loader(DataLoader(Stream(6), 2, drop_last=True), data_parallel_size=4, shards=range(4)))


@pytest.mark.parametrize("count", [1, 7, 8, 9])
def test_len_is_the_number_of_steps(count):
    for data_parallel_size in (1, 2, 3):
        for loader in (DataLoader(Numbers(count), 2), [torch.ones(2)] * count):
            sharded = shard_loader(loader, data_parallel_size=data_parallel_size, shards=range(1))
            assert len(sharded) == len(list(sharded))
    with pytest.raises(TypeError):
        len(shard_loader(DataLoader(Stream(3), 2), data_parallel_size=2, shards=range(1)))


# Loaders


def double(samples):
    return {"y": torch.tensor([2 * sample["y"] for sample in samples]), "n": len(samples)}


def test_collate_fn_sees_the_samples_of_all_devices_once():
    loader = DataLoader(Numbers(8), 2, collate_fn=double)
    batches = list(shard_loader(loader, data_parallel_size=2, shards=range(2)))
    assert [batch["n"] for batch in batches] == [4, 4]
    assert batches[1]["y"].tolist() == [8, 10, 12, 14]


def test_the_users_settings_and_class_are_kept():
    class Doubling(DataLoader):
        def __iter__(self):
            for batch in super().__iter__():
                yield batch["y"] * 2

    def init(_):
        pass

    loader = Doubling(Numbers(8), 2, num_workers=1, prefetch_factor=3, worker_init_fn=init, timeout=9)
    sharded = shard_loader(loader, data_parallel_size=2, shards=range(1, 2))
    assert read(sharded) == [[4, 6], [12, 14]]
    assert (sharded.batch_size, sharded.data_parallel_size, sharded.dataset) == (2, 2, loader.dataset)
    assert (sharded.prefetch_factor, sharded.worker_init_fn, sharded.timeout) == (3, init, 9)
    assert flat(batch.tolist() for batch in loader) == [2 * i for i in range(8)]


class Uneven(Sampler):
    """Batches of 1, 2, 3."""

    def __len__(self):
        return 3

    def __iter__(self):
        yield from ([0], [1, 2], [3, 4, 5])


def test_batches_of_a_custom_batch_sampler_stay_as_they_are():
    def make():
        return DataLoader(Numbers(6), batch_sampler=Uneven())

    assert read_shards(make, 2) == [[[0], [3, 4, 5]], [[1, 2], [0]]]
    with pytest.raises(DataError, match=r"have \[1, 2\] rows"):
        read(shard_loader(make(), data_parallel_size=2, shards=range(2)))


def test_a_batch_sampler_of_torchs_own_is_completed():
    def make():
        return DataLoader(Numbers(5), batch_sampler=BatchSampler(range(5), 2, False))

    assert read_shards(make, 2) == [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]
    dropping = DataLoader(Numbers(5), batch_sampler=BatchSampler(range(5), 2, True))
    assert read(shard_loader(dropping, data_parallel_size=2, shards=range(2))) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("shards", [range(1, 2), range(2)])
def test_map_style_without_collation(shards):
    """The dataset makes batches itself, from single indices or from the lists of a BatchSampler."""

    class Whole(Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return torch.tensor([10 * index, 10 * index + 1])

    got = read(shard_loader(DataLoader(Whole(), batch_size=None), data_parallel_size=2, shards=shards))
    alone = [[[0, 1], [20, 21]], [[10, 11], [0, 1]]]
    assert got == [flat(alone[shard][step] for shard in shards) for step in range(2)]

    class Sliced(TensorDataset):
        def __getitem__(self, index):
            assert isinstance(index, list)
            return self.tensors[0][index]

    data = Sliced(torch.arange(5))
    loader = DataLoader(data, batch_size=None, sampler=BatchSampler(RandomSampler(data), 2, False))
    torch.manual_seed(0)
    plain = flat(read(loader))
    torch.manual_seed(0)
    sharded = shard_loader(loader, data_parallel_size=2, shards=shards)
    alone = expected(plain, 2, 2)
    assert read(sharded) == [flat(alone[shard][step] for shard in shards) for step in range(2)]
    assert len(sharded) == 2


@pytest.mark.parametrize("data_parallel_size", [1, 2, 3])
def test_a_stream_is_completed_with_its_first_batches(data_parallel_size):
    batches = [[0, 1], [2, 3], [4, 5], [6, 0]]
    batches += batches[: -len(batches) % data_parallel_size]
    for make in (
        lambda: DataLoader(Stream(7), 2),
        lambda: [{"y": torch.tensor(values)} for values in ([0, 1], [2, 3], [4, 5], [6])],
        lambda: DataLoader([torch.tensor(values) for values in ([0, 1], [2, 3], [4, 5], [6, 0])], batch_size=None),
    ):
        assert read_shards(make, data_parallel_size) == [
            batches[shard::data_parallel_size] for shard in range(data_parallel_size)
        ]
        together = read(shard_loader(make(), data_parallel_size=data_parallel_size, shards=range(data_parallel_size)))
        assert together == [
            flat(batches[i : i + data_parallel_size]) for i in range(0, len(batches), data_parallel_size)
        ]


def test_a_stream_smaller_than_a_round_wraps_several_times():
    loader = shard_loader([torch.tensor([0, 1]), torch.tensor([2])], data_parallel_size=5, shards=range(5))
    assert read(loader) == [[0, 1, 2, 0, 0, 1, 2, 0, 0, 1]]


def test_a_stream_with_workers_keeps_one_shape():
    """Each worker ends on a short batch, which is then not the last."""
    loader = shard_loader(DataLoader(Stream(10), 2, num_workers=2), data_parallel_size=2, shards=range(2))
    batches = read(loader)
    assert [len(batch) for batch in batches] == [4] * len(batches)
    assert set(flat(batches)) == set(range(10))
    assert read(shard_loader(DataLoader(Stream(11), 2, num_workers=2), data_parallel_size=1, shards=range(1)))[:2] == [
        [0, 2],
        [1, 3],
    ]


def test_streams_of_the_users_own_batch_sizes_are_left_alone():
    """Packing gives batches whose rows are not samples; only the last can be short."""

    def pack(samples):
        return torch.tensor([samples])

    packed = list(shard_loader(DataLoader(Stream(8), 4, collate_fn=pack), data_parallel_size=1, shards=range(1)))
    assert [batch.tolist() for batch in packed] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    uneven = [torch.tensor([0, 1]), torch.tensor([2]), torch.tensor([3, 4])]
    assert read(shard_loader(uneven, data_parallel_size=1, shards=range(1))) == [[0, 1], [2], [3, 4]]
    with pytest.raises(DataError, match=r"have \[2, 1\] rows"):
        read(shard_loader(uneven, data_parallel_size=2, shards=range(2)))


def test_a_short_last_batch_of_another_length_repeats_its_own_rows():
    batches = [torch.zeros(4, 3), torch.arange(2).view(2, 1)]
    last = list(shard_loader(batches, data_parallel_size=1, shards=range(1)))[-1]
    assert last.tolist() == [[0], [1], [0], [1]]


def test_a_loop_may_change_its_batches():
    loader = shard_loader(
        [{"y": torch.tensor([1, 2])}, {"y": torch.tensor([3])}], data_parallel_size=1, shards=range(1)
    )
    seen = [batch.pop("y").add_(100).tolist() for batch in loader]
    assert seen == [[101, 102], [103, 101]]


def test_a_stream_is_read_one_round_and_one_batch_ahead():
    read_so_far = []

    def batches():
        for value in range(100):
            read_so_far.append(value)
            yield torch.tensor([value])

    next(iter(shard_loader(batches(), data_parallel_size=4, shards=range(4))))
    assert len(read_so_far) == 5


def test_an_exhausted_iterator_is_explained():
    loader = shard_loader(iter([torch.ones(1)]), data_parallel_size=1, shards=range(1))
    assert len(list(loader)) == 1
    with pytest.raises(DataError, match="an iterator, which lasts for one epoch"):
        list(loader)


@pytest.mark.parametrize("loader", [Numbers(3), {"x": torch.ones(2)}, "text", 3])
def test_what_is_no_loader_is_refused(loader):
    with pytest.raises(DataError, match=r"DataLoader"):
        shard_loader(loader, data_parallel_size=1, shards=range(1))


@pytest.fixture
def datasets():
    return pytest.importorskip("datasets")


def test_hugging_face_dataset(datasets):
    dataset = datasets.Dataset.from_dict({"y": list(range(10)), "text": [f"t{i}" for i in range(10)]}).with_format(
        "torch"
    )
    torch.manual_seed(0)
    order = flat(read(DataLoader(dataset, 2, shuffle=True)))
    torch.manual_seed(0)
    loader = shard_loader(DataLoader(dataset, 2, shuffle=True), data_parallel_size=2, shards=range(2))
    batches = list(loader)
    assert flat(batch["y"].tolist() for batch in batches) == order + order[:2]
    assert batches[0]["text"] == [f"t{i}" for i in order[:4]]


def test_hugging_face_stream(datasets):
    dataset = datasets.Dataset.from_dict({"y": list(range(10))}).to_iterable_dataset().with_format("torch")
    assert read_shards(lambda: DataLoader(dataset, 2), 2) == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]]


def test_error_of_a_worker_reaches_the_loop():
    class Damaged(Numbers):
        def __getitem__(self, index):
            if index == 4:
                raise RuntimeError("sample 4 is damaged")
            return index

    loader = shard_loader(DataLoader(Damaged(8), 2), data_parallel_size=2, shards=range(2))
    batches = iter(AsyncLoader(loader))
    assert next(batches).tolist() == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="sample 4 is damaged"):
        next(batches)


# What the log says of a loader


@pytest.mark.parametrize("data_parallel_size", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("count", [12, 13, 17, 24])
def test_the_description_says_what_becomes_of_the_last_rows(data_parallel_size, drop_last, count):
    makers = [lambda: DataLoader(Numbers(count), 4, drop_last=drop_last)]
    if not drop_last:
        makers.append(lambda: [torch.arange(i, min(i + 4, count)) for i in range(0, count, 4)])
    for make in makers:
        loader = shard_loader(make(), data_parallel_size=data_parallel_size, shards=range(data_parallel_size))
        said, steps = loader.describe(), read(loader)
        assert f"{len(steps)} step{'s' * (len(steps) != 1)} an epoch" in said
        assert {len(step) for step in steps} == {4 * data_parallel_size}
        size = (
            f"4 rows x {data_parallel_size} devices = {4 * data_parallel_size}" if data_parallel_size > 1 else "4 rows"
        )
        assert said.startswith(f"{size} in a step, ")
        missing, added = count - len(set(flat(steps))), len(flat(steps)) - count
        rows = lambda number: f"{number} row{'s' * (number != 1)}"  # noqa: E731
        assert (f", the last {rows(missing)} left out (drop_last)" in said) is (missing > 0)
        assert (f", the last completed with {rows(added)} of the epoch's start" in said) is (added > 0)
        assert not (missing or added) or said.count(",") == 2


@pytest.mark.parametrize(
    ("make", "described"),
    [
        (lambda: [{"x": torch.zeros(2)}, {"x": torch.zeros(3)}], "2 batches in a step, 1 step an epoch"),
        (
            lambda: DataLoader(Numbers(9), batch_sampler=BatchSampler(SubsetRandomSampler(range(9)), 2, True)),
            "2 rows x 2 devices = 4 in a step, 2 steps an epoch, the last 1 row left out (drop_last)",
        ),
        (
            lambda: DataLoader(Numbers(3), batch_sampler=[[0, 1], [2], [0]]),
            "2 batches in a step, 2 steps an epoch, the last completed with 1 batch of the epoch's start "
            "(they count; drop_last=True leaves it out)",
        ),
        (
            lambda: DataLoader(Stream(9), 2),
            "2 rows x 2 devices = 4 in a step, as many steps as the stream has batches for, the last completed from "
            "its start",
        ),
        (
            lambda: DataLoader(Stream(9), 2, drop_last=True),
            "2 rows x 2 devices = 4 in a step, as many steps as the stream has batches for, an incomplete last step is "
            "left out (drop_last)",
        ),
        (lambda: iter([torch.zeros(2)]), "2 batches in a step, as many steps as the stream has batches for, the last "),
    ],
)
def test_descriptions_of_what_is_not_a_plain_loader(make, described):
    assert shard_loader(make(), data_parallel_size=2, shards=range(1)).describe().startswith(described)


def test_a_description_does_not_ask_a_stream_for_its_length(recwarn):
    class Approximate(Stream):
        def __len__(self):
            return 3

    class Broken(Numbers):
        def __len__(self):
            raise NotImplementedError

    loader = shard_loader(DataLoader(Approximate(12), 2), data_parallel_size=2, shards=range(2))
    assert "as many steps as the stream" in loader.describe()
    assert flat(read(loader)) == list(range(12))
    assert not recwarn.list
    broken = shard_loader(DataLoader(Broken(4), 2, sampler=[0, 1]), data_parallel_size=1, shards=range(1))
    assert broken.describe() == "2 rows in a step, 1 step an epoch"
