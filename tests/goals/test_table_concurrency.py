"""Samples are correct while another thread writes: interleaved at every operation, and in parallel."""

import copy
import itertools
import random
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from torchrl.envs import Compose, MultiStepTransform

from support.dispatch import Operations
from support.factories import make_transform
from support.traffic import Source, check, reward_of
from torchrl_her.goals.names import name_of
from torchrl_her.goals.table import GoalTable, Steps

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of a table that is too small on purpose


def small_table(strategy):
    """Return a transform whose table the episodes do not fit into, chunks to write, and a check of samples."""
    hindsight = make_transform(
        reward=reward_of, strategy="random" if strategy == "random" else "future", her_ratio=1.0, capacity=145
    )
    source = Source(0, 3, 30)
    chunks = [source.next().reshape(3, 30) for _ in range(40)]
    if strategy == "n-step":
        return Compose(MultiStepTransform(3, 0.5), hindsight), chunks, partial(check, n=3, gamma=0.5)
    return hindsight, chunks, partial(check, strategy=strategy)


@pytest.mark.parametrize("strategy", ["future", "random"])
def test_a_sample_between_any_two_operations_of_a_write_is_correct(strategy):
    transform, chunks, check_sample = small_table(strategy)
    stored, relabelled = transform.inv(chunks[0].copy()).reshape(-1), 0
    for chunk in chunks[1::2]:

        def sample(_, stored=stored):
            nonlocal relabelled
            relabelled += check_sample(transform(stored))

        with Operations(sample) as between:
            written = transform.inv(chunk.copy())
        assert len(between.seen) > 20
        stored = torch.cat([stored, written.reshape(-1)])[-360:]
    assert relabelled > 10_000


@pytest.mark.parametrize("strategy", ["future", "random", "n-step"])
def test_a_sample_is_correct_whatever_is_written_between_two_of_its_operations(strategy):
    """The sample is repeated with a copy of the transform. Three chunks are written after each operation in turn."""
    transform, chunks, check_sample = small_table(strategy)
    stored, relabelled = transform.inv(chunks[0].copy()).reshape(-1), 0
    for begun, chunk in enumerate(chunks[1:-3], start=2):
        stored = torch.cat([stored, transform.inv(chunk.copy()).reshape(-1)])[-360:]
        if begun % 9:
            continue
        for operation in itertools.count(1):
            copied = copy.deepcopy(transform)

            def write(at, copied=copied, operation=operation, following=chunks[begun : begun + 3]):
                if at == operation:
                    for each in following:
                        copied.inv(each.copy())

            with Operations(write) as between:
                batch = copied(stored)
            relabelled += check_sample(batch)
            if operation >= len(between.seen):
                break
    assert relabelled > 10_000


def test_a_goal_that_is_read_during_a_write_is_complete_or_not_found():
    """Goals are so large that writing and reading them overlap, within one operation."""
    table = GoalTable(8, (50_000,), torch.float32, torch.device("cpu"))
    stop = threading.Event()

    def write():
        while not stop.is_set():
            episode, zero, step = np.array([table.new_episodes(1)]), np.zeros(1, np.int64), np.arange(4)
            steps = Steps(
                name_of(episode, step), 0 * step, episode, zero, zero + 4, zero == 0, np.zeros((1, 3), np.int64)
            )
            table.append(steps, torch.full((4, 50_000), float(episode[0] % 2**20)))
            time.sleep(random.random() / 1000)

    writer = threading.Thread(target=write)
    writer.start()
    read = overtaken = 0
    try:
        while read < 3000 or overtaken < 300:
            assert writer.is_alive()
            episode = table.episode_ids[1] - torch.randint(3, (1,))
            of_episode = table.find(episode)
            goals, found = table.read(of_episode, episode, torch.randint(4, (1,)))  # takes less time than a write
            lowest, highest = goals.aminmax(dim=1)
            expected = (episode % 2**20).float()
            assert not found or lowest == highest == expected
            read, overtaken = read + int(found), overtaken + int(~found)
    finally:
        stop.set()
        writer.join()
