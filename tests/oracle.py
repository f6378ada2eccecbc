"""A slow, obvious oracle: it keeps every episode in lists and says which goals a transition may be given.

Every achieved goal that a `Stream` produces is a number of its own, so a goal tells where it was achieved, and
every transition carries its ``uid``. What the transform stamps is not looked at.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer

LAYOUTS = (
    "[lanes, time]",
    "[lanes, time] with ids",
    "flat with ids",
    "flat, time first, with ids",
    "one step of all lanes",
    "add",
    "add with ids",
    "plain add",
)


@dataclass(frozen=True)
class Transition:
    """One transition as the environment gave it."""

    uid: int
    episode: int  # the true one, counted over all lanes
    step: int
    trajectory: int
    achieved: float
    next_achieved: float
    desired: float
    terminated: bool
    truncated: bool

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


@dataclass(frozen=True)
class Stream:
    """How environments run, and how what they do is written."""

    lanes: int
    lengths: tuple[tuple[int, str], ...]  # episodes' lengths and ends, which the lanes take in turn
    chunk: int  # steps of each lane in a write
    writes: int
    layout: str
    storage: int  # in chunks
    capacity: int  # of the goal table
    strategy: str = "future"
    her_ratio: float = 1.0
    first_publication: int = 64  # the design's number, written down a second time on purpose
    compact: bool = False

    @property
    def with_ids(self) -> bool:
        return "ids" in self.layout

    def __iter__(self) -> Iterator[list[list[Transition]]]:
        """The writes: for each lane its next ``chunk`` transitions."""
        ends = iter(self.lengths * (1 + self.writes * self.chunk * self.lanes // len(self.lengths)))
        uids = iter(range(10**9))
        episodes = iter(range(10**9))
        lanes = [self._lane(lane, ends, uids, episodes) for lane in range(self.lanes)]
        for _ in range(self.writes):
            yield [[next(lane) for _ in range(self.chunk)] for lane in lanes]

    def _lane(self, lane, ends, uids, episodes) -> Iterator[Transition]:
        trajectory = lane
        while True:
            length, end = next(ends)
            episode = next(episodes)
            state = 1000.0 * episode
            for step in range(length):
                last = step == length - 1
                yield Transition(
                    uid=next(uids),
                    episode=episode,
                    step=step,
                    trajectory=trajectory,
                    achieved=state + step,
                    next_achieved=state + step + 1,
                    desired=-1.0 - episode,
                    terminated=last and end == "terminated",
                    truncated=last and end == "truncated",
                )
            if end != "silent":  # a reset that nothing tells of keeps the collector's id, too
                trajectory += self.lanes


def reward_of(achieved, desired):
    """A reward that tells any two pairs of goals apart; for tensors and for floats."""
    return achieved - 2 * desired


def reached(achieved, desired):
    return achieved == desired


ROOT_FLAGS = ("done", "terminated", "truncated")


def entries(row: Transition) -> dict:
    """What is stored of a transition."""
    return {
        "uid": row.uid,
        "observation": row.uid * 0.5,
        "achieved_goal": row.achieved,
        "desired_goal": row.desired,
        **dict.fromkeys(ROOT_FLAGS, False),
        ("next", "observation"): row.uid * 0.5 + 0.25,
        ("next", "achieved_goal"): row.next_achieved,
        ("next", "desired_goal"): row.desired,
        ("next", "reward"): reward_of(row.next_achieved, row.desired),
        ("next", "terminated"): row.terminated,
        ("next", "truncated"): row.truncated,
        ("next", "done"): row.done,
    }


def entries_under(goal: float, row: Transition) -> dict:
    """What a transition is when it is relabelled."""
    ended = reached(row.next_achieved, goal)
    return entries(row) | {
        "desired_goal": goal,
        ("next", "desired_goal"): goal,
        ("next", "reward"): reward_of(row.next_achieved, goal),
        ("next", "terminated"): ended,
        ("next", "done"): ended or row.truncated,
    }


ENTRIES = list(entries(Transition(0, 0, 0, 0, 0.0, 0.0, 0.0, False, False)))


def make_tensordict(rows: list[Transition], with_ids: bool) -> TensorDict:
    values = [entries(row) for row in rows]
    td = TensorDict(batch_size=[len(rows)])
    for key in ENTRIES:
        column = torch.tensor([value[key] for value in values])
        td[key] = column if key == "uid" else column.unsqueeze(-1)
    if with_ids:
        td["collector", "traj_ids"] = torch.tensor([row.trajectory for row in rows])
    return td


def make_buffer(stream: Stream, transform) -> ReplayBuffer:
    ndim = 2 if stream.layout.startswith("[lanes") else 1
    storage = LazyTensorStorage(stream.storage * stream.lanes * stream.chunk, ndim=ndim)
    kind = ReplayBuffer if stream.layout == "plain add" else TensorDictReplayBuffer
    return kind(storage=storage, transform=transform, batch_size=64)


def write(rb: ReplayBuffer, stream: Stream, lanes: list[list[Transition]]) -> Iterator[list[Transition]]:
    """Write a chunk as the layout says, and yield what was written each time that something was."""
    batch_first = [row for lane in lanes for row in lane]
    time_first = [row for rows in zip(*lanes, strict=True) for row in rows]
    if stream.layout.startswith("[lanes"):
        rb.extend(make_tensordict(batch_first, stream.with_ids).reshape(len(lanes), -1))
        yield batch_first
    elif stream.layout == "flat with ids":
        rb.extend(make_tensordict(batch_first, True))
        yield batch_first
    elif stream.layout == "flat, time first, with ids":
        rb.extend(make_tensordict(time_first, True))
        yield time_first
    elif stream.layout == "one step of all lanes":
        for rows in zip(*lanes, strict=True):
            rb.extend(make_tensordict(list(rows), False))
            yield list(rows)
    else:
        for row in time_first:
            rb.add(make_tensordict([row], stream.with_ids)[0])
            yield [row]


@dataclass
class Oracle:
    """Every episode in a list, and every goal that the table may hold in another."""

    stream: Stream
    transitions: dict[int, Transition] = field(default_factory=dict)
    episodes: dict[int, list[Transition]] = field(default_factory=dict)
    published: dict[int, int] = field(default_factory=dict)  # episode -> number of published steps
    waits_since: dict[int, int] = field(default_factory=dict)  # running episode -> transitions written up to its last
    longest_wait: int = 0  # of an episode that went on, in transitions that were written meanwhile
    # (episode, step) of the goals that went to the table, a list for each write: what order the episodes of
    # one write come in is not laid down.
    goals: list[list[tuple[int, int]]] = field(default_factory=list)
    may_be_there: set[tuple[int, int]] = field(default_factory=set)
    must_be_there: set[tuple[int, int]] = field(default_factory=set)

    def write(self, rows: list[Transition]) -> None:
        self.goals.append([])
        before = len(self.transitions)
        touched = []
        for row in rows:
            self.transitions[row.uid] = row
            if row.episode in self.waits_since:
                waited = min(before - self.waits_since[row.episode], 2 * self.longest_wait + len(rows))
                self.longest_wait = max(self.longest_wait, waited)
            self.episodes.setdefault(row.episode, []).append(row)
            touched.append(row.episode)
            if row.done:
                self._publish(row.episode)
        for episode in dict.fromkeys(touched):
            self.waits_since[episode] = len(self.transitions)
            if self.episodes[episode][-1].done:
                del self.waits_since[episode]
            steps = len(self.episodes[episode])
            if steps >= max(self.stream.first_publication, 2 * self.published.get(episode, 0)):
                self._publish(episode)
        for episode, since in self.waits_since.items():
            if len(self.transitions) - since > 2 * self.longest_wait:
                self._publish(episode)
        self._evict()

    def _evict(self) -> None:
        self.may_be_there, self.must_be_there = set(), set()
        newer = 0
        for goals in reversed(self.goals):
            if newer < self.stream.capacity:
                self.may_be_there.update(goals)
            if newer + len(goals) <= self.stream.capacity:
                self.must_be_there.update(goals)
            newer += len(goals)

    def _publish(self, episode: int) -> None:
        steps = len(self.episodes[episode])
        if self.published.get(episode, 0) == steps:
            return
        self.published[episode] = steps
        self.goals[-1].extend((episode, step) for step in range(steps))

    def allowed_steps(self, transition: Transition) -> list[int]:
        """The steps of its episode whose achieved goals the strategy may draw."""
        length = self.published.get(transition.episode, 0)
        if transition.step >= length:
            return []
        return {
            "future": list(range(transition.step, length)),
            "final": [length - 1],
            "episode": list(range(length)),
        }[self.stream.strategy]

    def check(self, sample: TensorDict) -> int:
        """Check a sample, transition by transition, and return how many were relabelled."""
        relabelled = sample["hindsight", "relabelled"]
        assert relabelled.shape == (*sample.batch_size, 1)
        assert relabelled.dtype == torch.bool
        assert sample["desired_goal"].dtype == sample["next", "reward"].dtype == torch.float32
        rows = sample.reshape(-1)
        columns = {key: rows[key].flatten().tolist() for key in ENTRIES}
        for index, is_relabelled in enumerate(relabelled.flatten().tolist()):
            row = {key: column[index] for key, column in columns.items()}
            transition = self.transitions[row["uid"]]
            if is_relabelled:
                self._check_relabelled(row, transition)
            else:
                self._check_as_stored(row, transition)
        return int(relabelled.sum())

    def _check_as_stored(self, row: dict, transition: Transition) -> None:
        assert row == entries(transition), f"{transition} is not relabelled and came back as {row}"
        if self.stream.her_ratio == 1.0 and self.stream.strategy != "random":
            allowed = self.allowed_steps(transition)
            all_there = allowed and all((transition.episode, step) in self.must_be_there for step in allowed)
            roomy = self.stream.capacity >= len(self.transitions)  # no record was replaced by a later one's
            assert not (all_there and roomy), f"{transition} was not relabelled"

    def _check_relabelled(self, row: dict, transition: Transition) -> None:
        goal = row["desired_goal"]
        episode, state = divmod(goal, 1000)
        step = int(state) - 1  # the goal under "next" of this step
        if self.stream.strategy != "random":
            assert int(episode) == transition.episode, f"{transition} was given goal {goal} of another episode"
            assert step in self.allowed_steps(transition), f"{transition} was given the goal of step {step}"
        there = (int(episode), step) in self.may_be_there
        assert there, f"{transition} was given the goal {goal}, which is not in the table"
        assert row == entries_under(goal, transition), f"{transition} was relabelled and came back as {row}"


def run(stream: Stream, package) -> tuple[int, int]:
    """Write a stream through a transform of ``package``, sample as it goes and check every transition.

    Returns how many transitions were sampled, and how many of them were relabelled.
    """
    transform = package.HERTransform(
        package.GoalReward(reward_of, terminated_fn=reached),
        strategy=stream.strategy,
        her_ratio=stream.her_ratio,
        capacity=stream.capacity,
        compact=stream.compact,
    )
    rb = make_buffer(stream, transform)
    oracle = Oracle(stream)
    sampled = relabelled = 0
    with mock.patch.object(package.episodes.tracker, "FIRST_PUBLICATION", stream.first_publication):
        for lanes in stream:
            for rows in write(rb, stream, lanes):
                oracle.write(rows)
            stored = rb.storage[:].clone()
            if stream.compact:
                left_out = {*ROOT_FLAGS, ("next", "desired_goal")}
                assert left_out.isdisjoint(stored.keys(True)), "what is left out is stored"
            sample = rb.sample()
            sampled += sample.numel()
            relabelled += oracle.check(sample)
            oracle.check(rb[:])
            now = rb.storage[:]
            assert set(now.keys(True)) == set(stored.keys(True)), "sampling changed which entries are stored"
            assert (now == stored).all(), "sampling changed what is stored"
    return sampled, relabelled


def check_share(package) -> None:
    """Check that ``her_ratio`` of the transitions are relabelled, wherever in the batch they stand."""
    stream = Stream(2, ((9, "truncated"),), chunk=9, writes=2, layout="flat with ids", storage=2, capacity=36)
    transform = package.HERTransform(package.GoalReward(reward_of), her_ratio=0.3, capacity=stream.capacity)
    rb = make_buffer(stream, transform)
    for lanes in stream:
        list(write(rb, stream, lanes))
    torch.manual_seed(0)
    relabelled = torch.stack([rb.sample(100)["hindsight", "relabelled"].squeeze(-1) for _ in range(400)])
    deviation = (0.3 * 0.7 / 400) ** 0.5
    share = relabelled.float().mean(dim=0)  # by place in the batch
    assert ((share - 0.3).abs() < 5 * deviation).all(), "a place in the batch is relabelled too often or too rarely"


def random_stream(seed: int) -> Stream:
    """A stream drawn from a seed, for where hypothesis is not at hand."""
    draw = random.Random(seed)
    lanes, chunk, writes = draw.randint(1, 4), draw.randint(2, 7), draw.randint(4, 12)
    ends = ["terminated", "truncated", "silent"]
    storage = draw.randint(1, writes)
    return Stream(
        lanes=lanes,
        lengths=tuple((draw.randint(1, 9), draw.choice(ends)) for _ in range(6)),
        chunk=chunk,  # at least 2: TorchRL's two-dimensional storage does not take [lanes, 1]
        writes=writes,
        layout=LAYOUTS[seed % len(LAYOUTS)],
        storage=storage,
        capacity=draw.choice([10, max(10, storage * lanes * chunk), 10_000]),
        strategy=draw.choice(["future", "final", "episode", "random"]),
        her_ratio=draw.choice([1.0, 1.0, 0.5]),
        first_publication=draw.choice([3, 64]),
        compact=draw.choice([False, True]),
    )
