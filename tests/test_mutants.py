"""Tests of the oracles: they must detect mutants of the package, in each of which one function is replaced."""

import functools
import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from support import oracle
from support.mutants import (
    COMMON,
    PUBLISHED_AT_EVERY_WRITE,
    all_of,
    first_failure,
    followed_by,
    future_from,
    read_as,
    replaced,
    stored_again,
    without_seams,
)
from support.n_step_oracle import STREAMS, NStepOracle
from support.oracle import check_share
from support.streams import LAYOUTS, ROOT_FLAGS, Stream, random_stream
from torchrl_her import CompactGoals, Final, HERTransform, StrategyInput, n_step, relabel, transform
from torchrl_her.episodes import tracker
from torchrl_her.episodes.tracker import EpisodeTracker
from torchrl_her.goals.draw import Draw
from torchrl_her.goals.table import GoalTable
from torchrl_her.n_step import FIRST_REWARD, GAMMA, LAST_FLAGS, STEPS, NStepReward
from torchrl_her.relabel import OneStepReward, where


def goals_of_the_root(written, tensordict, keys, *_):
    return written._replace(goals=tensordict.get(keys.achieved).reshape(written.goals.shape))


def drawn_with(checks_owner, checks_length):
    """Return a mutant in which `draw_from_table` lacks one of its checks."""

    def mutated(strategies, table, her_ratio, episode, step, _):
        (strategy,) = strategies.values()
        start, length = table.find(episode)
        rows = strategy.select(StrategyInput(episode, step, start, length, table.owners, table.size, table.starts))
        drawn = torch.rand(step.shape) < her_ratio
        if checks_length:
            drawn &= step < length
        goals, owners = table.read(rows)
        if checks_owner and strategy.same_episode:
            drawn &= (owners == episode) & table.start_at(episode, start)
        return Draw(episode, step, length, drawn, drawn, goals[None], None, None)

    return replaced(transform, "draw_from_table", lambda _: mutated)


def without_goals_of_lanes(leave_open):
    def mutated(self, lane, written):
        lane.key = lane.key[0], b""
        leave_open(self, lane, written)

    return mutated


def drawn_for_a_prefix(draw):
    def mutated(strategies, table, her_ratio, episode, step, _):
        drawn = draw(strategies, table, 1.0, episode, step)
        return drawn._replace(relabelled=drawn.relabelled & (torch.arange(len(step)) < her_ratio * len(step)))

    return mutated


restored_with = functools.partial(followed_by, CompactGoals, "forward")
MUTANTS = COMMON | {
    "reads the achieved goal at the root": followed_by(relabel, "read_transitions", goals_of_the_root),
    "draws the future from t-1 on": future_from(
        lambda given: (given.step - 1).clamp(min=0), lambda given: given.length
    ),
    "mistakes the last step but one for the last": replaced(
        Final, "select", lambda _: lambda self, given: given.start + (given.length - 2).clamp(min=0)
    ),
    "ignores lanes": read_as(
        lambda written: without_seams(written)._replace(begins=np.zeros_like(written.begins), trajectory=None)
    ),
    "joins episodes across a seam between two writes": all_of(
        replaced(EpisodeTracker, "_take", lambda take: lambda self, key, lane=None: take(self, (key[0], b""), lane)),
        replaced(EpisodeTracker, "_leave_open", without_goals_of_lanes),
    ),
    "ignores the end of episodes": read_as(lambda written: written._replace(done=np.zeros_like(written.done))),
    "reads a lane backwards": followed_by(
        tracker,
        "_cut_into_runs",
        lambda _, written, *others: [(row, row + 1) for row in reversed(range(len(written.done)))],
    ),
    "serves stale rows": drawn_with(checks_owner=False, checks_length=True),
    "relabels transitions that are not in the table yet": drawn_with(checks_owner=True, checks_length=False),
    "writes into the storage's own tensordict": followed_by(
        HERTransform, "_unpack", lambda unpacked, self, data: (replace(unpacked[0], data=data), unpacked[1])
    ),
    "recomputes rewards that keep their goal": replaced(
        OneStepReward,
        "recompute",
        lambda recompute: lambda self, batch, relabelled: recompute(self, batch, torch.ones_like(relabelled)),
    ),
    "restores the flags of the next step at the root": restored_with(
        lambda sample, *_: sample.update({flag: sample["next", flag] for flag in ROOT_FLAGS})
    ),
    "restores another goal under next": restored_with(
        lambda sample, *_: sample.set(("next", "desired_goal"), sample["desired_goal"] * 0)
    ),
    "stores entries that should be left out": replaced(CompactGoals, "_inv_call", lambda _: lambda self, data: data),
    "publishes running episodes at every write": PUBLISHED_AT_EVERY_WRITE,
    "publishes goals in another order": replaced(
        GoalTable,
        "publish",
        lambda publish: lambda self, episodes: publish(self, [(e, goals.flip(0), n) for e, goals, n in episodes]),
    ),
}


def keep_flags_of_first_step(_, self, batch, relabelled):
    for key in self.keys.flags:
        batch.data.set(key, where(relabelled, batch.data.get(key), batch.stored[key]))


def truncate_after_the_end(_, self, batch, relabelled):
    last = batch.data.get(LAST_FLAGS)[..., 2:]
    batch.data.set(self.keys.truncated, where(relabelled, last, batch.data.get(self.keys.truncated)))


def take_last_reward(_, self, batch, relabelled):
    rewards, _ = self._evaluate(batch.data.get(self.keys.desired), batch.outcomes, None)
    batch.data.set(FIRST_REWARD, where(relabelled, rewards[:, -1:], batch.data.get(FIRST_REWARD)))


def first_end_alone(rewards_and_ends, *_):
    rewards_and_ends[1][:, 1:] = False
    return rewards_and_ends


def outcomes_of_a_step_later(read_goals):
    def mutated(self, batch):
        later = replace(batch, step=batch.step + 1)
        read_goals(self, later)
        whole = read_goals(self, batch)
        batch.outcomes = later.outcomes
        return whole

    return mutated


def available_by_the_last_step(_, self, batch):
    start, length = batch.table.find(batch.episode)
    end = batch.step + batch.stored[STEPS].reshape(-1)
    return (batch.table.owners[(start + end - 1) % batch.table.capacity] == batch.episode) & (end <= length)


def ahead(ends):
    return torch.arange(ends.shape[1])


def counted(count):
    return replaced(n_step, "steps_that_count", lambda _: count)


recomputed_and = functools.partial(followed_by, NStepReward, "recompute")
N_STEP_MUTANTS = {
    "sums on after the end": counted(lambda steps, ends: ahead(ends) < steps),
    "leaves the end out of the sum": counted(lambda steps, ends: (ahead(ends) < steps) & (ends.cumsum(1) == 0)),
    "counts the repeated last step": counted(lambda steps, ends: ends.cumsum(1) - ends.long() == 0),
    "does not discount": replaced(
        n_step, "discounted_sum", lambda total: lambda rewards, counts, gamma: total(rewards, counts, 1.0)
    ),
    "sums over the outcomes of a step later": replaced(NStepReward, "read_goals", outcomes_of_a_step_later),
    "keeps the flags of the first step": recomputed_and(keep_flags_of_first_step),
    "mistakes one flag of the last step for another": followed_by(
        NStepReward, "keep_flags", lambda _, self, data: data.set(LAST_FLAGS, data.get(LAST_FLAGS).flip(-1))
    ),
    "truncates windows that the new goal ended earlier": recomputed_and(truncate_after_the_end),
    "sees an end only at the first step": followed_by(NStepReward, "_evaluate", first_end_alone),
    "keeps the number of steps": stored_again(NStepReward, "recompute", lambda keys: STEPS),
    "keeps gamma of all steps": stored_again(NStepReward, "recompute", lambda keys: GAMMA),
    "mistakes the last reward for the first": recomputed_and(take_last_reward),
    "relabels windows that have partly left the table": followed_by(
        NStepReward, "read_goals", available_by_the_last_step
    ),
    "relabels windows without looking at the table": followed_by(
        NStepReward, "read_goals", lambda whole, *_: torch.ones_like(whole)
    ),
}


SHARE_MUTANTS = {
    "relabels a fixed prefix of the batch": replaced(transform, "draw_from_table", drawn_for_a_prefix),
    "relabels everything": replaced(
        transform, "draw_from_table", lambda draw: lambda given, table, ratio, *places: draw(given, table, 1.0, *places)
    ),
}


def check_streams():
    """Write two streams in every layout: one whose transitions must all be relabelled, and a random one."""
    lengths = ((5, "truncated"), (8, "silent"), (3, "terminated"))
    strategies = itertools.cycle(("final", "episode", "random", "future"))
    for number, (layout, strategy) in enumerate(zip(LAYOUTS, strategies, strict=False)):
        oracle.run(Stream(3, lengths, chunk=6, writes=5, layout=layout, strategy=strategy, compact=number % 3 == 0))
        oracle.run(random_stream(random.Random(number), layout))


def check_n_step_streams():
    for stream in STREAMS:
        oracle.run(replace(stream, writes=10), NStepOracle)


CHECKS = {check_streams: MUTANTS, check_share: SHARE_MUTANTS, check_n_step_streams: N_STEP_MUTANTS}


@pytest.mark.parametrize("check", CHECKS)
def test_the_oracle_finds_no_fault_in_the_package(check):
    assert first_failure(check) is None


@pytest.mark.parametrize(
    ("check", "mutant"), [(check, mutant) for check, mutants in CHECKS.items() for mutant in mutants]
)
def test_the_oracle_kills_the_mutant_that(check, mutant, monkeypatch):
    CHECKS[check][mutant](monkeypatch)
    assert first_failure(check) is not None
