"""A loader that goes on where another one was left, in the middle of an epoch and at another number of devices."""

import itertools
import json

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from tests.unit.data.numbered_samples import Stream
from torchacc.data import AsyncLoader, shard_loader
from torchacc.errors import DataError


class Numbers(Dataset):
    """Gives its indices, and notes which it was asked for."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.loaded: list[int] = []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.loaded.append(index)
        return index


class ShuffledStream(Stream):
    """Draws from the global generator when it is first read."""

    def __iter__(self):
        yield from torch.randperm(self.count).tolist()


def shuffled(count=26, **options):
    return DataLoader(Numbers(count), 2, shuffle=True, **options)


def with_own_generator(count=26, **options):
    return shuffled(count, generator=torch.Generator().manual_seed(9), **options)


MAKERS = {
    "sequential": lambda: DataLoader(Numbers(26), 2),
    "shuffled": shuffled,
    "own generator": with_own_generator,
    "workers": lambda: shuffled(num_workers=2),
    "persistent workers": lambda: with_own_generator(num_workers=1, persistent_workers=True),
    "drop_last": lambda: shuffled(25, drop_last=True),
    "ragged": lambda: shuffled(25),
    "draws as it goes": lambda: DataLoader(
        Numbers(26),
        2,
        sampler=RandomSampler(
            Numbers(26), replacement=True, num_samples=300, generator=torch.Generator().manual_seed(1)
        ),
    ),
    "weighted": lambda: DataLoader(Numbers(26), 2, sampler=WeightedRandomSampler(torch.arange(1.0, 27.0), 26)),
    "batch sampler": lambda: DataLoader(
        Numbers(26), batch_sampler=BatchSampler(RandomSampler(Numbers(26)), 3, drop_last=False)
    ),
    "no collation": lambda: DataLoader([torch.tensor([i, -i]) for i in range(13)], batch_size=None, shuffle=True),
    "stream": lambda: DataLoader(Stream(25), 2),
    "stream with drop_last": lambda: DataLoader(Stream(25), 2, drop_last=True),
    "shuffled stream": lambda: DataLoader(ShuffledStream(26), 2),
    "stream with workers": lambda: DataLoader(Stream(25), 2, num_workers=2),
    "list": lambda: [torch.tensor([2 * i, 2 * i + 1]) for i in range(13)],
}


def loader_for(make, data_parallel_size: int, *, prefetch: int = 0, agree=None) -> AsyncLoader:
    """Return the loader of one process that feeds every device."""
    sharded = shard_loader(make(), data_parallel_size=data_parallel_size, shards=range(data_parallel_size), agree=agree)
    return AsyncLoader(sharded, prefetch=prefetch)


def batches_of(loader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def take(loader, count: int) -> list[list[int]]:
    return batches_of(itertools.islice(iter(loader), count))


def flat(batches) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def through_json(loader) -> dict:
    return json.loads(json.dumps(loader.state_dict()))


def resumed(make, data_parallel_size: int, state, *, prefetch: int = 0, seed: int = 77) -> AsyncLoader:
    """Return a fresh loader that goes on from a state, in a process whose random state is elsewhere."""
    torch.manual_seed(seed)
    loader = loader_for(make, data_parallel_size, prefetch=prefetch)
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("seen", [0, 1, 3, 5])
def test_the_rest_of_the_epoch_and_those_that_follow(name, seen):
    """At the same number of devices nothing shows of the interruption, if the random state is put back as well."""
    make = MAKERS[name]
    torch.manual_seed(0)
    plain = loader_for(make, 2)
    batches = iter(plain)
    before = take(batches, seen)
    state, random = through_json(plain), torch.get_rng_state()
    rest = batches_of(batches)
    following = [batches_of(plain) for _ in range(2)]

    loader = resumed(make, 2, state)
    torch.set_rng_state(random)
    again = iter(loader)
    assert torch.equal(torch.get_rng_state(), random)
    assert batches_of(again) == rest
    assert [batches_of(loader) for _ in range(2)] == following
    assert len(before) == seen


@pytest.mark.parametrize("prefetch", [1, 4])
@pytest.mark.parametrize("name", ["shuffled", "workers", "stream"])
def test_what_is_only_ready_was_not_seen(name, prefetch):
    make = MAKERS[name]
    torch.manual_seed(0)
    plain = batches_of(loader_for(make, 2))
    torch.manual_seed(0)
    loader = loader_for(make, 2, prefetch=prefetch)
    batches = iter(loader)
    seen = take(batches, 3)
    state = through_json(loader)
    assert seen == plain[:3]
    assert batches_of(resumed(make, 2, state, prefetch=prefetch)) == plain[3:]
    assert batches_of(batches) == plain[3:]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("sizes", [(4, 2, 1, 3), (1, 4), (3, 2)])
def test_another_number_of_devices_goes_on_where_the_last_one_was(name, sizes):
    make = MAKERS[name]
    torch.manual_seed(0)
    order = flat(batches_of(loader_for(make, 1)))
    torch.manual_seed(0)
    loader = loader_for(make, sizes[0])
    seen: list[int] = []
    for data_parallel_size in sizes[1:]:
        seen += flat(take(loader, 1))
        loader = resumed(make, data_parallel_size, through_json(loader))
    rest = flat(batches_of(loader))
    everything = seen + rest
    if "drop_last" in name:
        assert everything == order[: len(everything)]
        assert 0 <= len(order) - len(everything) < 2 * sizes[-1]  # less than a global batch
    else:
        assert everything[: len(order)] == order
        wrapped = everything[len(order) :]
        assert set(wrapped) <= set(order[: 3 * sizes[-1]])  # completed with the start of the epoch, not of the rest
        assert len(rest) % sizes[-1] == 0


def test_the_last_round_of_one_size_leaves_nothing_to_another():
    loader = loader_for(lambda: DataLoader(Numbers(25), 2), 4)
    batches = iter(loader)
    assert len(take(batches, 4)) == 4  # the last global batch is complete by wrapping around
    state = through_json(loader)
    for data_parallel_size in (1, 3, 4):
        other = resumed(lambda: DataLoader(Numbers(25), 2), data_parallel_size, state)
        assert batches_of(other) == []
        assert other.epochs_done == 1
        assert flat(batches_of(other))[:25] == list(range(25))


def test_what_drop_last_leaves_goes_to_a_smaller_size():
    make = lambda: DataLoader(Numbers(26), 2, drop_last=True)  # noqa: E731
    loader = loader_for(make, 4)
    assert len(take(loader, 9)) == 3
    state = resumed(make, 4, through_json(loader)).state_dict()
    loader = loader_for(make, 4)
    assert len(take(iter(loader), 3)) == 3
    assert batches_of(resumed(make, 4, loader.state_dict())) == []
    assert batches_of(resumed(make, 1, loader.state_dict())) == [[24, 25]]
    assert state["epochs"] == 1


def test_seen_samples_are_not_loaded_again():
    dataset = Numbers(40)
    make = lambda: DataLoader(dataset, 2, shuffle=True)  # noqa: E731
    torch.manual_seed(0)
    loader = loader_for(make, 2)
    seen = flat(take(loader, 6))
    state = through_json(loader)
    dataset.loaded.clear()
    rest = flat(batches_of(resumed(make, 2, state)))
    assert dataset.loaded == rest
    assert sorted(seen + rest) == list(range(40))


def test_a_state_at_the_end_of_an_epoch():
    """Before the loop has heard of the end, the epoch ends at once; after it, the next one begins."""
    torch.manual_seed(0)
    plain = loader_for(with_own_generator, 2)
    epochs = [batches_of(plain) for _ in range(3)]
    loader = loader_for(with_own_generator, 2)
    assert take(batches := iter(loader), len(loader)) == epochs[0]
    state = through_json(loader)
    other = resumed(with_own_generator, 2, state)
    assert (other.epochs_done, batches_of(other), other.epochs_done) == (0, [], 1)
    assert [batches_of(other) for _ in range(2)] == epochs[1:]

    assert next(batches, None) is None
    state = through_json(loader)
    other = resumed(with_own_generator, 2, state)
    assert other.epochs_done == 1
    assert other.state_dict() == state
    assert [batches_of(other) for _ in range(2)] == epochs[1:]
    assert other.epochs_done == 3


def test_a_state_before_the_first_batch():
    torch.manual_seed(3)
    fresh = loader_for(shuffled, 2)
    unbegun = through_json(fresh)
    random = torch.get_rng_state()
    begun = iter(fresh)
    state = through_json(fresh)
    expected = batches_of(begun)
    assert batches_of(resumed(shuffled, 2, state)) == expected
    other = resumed(shuffled, 2, unbegun)
    torch.set_rng_state(random)
    assert batches_of(other) == expected


def test_a_state_that_was_loaded_can_be_saved_again_before_the_loop():
    torch.manual_seed(0)
    loader = loader_for(shuffled, 2)
    take(loader, 2)
    state = through_json(loader)
    assert resumed(shuffled, 3, state).state_dict() == state


@pytest.mark.parametrize("every", [1, 3, 7, 8])
def test_a_loop_interrupted_again_and_again(every):
    torch.manual_seed(0)
    plain = loader_for(shuffled, 2)
    expected = [batches_of(plain) for _ in range(3)]
    torch.manual_seed(0)
    loader, random = loader_for(shuffled, 2), torch.get_rng_state()
    got: list[list[list[int]]] = [[], [], []]
    while loader.epochs_done < 3:
        torch.set_rng_state(random)
        for batch in itertools.islice(iter(loader), every):
            got[loader.epochs_done].append(batch.tolist())
        state, random = through_json(loader), torch.get_rng_state()
        loader = resumed(shuffled, 2, state)
    assert got == expected


# Epochs that are set


def test_set_epoch_goes_on_with_the_same_epoch_and_leaves_another():
    torch.manual_seed(5)
    plain = loader_for(shuffled, 2)
    orders = []
    for epoch in range(3):
        plain.set_epoch(epoch)
        orders.append(batches_of(plain))
    torch.manual_seed(5)
    loader = loader_for(shuffled, 2)
    loader.set_epoch(1)
    take(loader, 2)
    state = through_json(loader)

    other = resumed(shuffled, 2, state)
    assert batches_of(other) == orders[1][2:]  # also where nobody calls set_epoch
    other = resumed(shuffled, 2, state)
    for epoch, expected in ((1, orders[1][2:]), (2, orders[2])):
        other.set_epoch(epoch)
        assert batches_of(other) == expected


def test_leaving_a_loaded_epoch_is_reported(caplog):
    torch.manual_seed(5)
    loader = loader_for(shuffled, 2)
    loader.set_epoch(1)
    batches = iter(loader)
    take(batches, 2)
    other = resumed(shuffled, 2, through_json(loader))
    other.set_epoch(2)
    assert "set_epoch(2) leaves the epoch that was loaded, 1, after 4 of its 13 batches" in caplog.text
    assert len(flat(batches_of(other))) == 28
    caplog.clear()
    batches_of(batches)
    resumed(shuffled, 2, through_json(loader)).set_epoch(2)
    assert caplog.text == ""


def test_set_epoch_reaches_the_samplers_again():
    class ByEpoch(Sampler):
        epoch = 0

        def __len__(self):
            return 12

        def __iter__(self):
            return iter(torch.randperm(12, generator=torch.Generator().manual_seed(self.epoch)).tolist())

        def set_epoch(self, epoch):
            self.epoch = epoch

    make = lambda: DataLoader(Numbers(12), 2, sampler=ByEpoch())  # noqa: E731
    loader = loader_for(make, 2)
    loader.set_epoch(4)
    batches = iter(loader)
    take(batches, 1)
    state = through_json(loader)
    assert batches_of(resumed(make, 2, state)) == batches_of(batches)


# Several processes


def test_processes_have_one_state_and_go_on_together():
    """Also where each is seeded by its rank."""
    payloads: list[bytes] = []

    def rank_loader(rank, data_parallel_size):
        calls = itertools.count()

        def agree(payload):
            position = next(calls)
            if rank == 0:
                payloads.append(payload)
            return payloads[position]

        sharded = shard_loader(
            shuffled(), data_parallel_size=data_parallel_size, shards=range(rank, rank + 1), agree=agree
        )
        return AsyncLoader(sharded, prefetch=0)

    def run(data_parallel_size, count, state=None):
        payloads.clear()
        seen, states = [], []
        for rank in range(data_parallel_size):
            torch.manual_seed(100 * data_parallel_size + rank)
            loader = rank_loader(rank, data_parallel_size)
            if state is not None:
                loader.load_state_dict(state)
            random = torch.get_rng_state()
            batches = iter(loader)
            assert state is None or torch.equal(torch.get_rng_state(), random)
            seen.append(take(batches, count))
            states.append(through_json(loader))
        assert all(other == states[0] for other in states)
        return flat(flat(zip(*seen, strict=True))), states[0]

    first, state = run(2, 1)
    second, _ = run(3, 6, state)
    assert sorted((first + second)[:26]) == list(range(26))
    assert (first + second)[26:] == first[:2]


# Wrong use


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: shuffled(30), "dataset length 26, here 30, number of batches 13, here 15"),
        (lambda: DataLoader(Numbers(26), 3, shuffle=True), "4 samples, in batches of 2, .* batch_size=3"),
        (lambda: shuffled(drop_last=True), "drop_last False, here True"),
        (lambda: [torch.ones(2)] * 4, "dataset length 26, here 4, number of batches 13, here 4"),
    ],
)
def test_another_loader_is_refused(make, message):
    loader = loader_for(shuffled, 2)
    take(loader, 1)
    with pytest.raises(DataError, match=message):
        loader_for(make, 2).load_state_dict(through_json(loader))


def test_another_batch_size_goes_on_at_the_same_sample():
    loader = loader_for(lambda: DataLoader(Numbers(200), 2, shuffle=True), 4)
    torch.manual_seed(3)
    whole = [sample for batch in DataLoader(Numbers(200), 2, shuffle=True) for sample in batch.tolist()]
    torch.manual_seed(3)
    take(loader, 5)  # global batches of 8 samples
    again = loader_for(lambda: DataLoader(Numbers(200), 8, shuffle=True), 1)
    again.load_state_dict(through_json(loader))
    assert [sample for batch in again for sample in batch.tolist()] == whole[40:]


def test_another_number_of_workers_reads_a_stream_in_another_order():
    loader = loader_for(lambda: DataLoader(Stream(20), 2, num_workers=2), 2)
    state = through_json(loader)
    with pytest.raises(DataError, match="num_workers 2, here 0"):
        loader_for(lambda: DataLoader(Stream(20), 2), 2).load_state_dict(state)


@pytest.mark.parametrize("state", [{}, None, {"epoch": 3}, "text"])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(DataError, match=r"not the state_dict\(\) of a loader"):
        loader_for(shuffled, 2).load_state_dict(state)


def test_an_order_that_is_not_found_again_is_refused():
    class Unknown(Sampler):
        runs = itertools.count(1)

        def __len__(self):
            return 12

        def __iter__(self):
            first = next(self.runs)
            return iter([(first + i) % 12 for i in range(12)])

    make = lambda: DataLoader(Numbers(12), 2, sampler=Unknown())  # noqa: E731
    loader = loader_for(make, 2)
    take(loader, 1)
    other = resumed(make, 2, through_json(loader))
    with pytest.raises(DataError, match="order of the interrupted epoch is not found again.*give the sampler a `gen"):
        iter(other)


def test_the_position_of_a_strangers_loader_is_not_known():
    with pytest.raises(DataError, match="reads a list, whose position"):
        AsyncLoader([1, 2]).state_dict()


# A global batch of another size


def with_rows(size: int, count: int = 48, stream: bool = False) -> DataLoader:
    return DataLoader(Stream(count) if stream else Numbers(count), size)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ((4, 2), (4, 1), "with 4 rows x 2 devices = 8 in a step, and goes on with 4 rows: "),
        ((4, 2), (2, 2), "with 4 rows x 2 devices = 8 in a step, and goes on with 2 rows x 2 devices = 4: "),
        ((4, 2), (1, 3), "with 4 rows x 2 devices = 8 in a step, and goes on with 1 row x 3 devices = 3: "),
        ((4, 2), (4, 2), None),
        ((4, 2), (2, 4), None),
        ((2, 2), (4, 1), None),
    ],
)
def test_another_global_batch_is_told_and_loses_no_row(caplog, before, after, said):
    loader = loader_for(lambda: with_rows(before[0]), before[1])
    seen = flat(take(loader, 2))
    state = through_json(loader)
    other = loader_for(lambda: with_rows(after[0]), after[1])
    other.load_state_dict(state)
    assert len(caplog.records) == (said is not None)
    assert (said or "") in caplog.text
    rest = flat(batches_of(other))
    assert (seen + rest)[:48] == list(range(48))
    assert set(rest[48 - len(seen) :]) <= set(range(12))  # what completes the last step
    caplog.clear()  # what it has gone on with is what the next one compares with
    loader_for(lambda: with_rows(after[0]), after[1]).load_state_dict(through_json(other))
    assert not caplog.records


def test_another_global_batch_of_a_stream_is_told(caplog):
    loader = loader_for(lambda: with_rows(4, stream=True), 2)
    take(loader, 2)
    loader_for(lambda: with_rows(4, stream=True), 3).load_state_dict(through_json(loader))
    assert "saved with 4 rows x 2 devices = 8 in a step, and goes on with 4 rows x 3 devices" in caplog.text


def test_a_position_that_does_not_say_its_devices_is_taken_as_it_is(caplog):
    loader = loader_for(lambda: with_rows(4), 2)
    take(loader, 2)
    state = through_json(loader)
    del state["loader"]["num_data_shards"]  # as of a version that did not note it
    other = resumed(lambda: with_rows(4), 3, state)
    assert not caplog.records
    assert other.state_dict() == state
