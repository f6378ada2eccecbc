"""Concurrent reads and writes of the goal table, interleaved at every operation."""

import copy
import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.envs import MultiStepTransform

from support.factories import make_transform
from support.traffic import Source, check, check_one_by_one, reward_of
from torchrl_her.diagnosis.reward_check import RewardCheck
from torchrl_her.diagnosis.sample_counts import SampleCounts
from torchrl_her.n_step import STEPS, NStepReward
from torchrl_her.relabel import OneStepReward, SampledBatch


@pytest.fixture(autouse=True)
def without_diagnosis(monkeypatch):
    """Switch off checks that read nothing new from the table: counting samples and comparing rewards."""
    monkeypatch.setattr(SampleCounts, "is_due", lambda self, transitions: False)
    monkeypatch.setattr(RewardCheck, "check", lambda self, tensordict, written: None)


class Between(TorchDispatchMode):
    """Calls a function after each operation of a block, as another thread could, with the operation's number."""

    def __init__(self, do):
        super().__init__()
        self.do, self.operations = do, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        self.do(self.operations)
        return result


def table_that_wraps_round(strategy="future"):
    """Return chunks to write, and a transform in whose table the longest episodes overlap their own rows."""
    transform = make_transform(reward=reward_of, strategy=strategy, her_ratio=1.0, capacity=145)
    source = Source(0, 3, 30)
    return transform, [source.next() for _ in range(40)]


def check_sample(batch, strategy):
    check_one_by_one(batch[::20], strategy)
    return check(batch, strategy)


@pytest.mark.parametrize("strategy", ["future", "random"])
def test_a_sample_between_any_two_operations_of_a_write_is_correct(strategy):
    transform, chunks = table_that_wraps_round(strategy)
    stored, relabelled = transform.inv(chunks[0].copy()), 0
    for chunk in chunks[1:]:

        def sample(_, stored=stored):
            nonlocal relabelled
            relabelled += check_sample(transform(stored), strategy)

        with Between(sample) as between:
            written = transform.inv(chunk.copy())
        assert between.operations > 20
        stored = torch.cat([stored, written])[-360:]
    assert relabelled > 10_000


def reads_with_a_write_between(transform, chunks, read):
    """Write chunks, and at intervals yield the stored rows ``[n]`` and the result of ``read(transform, rows)``.

    The read is repeated, each time with a copy of the transform, so that three more chunks are written after each of
    its operations in turn.
    """
    stored = transform.inv(chunks[0].copy())
    for begun, chunk in enumerate(chunks[1:-3], start=2):
        stored = torch.cat([stored, transform.inv(chunk.copy())])[-360:]
        if begun % 4:
            continue
        for operation in itertools.count(1):
            copied = copy.deepcopy(transform)

            def write(at, copied=copied, operation=operation, following=chunks[begun : begun + 3]):
                if at == operation:
                    for each in following:
                        copied.inv(each.copy())

            with Between(write) as between:
                result = read(copied, stored)
            yield stored, result
            if operation == between.operations:
                break


def test_there_is_no_version_while_something_is_written():
    transform, chunks = table_that_wraps_round()
    transform.inv(chunks[0].copy())
    table = transform.table
    for change in (
        lambda: table.publish([(table.open_episodes(1), torch.zeros(5, *table.goals.shape[1:]), 0)]),
        lambda: table.load_state_dict(table.state_dict()),
        table.clear,
    ):
        before, seen = table.version, []
        with Between(lambda _, seen=seen: seen.append(table.version)):
            change()
        assert None in seen
        assert set(seen) <= {None, before}
        assert table.version not in (None, before)


@pytest.mark.parametrize("strategy", ["future", "random"])
def test_a_sample_is_correct_whatever_is_written_between_two_of_its_operations(strategy):
    reads = reads_with_a_write_between(*table_that_wraps_round(strategy), lambda transform, stored: transform(stored))
    assert sum(check_sample(batch, strategy) for _, batch in reads) > 10_000


def test_the_steps_of_a_window_are_correct_whatever_is_written_between_two_operations():
    steps_of_rows = torch.randint(1, 4, (360,))

    def read_windows(transform, stored):
        n_step = NStepReward(OneStepReward(transform.reward, transform.keys), False, MultiStepTransform(3, 0.9))
        windows = {STEPS: steps_of_rows[: len(stored)]}
        batch = SampledBatch(
            stored, windows, None, transform.table, *stored["hindsight_stamp"].unbind(1), longest_window=3
        )
        whole = n_step.read_goals(batch)
        return batch.outcomes, whole

    whole_windows = 0
    for stored, (outcomes, whole) in reads_with_a_write_between(*table_that_wraps_round(), read_windows):
        ahead = torch.minimum(torch.arange(3), steps_of_rows[: len(stored), None] - 1)  # [n, 3]
        expected = stored["next", "achieved_goal"].unsqueeze(1).repeat(1, 3, 1)  # [n, 3, goal]
        expected[..., 2::3] += ahead.unsqueeze(-1)
        assert torch.equal(outcomes[whole], expected[whole])
        whole_windows += int(whole.sum())
    assert whole_windows > 10_000
