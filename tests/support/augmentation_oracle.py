"""The oracle for hindsight at write time: it keeps every running episode in a list until it ends."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from unittest import mock

import torch
from tensordict import TensorDictBase
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from support.draws import LEVEL, p_value
from support.factories import make_augmentation
from support.oracle import ENTRIES, RELABELLED, Row, RunningEpisodes, allowed_steps, as_dicts, expected_of
from support.streams import Goal, Stream, Transition, chunks, make_tensordict
from torchrl_her import augmentation

GOAL_STEP = ("hindsight", "goal_step")


class AugmentationOracle(RunningEpisodes):
    """Keeps unwritten transitions as lists, and determines when they are written.

    The lists are parts of true episodes: an episode that continues after it was taken for ended has two parts.
    """

    def __init__(
        self, strategy: str = "future", copies: int = 4, max_episode_steps: int = 1000, patience: int = 10_000
    ):
        super().__init__(patience)
        self.strategy, self.copies, self.max_episode_steps = strategy, copies, max_episode_steps
        self.running: dict[int, list[Transition]] = {}  # true episode -> its unwritten part
        self.due: list[list[Transition]] = []
        self.goals: set[Goal] = set()  # achieved in all parts that have ended

    def write(self, rows: Sequence[Transition]) -> list[list[Transition]]:
        """Return the parts of episodes that are due after this write.

        After a write of one transition, no part is due: it could be ``rb.add``, which stores only one transition.
        """
        super().write(rows)
        due, self.due = ([], self.due) if len(rows) == 1 else (self.due, [])
        self.goals.update(row.outcome for part in due for row in part)
        return due

    def flush(self) -> None:
        """End the running episodes."""
        for episode in list(self.running):
            self._is_idle(episode)

    @property
    def held_back(self) -> int:
        """The number of transitions that are not written yet."""
        return sum(map(len, [*self.running.values(), *self.due]))

    def _ends_with(self, row: Transition) -> bool:
        part = self.running.setdefault(row.episode, [])
        part.append(row)
        ends = row.done or len(part) == self.max_episode_steps
        if ends:
            self.due.append(self.running.pop(row.episode))
        return ends

    def _is_idle(self, episode: int) -> None:
        self.due.append(self.running.pop(episode))
        self.waits_since.pop(episode, None)

    def check(self, due: list[list[Transition]], written: TensorDictBase) -> None:
        """Check that one write stores the transitions that were due, unchanged and in copies."""
        place = {row.uid: (part, step) for part in due for step, row in enumerate(part)}
        seen: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
        for row in as_dicts(written, [*ENTRIES, RELABELLED, GOAL_STEP]):
            is_copy, goal_step = row.pop(RELABELLED), row.pop(GOAL_STEP)
            part, step = place[row["uid"]]  # a KeyError means that it was not due
            seen[is_copy][row["uid"]] += 1
            if is_copy:
                self._check_copy(row, part, step, goal_step)
            else:
                assert row == expected_of([part[step]]), f"{part[step]} was stored as {row}"
                assert goal_step == -1
        assert seen[False] == dict.fromkeys(place, 1), "an original is missing, or stored twice"
        assert seen[True] == dict.fromkeys(place, self.copies), "a transition has the wrong number of copies"

    def _check_copy(self, row: Row, part: list[Transition], step: int, goal_step: int) -> None:
        goal, transition = row["desired_goal"], part[step]
        if self.strategy == "random":
            assert goal in self.goals, f"{transition} was given {goal}, which was not achieved"
        else:
            allowed = allowed_steps(self.strategy, step, len(part))
            assert goal_step in allowed, f"{transition} was given the goal of step {goal_step}"
            assert goal == part[goal_step].outcome, f"{goal} is not the goal of step {goal_step}"
        assert row == expected_of([transition], goal), f"{transition} was relabelled and came back as {row}"


def run(
    stream: Stream,
    copies: int = 2,
    max_episode_steps: int = 1000,
    patience: int = 30,
    flushes: Sequence[int] = (),
) -> None:
    """Write a stream through an augmentation, and check each write."""
    with mock.patch.object(augmentation, "PATIENCE", patience):
        hindsight = make_augmentation(
            strategy=stream.strategy, n_sampled_goal=copies, max_episode_steps=max_episode_steps
        )
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20_000), transform=hindsight, batch_size=32)
    oracle = AugmentationOracle(stream.strategy, copies, max_episode_steps, patience)

    def extend(data: TensorDictBase, chunk: Sequence[Transition]) -> None:
        before = len(rb)
        index = rb.extend(data)
        assert len(rb) == before + len(index)
        due = oracle.write(chunk)
        assert hindsight.held_back == oracle.held_back
        assert len(index) or not due, "transitions that are due are not written"
        if len(index):
            oracle.check(due, rb.storage[index])

    for number, chunk in enumerate(itertools.chain.from_iterable(chunks(lanes, stream.layout) for lanes in stream)):
        data = make_tensordict(chunk, stream.with_ids)
        extend(data, chunk)
        data.apply_(lambda value: value.fill_(1))  # a collector reuses its memory
        if number in flushes:
            oracle.flush()
            extend(hindsight.flush(), [])


def check_draws() -> None:
    """Check that goals are uniform over the steps that a strategy allows, for one step in 20."""
    stream = Stream(1, ((20, "truncated"),), chunk=20, writes=1, layout="flat with ids")
    ((rows,),) = stream
    torch.manual_seed(0)
    for strategy, allowed in (("future", range(12, 20)), ("episode", range(20)), ("random", range(20))):
        hindsight = make_augmentation(strategy=strategy, n_sampled_goal=4000)
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100_000), transform=hindsight)
        written = rb.storage[rb.extend(make_tensordict(rows))]
        steps = written[GOAL_STEP][(written["uid"] == rows[12].uid) & (written[GOAL_STEP].squeeze(1) >= 0)]
        assert p_value(steps.flatten().tolist(), dict.fromkeys(allowed, 1 / len(allowed))) > LEVEL
