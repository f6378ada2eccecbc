"""A slow, obvious oracle for hindsight at writing: it keeps every running episode in a list until it ends.

Transitions and streams are those of `oracle`, where a goal tells the episode and the step that achieved it.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from unittest import mock

import torch
from oracle import ENTRIES, Stream, Transition, entries, entries_under, make_tensordict, reached, reward_of
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

LAYOUTS = ("flat with ids", "flat, time first, with ids", "one step of all lanes", "one step of all lanes, with ids")


def chunks(stream: Stream):
    """What is written at a time, in the order of writing."""
    for lanes in stream:
        if stream.layout == "flat with ids":
            yield [row for lane in lanes for row in lane]
        else:
            steps = [list(rows) for rows in zip(*lanes, strict=True)]
            yield from steps if stream.layout.startswith("one step") else [[row for rows in steps for row in rows]]


@dataclass
class Oracle:
    """What is held back, as lists of transitions, and what has to be written when.

    An episode that is taken for ended and goes on all the same is two: so these are parts of the true episodes.
    """

    strategy: str
    copies: int
    max_episode_steps: int
    patience: int
    running: dict[int, list[Transition]] = field(default_factory=dict)  # by true episode
    waits_since: dict[int, int] = field(default_factory=dict)
    longest_wait: int = 0
    count: int = 0  # of transitions that were written
    due: list[list[Transition]] = field(default_factory=list)
    goals: set[tuple[int, int]] = field(default_factory=set)  # (episode, step), of all that ended

    def write(self, rows: list[Transition]) -> list[list[Transition]]:
        """Return the episodes that are due when these transitions have been written."""
        before = self.count
        self.count += len(rows)
        continued = set()
        for row in rows:
            if row.episode in self.waits_since and row.episode not in continued:
                waited = min(before - self.waits_since[row.episode], 2 * self.longest_wait + len(rows))
                self.longest_wait = max(self.longest_wait, waited)
            continued.add(row.episode)
            self.running.setdefault(row.episode, []).append(row)
            if row.done or len(self.running[row.episode]) == self.max_episode_steps:
                self._end(row.episode)
                continued.discard(row.episode)
        for episode in continued & set(self.running):
            self.waits_since[episode] = self.count
        for episode, since in list(self.waits_since.items()):
            if self.count - since > max(2 * self.longest_wait, self.patience):
                self._end(episode)
        due, self.due = self.due, []
        self.goals.update((row.episode, row.step) for episode in due for row in episode)
        return due

    def flush(self) -> None:
        for episode in list(self.running):
            self._end(episode)

    def _end(self, episode: int) -> None:
        self.due.append(self.running.pop(episode))
        self.waits_since.pop(episode, None)

    @property
    def held_back(self) -> int:
        return sum(map(len, [*self.running.values(), *self.due]))

    def check(self, due: list[list[Transition]], written) -> None:
        """Check the transitions that a write came to: those that were due, as they were and in copies."""
        columns = {key: written[key].flatten().tolist() for key in ENTRIES}
        relabelled = written["hindsight", "relabelled"].flatten().tolist()
        goal_step = written["hindsight", "goal_step"].flatten().tolist()
        place = {row.uid: (row, episode, step) for episode in due for step, row in enumerate(episode)}
        seen = {True: Counter(), False: Counter()}
        for index, is_copy in enumerate(relabelled):
            found = {key: column[index] for key, column in columns.items()}
            transition, episode, step = place[found["uid"]]  # KeyError: it was not due
            seen[is_copy][transition.uid] += 1
            if is_copy:
                self._check_copy(found, transition, episode, step, goal_step[index])
            else:
                assert found == entries(transition), f"{transition} was stored as {found}"
                assert goal_step[index] == -1
        assert seen[False] == dict.fromkeys(place, 1), "an original is missing, or stored twice"
        assert seen[True] == dict.fromkeys(place, self.copies), "a transition has the wrong number of copies"

    def _check_copy(self, found: dict, transition: Transition, part: list[Transition], step: int, goal_step: int):
        goal = found["desired_goal"]
        of_episode, of_step = int(goal // 1000), int(goal % 1000) - 1  # the goal under "next" of that step
        if self.strategy == "random":
            assert (of_episode, of_step) in self.goals, f"{transition} was given {goal}, which was not achieved"
        else:
            places = [place for place, row in enumerate(part) if (row.episode, row.step) == (of_episode, of_step)]
            assert places, f"{transition} was given the goal {goal} of another episode"
            assert places == [goal_step], f"the goal {goal} is of step {places}, not {goal_step}"
            allowed = {
                "future": range(step, len(part)),
                "final": [len(part) - 1],
                "episode": range(len(part)),
            }[self.strategy]
            assert goal_step in allowed, f"{transition} was given the goal of step {goal_step}"
        assert found == entries_under(goal, transition), f"{transition} was relabelled and came back as {found}"


def run(stream: Stream, package, copies: int = 2, max_episode_steps: int = 1000, patience: int = 30, flushes=()) -> int:
    """Write a stream through an augmentation of ``package``, check each write, and return how many rows there are."""
    with mock.patch.object(package.augmentation, "PATIENCE", patience):
        hindsight = package.HindsightAugmentation(
            package.GoalReward(reward_of, terminated_fn=reached),
            strategy=stream.strategy,
            n_sampled_goal=copies,
            max_episode_steps=max_episode_steps,
        )
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20_000), transform=hindsight, batch_size=32)
    oracle = Oracle(stream.strategy, copies, max_episode_steps, patience)
    rows = 0
    for number, chunk in enumerate(chunks(stream)):
        data = make_tensordict(chunk, stream.with_ids)
        index = rb.extend(data)
        due = oracle.write(chunk)
        rows += len(index)
        assert len(rb) == rows
        assert hindsight.held_back == oracle.held_back
        if due:
            oracle.check(due, rb.storage[index])
        else:
            assert len(index) == 0
        data.apply_(lambda value: value.fill_(1))  # a collector goes on to use its memory
        if number in flushes:
            oracle.flush()
            index = rb.extend(hindsight.flush())
            rows += len(index)
            if due := oracle.write([]):
                oracle.check(due, rb.storage[index])
    return rows


def random_stream(seed: int) -> tuple[Stream, dict]:
    """A stream, and how it is written, drawn from a seed, for where hypothesis is not at hand."""
    draw = random.Random(seed)
    stream = Stream(
        lanes=draw.randint(1, 4),
        lengths=tuple((draw.randint(1, 9), draw.choice(["terminated", "truncated", "silent"])) for _ in range(6)),
        chunk=draw.randint(1, 7),
        writes=draw.randint(4, 14),
        layout=LAYOUTS[seed % len(LAYOUTS)],
        storage=1,
        capacity=1,
        strategy=draw.choice(["future", "final", "episode", "random"]),
    )
    options = {
        "copies": draw.randint(1, 4),
        "max_episode_steps": draw.choice([4, 1000]),
        "patience": draw.choice([0, 10, 1000]),
        "flushes": draw.choice([(), (2, 5)]),
    }
    return stream, options


def check_draws(package) -> None:
    """Check that goals are uniform over the steps that a strategy allows (of one step in 20 at five deviations)."""
    stream = Stream(1, ((20, "truncated"),), chunk=20, writes=1, layout="flat with ids", storage=1, capacity=1)
    rows = next(chunks(stream))
    torch.manual_seed(0)
    for strategy, allowed in (("future", range(12, 20)), ("episode", range(20)), ("random", range(20))):
        hindsight = package.HindsightAugmentation(package.GoalReward(reward_of), strategy=strategy, n_sampled_goal=4000)
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100_000), transform=hindsight)
        written = rb.storage[rb.extend(make_tensordict(rows, True))]
        steps = written["hindsight", "goal_step"][written["uid"] == rows[12].uid].flatten().tolist()
        counts = Counter(step for step in steps if step >= 0)
        expected = 4000 / len(allowed)
        assert set(counts) == set(allowed)
        deviation = (expected * (1 - 1 / len(allowed))) ** 0.5
        assert all(abs(count - expected) < 5 * deviation for count in counts.values()), counts
