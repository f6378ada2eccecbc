"""HindsightAugmentation with collectors of one and of several processes."""

from collections import Counter
from functools import partial

import pytest
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer

from support.factories import make_augmentation, start_processes_from_a_server
from support.oracle import RELABELLED
from support.tape import check, collect, length_of, make_serial, make_tape, places
from torchrl_her import EnvReward

quick_start = pytest.fixture(scope="module", autouse=True)(start_processes_from_a_server)


def make_buffer(kind=TensorDictReplayBuffer, mask_key=None, **options):
    hindsight = make_augmentation(EnvReward(make_tape), mask_key=mask_key)
    return kind(storage=LazyTensorStorage(10_000), transform=hindsight, batch_size=32, **options)


def check_rows(rb, environments, copies=4):
    """Check each row, that each transition is stored once and in k copies, and that episodes are whole."""
    rows = rb[:]
    assert check(rows).relabelled == copies * len(rows) / (copies + 1)
    counts = Counter(zip(places(rows), rows[RELABELLED].flatten().tolist(), strict=True))
    for number, episode in {(number, episode) for (number, episode, _), _ in counts}:
        assert number in environments
        for state in range(length_of(number, episode)):
            assert counts[(number, episode, state), False] == 1
            assert counts[(number, episode, state), True] == copies
    return len(rows)


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_a_collector_of_one_environment_writes_into_the_buffer(kind):
    rb = make_buffer(kind)
    collect(make_tape(3), 10, 20, replay_buffer=rb)
    assert check_rows(rb, {3}) >= 5 * 180


@pytest.mark.parametrize("options", [{}, {"track_traj_ids": False}, {"split_trajs": True}])
def test_batches_of_a_collector_are_written_flattened(options):
    rb = make_buffer(mask_key=("collector", "mask") if "split_trajs" in options else None)
    for data in collect(make_serial(*range(4)), 40, 20, **options):
        rb.extend(data.reshape(-1))
    assert check_rows(rb, range(4)) >= 5 * 740


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("shared", [True, False])
def test_processes_write_into_a_shared_buffer_and_each_holds_back_its_own_transitions(kind, shared):
    rb = make_buffer(shared=shared)
    collect([partial(make_tape, 1), partial(make_tape, 2)], 40, 20, kind, replay_buffer=rb)
    assert check_rows(rb, {1, 2}) >= 5 * 700
