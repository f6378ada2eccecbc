"""HERTransform behind TorchRL's collectors, in one process, in several and in the background.

The cases are the rows of the tables in docs/collectors.md; the last test compares the two. A row is built from its
own words: ``replay_buffer=rb, extend_buffer=False`` are arguments of the collector, ``shared=True`` of the buffer.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import multiprocessing
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tape import Tape, check, length_of, make_tape
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import AsyncBatchedCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.envs import GymWrapper, ParallelEnv, SerialEnv

from torchrl_her import EnvReward, HERTransform, PackedStorage

NUMBER = 8  # of environments of one process
STEPS, BATCHES = 8, 6  # a collector yields so many batches, with so many steps of each environment
SIZE = 30_000  # of storages and goal tables: nothing is overwritten
MASK = ("collector", "mask")


class Row(NamedTuple):
    """A row of the tables in docs/collectors.md, without the backticks."""

    collector: str
    environments: str
    data: str
    buffer: str
    result: str

    def __str__(self) -> str:
        return "-".join(self)


# What the words of a row stand for


class SlowTape(Tape):
    """Takes its time."""

    def step(self, action):
        time.sleep(0.01)
        return super().step(action)


def one(first):
    return make_tape(first)


def serial(first):
    return SerialEnv(NUMBER, [functools.partial(make_tape, first + i) for i in range(NUMBER)])


def parallel(first):
    makers = [functools.partial(make_tape, first + i) for i in range(NUMBER)]
    return ParallelEnv(NUMBER, makers, mp_start_method="fork", shutdown_timeout=0.1)  # quick to start and to end


COLLECTORS = {kind.__name__: kind for kind in (Collector, MultiSyncCollector, MultiAsyncCollector)}
ENVIRONMENTS = {"one": (one, 1), "8 in SerialEnv": (serial, NUMBER), "8 in ParallelEnv": (parallel, NUMBER)}
BUFFERS = {
    "ReplayBuffer": ReplayBuffer,
    "TensorDictReplayBuffer": TensorDictReplayBuffer,
    "PrioritizedReplayBuffer": functools.partial(PrioritizedReplayBuffer, alpha=0.7, beta=0.5),
    "TensorDictPrioritizedReplayBuffer": functools.partial(TensorDictPrioritizedReplayBuffer, alpha=0.7, beta=0.5),
}
STORAGES = {
    "LazyTensorStorage": LazyTensorStorage,
    "LazyMemmapStorage": LazyMemmapStorage,
    "PackedStorage": PackedStorage,
}
GOAL_SPEC = make_tape().observation_spec["achieved_goal"]


def read(words: str) -> tuple[list[str], dict]:
    """``"by hand, [B, T], split_trajs=True"`` is ``["by hand", "[B, T]"], {"split_trajs": True}``."""
    parts = re.split(r", (?![^\[(]*[\])])", words)
    options = [part for part in parts if "=" in part and part != "replay_buffer=rb"]
    values = dict(option.split("=") for option in options)
    return [part for part in parts if part not in options], {k: ast.literal_eval(v) for k, v in values.items()}


def make_buffer(words: str, hindsight: bool = True, capacity: int | None = None):
    """A buffer whose every transition is relabelled that can be."""
    (kind, *more), options = read(words)
    size = options.pop("size", SIZE)
    of_storage = {key: options.pop(key) for key in ("ndim", "shared_init") if key in options}
    storage = STORAGES[more[0] if more else "LazyTensorStorage"](size, **of_storage)
    of_transform = {"goal_spec": GOAL_SPEC} | {
        key: options.pop(key) for key in ("goal_spec", "mask_key") if key in options
    }
    if hindsight:
        options["transform"] = HERTransform(
            EnvReward(Tape(0)), her_ratio=1.0, capacity=capacity or 2 * size, **of_transform
        )
    return BUFFERS[kind](storage=storage, **options)


@contextlib.contextmanager
def shut_down_after(*running: Collector) -> Iterator[None]:
    """Leave no process behind, also where a test fails."""
    try:
        yield
    except BaseException:
        for collector in running:
            with contextlib.suppress(Exception):  # of processes that failed
                collector.shutdown()
        raise
    for collector in running:
        collector.shutdown()


@contextlib.contextmanager
def collecting(collector: str, environments: str, **options) -> Iterator[Collector]:
    """A collector: that of one process, or one of two processes with environments each."""
    make, number = ENVIRONMENTS[environments]
    frames = STEPS * number * (2 if collector == "MultiSyncCollector" else 1)
    options = {"frames_per_batch": frames, "total_frames": -1, **options}
    makers = make(0) if collector == "Collector" else [functools.partial(make, 0), functools.partial(make, number)]
    running = COLLECTORS[collector](makers, None, **options)
    with shut_down_after(running):
        yield running


@functools.cache
def yielded(collector: str, environments: str, options: tuple) -> list[TensorDict]:
    """What a collector yields; rows that differ in the buffer alone share it."""
    with collecting(collector, environments, **dict(options)) as running:
        return [batch.clone() for batch in itertools.islice(running, BATCHES)]


def fill(row: Row, rb) -> None:
    """Bring data to the buffer as the row says."""
    (how, *layout), options = read(row.data)
    if how == "by hand":
        for batch in yielded(row.collector, row.environments, tuple(options.items())):
            rb.extend(batch.reshape(-1) if layout == ["flattened"] else batch)
        return
    with collecting(row.collector, row.environments, replay_buffer=rb, **options) as running:
        if how == "start()":
            run_in_the_background(running, rb)
        else:
            for _ in itertools.islice(running, BATCHES):
                pass


def until(is_true: Callable[[], bool], things: Iterable = itertools.repeat(None)) -> Iterator:
    """Go on for as long as something is not true yet, but not for ever."""
    deadline = time.monotonic() + 120
    for thing in things:
        if is_true():
            return
        assert time.monotonic() < deadline, "not after two minutes"
        yield thing


def run_in_the_background(running, rb) -> None:
    """Let a collector write, and sample meanwhile."""
    running.start()
    for _ in until(lambda: len(rb) >= 800):
        if len(rb):
            check(rb.sample(64))
        time.sleep(0.01)
    running.async_shutdown()


# The oracle


def unpadded(batch: TensorDict) -> TensorDict:
    """The transitions of a batch, ``[n]``."""
    rows = batch.reshape(-1)
    return rows[rows[MASK].reshape(-1)] if MASK in rows.keys(True) else rows


def places(rows: TensorDict) -> list[tuple[int, int, int]]:
    """Environment, episode and step of each transition."""
    return [tuple(map(int, place)) for place in rows["observation"].tolist()]


def tape(number: int, steps: int, reset_every: int | None = None) -> list[tuple[int, int, int]]:
    """The first steps of an environment."""
    taken, episode, state = [], 0, 0
    for step in range(steps):
        if reset_every and step % reset_every == 0:
            episode, state = episode + 1, 0  # the first reset of all follows that of the collector's constructor
        taken.append((number, episode, state))
        state += 1
        if state == length_of(number, episode):
            episode, state = episode + 1, 0
    return taken


def ended(taken: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The steps of episodes whose last step is among them."""
    ends = {place[:2] for place in taken if place[2] + 1 == length_of(*place[:2])}
    return [place for place in taken if place[:2] in ends]


def check_that_nothing_is_lost(
    rows: TensorDict,
    environments: int,
    steps: int | None = None,
    only_whole: bool = False,
    reset_every: int | None = None,
) -> None:
    """Of each environment, all steps are stored, and once: its first ``steps``, or, not given, up to the last one."""
    taken = defaultdict(list)
    for place in sorted(places(rows)):
        taken[place[0]].append(place)
    assert list(taken) == list(range(environments))
    for environment, those in taken.items():
        right = tape(environment, steps or len(those), reset_every)
        assert those == (ended(right) if only_whole else right)


def check_hindsight(rb, ratio: float = 0.8, least: float = 0.6, **kwargs) -> None:
    """No goal is wrong; every transition of an episode that is over has hindsight, and in the share that is asked."""
    stored = rb[:]
    rows = unpadded(stored)
    assert rows["hindsight", "relabelled"].sum() == stored["hindsight", "relabelled"].sum(), "padding has hindsight"
    check(rows, **kwargs)
    last = defaultdict(int)
    for number, episode, _ in places(rows):
        last[number] = max(last[number], episode)
    over = {place for place in places(rows) if place[1] < last[place[0]]}.union(ended(places(rows)))
    assert len(over) > least * len(rows), "too little to see"
    relabelled = rows["hindsight", "relabelled"].reshape(-1).tolist()
    assert not [place for place, was in zip(places(rows), relabelled, strict=True) if place in over and not was]

    rb.transform[0].her_ratio = ratio
    batch = unpadded(rb.sample(2000 // rb.sample(1).numel()))
    check(batch, **kwargs)
    of_over = torch.tensor([place in over for place in places(batch)])
    assert abs(batch["hindsight", "relabelled"].reshape(-1)[of_over].float().mean() - ratio) < 0.06


# The rows


def rows(collectors: str, result: str, table: str) -> list[Row]:
    """One row a line and collector: environments | how the data reaches the buffer | buffer."""
    lines = [[cell.strip() for cell in line.split(" | ")] for line in table.strip().splitlines()]
    return [Row(collector, *line, result) for collector in collectors.split(" or ") for line in lines]


ROWS = [
    *rows(
        "Collector",
        "works",
        """
        one | by hand, flattened | TensorDictReplayBuffer
        8 in SerialEnv | by hand, flattened | ReplayBuffer
        8 in SerialEnv | by hand, flattened | TensorDictReplayBuffer
        8 in ParallelEnv | by hand, flattened | TensorDictReplayBuffer
        8 in SerialEnv | by hand, [B, T] | TensorDictReplayBuffer, ndim=2
        8 in ParallelEnv | by hand, [B, T] | ReplayBuffer, ndim=2
        8 in SerialEnv | by hand, [B, T] | TensorDictReplayBuffer
        8 in SerialEnv | by hand, flattened, track_traj_ids=False | TensorDictReplayBuffer
        8 in SerialEnv | by hand, [B, T], track_traj_ids=False | ReplayBuffer, ndim=2
        8 in SerialEnv | by hand, flattened, reset_at_each_iter=True | TensorDictReplayBuffer
        8 in SerialEnv | by hand, flattened, set_truncated=True | TensorDictReplayBuffer
        8 in SerialEnv | by hand, flattened, split_trajs=True | TensorDictReplayBuffer, mask_key=("collector", "mask")
        8 in SerialEnv | by hand, flattened, trajs_per_batch=4 | TensorDictReplayBuffer, mask_key=("collector", "mask")
        8 in SerialEnv | by hand, flattened, trajs_per_batch=4, traj_format="cat" | TensorDictReplayBuffer
        one | replay_buffer=rb | TensorDictReplayBuffer
        8 in SerialEnv | replay_buffer=rb | ReplayBuffer
        8 in SerialEnv | replay_buffer=rb | TensorDictReplayBuffer
        8 in SerialEnv | replay_buffer=rb | TensorDictReplayBuffer, ndim=2
        8 in SerialEnv | replay_buffer=rb | ReplayBuffer, LazyMemmapStorage, ndim=2
        8 in ParallelEnv | replay_buffer=rb | ReplayBuffer, ndim=2
        8 in SerialEnv | replay_buffer=rb | PrioritizedReplayBuffer
        8 in SerialEnv | replay_buffer=rb | TensorDictPrioritizedReplayBuffer
        one | replay_buffer=rb, extend_buffer=False | TensorDictReplayBuffer
        8 in SerialEnv | replay_buffer=rb, extend_buffer=False | ReplayBuffer
        8 in SerialEnv | replay_buffer=rb, extend_buffer=False | TensorDictReplayBuffer
        8 in ParallelEnv | replay_buffer=rb, extend_buffer=False | ReplayBuffer, ndim=2
        8 in SerialEnv | replay_buffer=rb, trajs_per_batch=4 | ReplayBuffer
        8 in SerialEnv | replay_buffer=rb, trajs_per_batch=4 | TensorDictReplayBuffer
        8 in SerialEnv | replay_buffer=rb, reset_at_each_iter=True | ReplayBuffer, ndim=2
        8 in SerialEnv | replay_buffer=rb, extend_buffer=False, reset_at_each_iter=True | TensorDictReplayBuffer
        8 in SerialEnv | replay_buffer=rb, track_traj_ids=False | ReplayBuffer, ndim=2
        8 in SerialEnv | replay_buffer=rb, extend_buffer=False, track_traj_ids=False | TensorDictReplayBuffer
        one | start() | TensorDictReplayBuffer
        8 in SerialEnv | start() | ReplayBuffer, ndim=2
        """,
    ),
    *rows("MultiSyncCollector", "works", "8 in SerialEnv | by hand, [2, B, T] | TensorDictReplayBuffer, ndim=3"),
    *rows("MultiSyncCollector", "works", "8 in SerialEnv | by hand, [2 B, T], cat_results=0 | ReplayBuffer, ndim=2"),
    *rows(
        "MultiAsyncCollector",
        "works",
        """
        8 in SerialEnv | by hand, [B, T] | TensorDictReplayBuffer, ndim=2
        8 in SerialEnv | by hand, flattened, split_trajs=True | TensorDictReplayBuffer, mask_key=("collector", "mask")
        """,
    ),
    *rows(
        "MultiSyncCollector or MultiAsyncCollector",
        "works",
        """
        one | by hand, flattened | TensorDictReplayBuffer
        8 in SerialEnv | by hand, flattened | ReplayBuffer
        8 in ParallelEnv | by hand, flattened | TensorDictReplayBuffer
        8 in SerialEnv | by hand, flattened, reset_at_each_iter=True | TensorDictReplayBuffer
        one | replay_buffer=rb | ReplayBuffer, shared=True
        one | replay_buffer=rb | TensorDictReplayBuffer, shared=True
        one | replay_buffer=rb | TensorDictReplayBuffer, shared=True, shared_init=True
        one | replay_buffer=rb | TensorDictReplayBuffer, goal_spec=None
        one | replay_buffer=rb | TensorDictPrioritizedReplayBuffer, shared=True, sync=False
        8 in SerialEnv | replay_buffer=rb | ReplayBuffer, ndim=2, shared=True
        8 in SerialEnv | replay_buffer=rb | ReplayBuffer, ndim=2, shared=True, shared_init=True
        8 in SerialEnv | replay_buffer=rb | ReplayBuffer, LazyMemmapStorage, ndim=2, shared=True
        8 in SerialEnv | replay_buffer=rb | ReplayBuffer, PackedStorage, ndim=2, shared=True
        8 in ParallelEnv | replay_buffer=rb | ReplayBuffer, ndim=2, shared=True
        8 in SerialEnv | replay_buffer=rb | TensorDictReplayBuffer, shared=True, shared_init=True
        8 in SerialEnv | replay_buffer=rb | TensorDictReplayBuffer, ndim=2, shared=True, shared_init=True
        one | replay_buffer=rb, extend_buffer=False | TensorDictReplayBuffer, shared=True
        8 in SerialEnv | replay_buffer=rb, extend_buffer=False | ReplayBuffer, ndim=2, shared=True
        8 in SerialEnv | replay_buffer=rb, extend_buffer=False | ReplayBuffer, shared=True, shared_init=True
        8 in SerialEnv | replay_buffer=rb, trajs_per_batch=4 | TensorDictReplayBuffer, LazyMemmapStorage, shared=True
        8 in SerialEnv | replay_buffer=rb, reset_at_each_iter=True | ReplayBuffer, ndim=2, shared=True
        one | start() | TensorDictReplayBuffer, shared=True, shared_init=True
        8 in SerialEnv | start() | ReplayBuffer, ndim=2, shared=True
        """,
    ),
    *rows(
        "Collector",
        "refused: a collector with compact_obs=True leaves it out",
        """
        8 in SerialEnv | by hand, flattened, compact_obs=True | TensorDictReplayBuffer
        8 in SerialEnv | replay_buffer=rb, compact_obs=True | TensorDictReplayBuffer
        """,
    ),
    *rows(
        "MultiSyncCollector or MultiAsyncCollector",
        "refused: a collector with compact_obs=True leaves it out",
        "one | by hand, flattened, compact_obs=True | TensorDictReplayBuffer",
    ),
    *rows(
        "MultiSyncCollector or MultiAsyncCollector",
        'refused: pass goal_spec=env.observation_spec["achieved_goal"]',
        """
        one | replay_buffer=rb | TensorDictReplayBuffer, goal_spec=None, shared=True
        one | replay_buffer=rb | TensorDictReplayBuffer, goal_spec=None, shared_init=True
        """,
    ),
    *rows(
        "MultiSyncCollector or MultiAsyncCollector",
        "refused: Name the right one with mask_key=",
        'one | replay_buffer=rb, split_trajs=True | ReplayBuffer, shared=True, mask_key=("collector", "mask")',
    ),
    *rows(
        "Collector",
        "TorchRL: differs from the source batch size",
        """
        8 in SerialEnv | by hand, [N, T], split_trajs=True | TensorDictReplayBuffer, ndim=2
        8 in SerialEnv | replay_buffer=rb, split_trajs=True | TensorDictReplayBuffer
        """,
    ),
    *rows(
        "Collector",
        "TorchRL: dim0 and dim1 must be within the range",
        """
        one | replay_buffer=rb | ReplayBuffer, ndim=2
        8 in SerialEnv | replay_buffer=rb, trajs_per_batch=4 | ReplayBuffer, ndim=2
        """,
    ),
    *rows(
        "Collector",
        "TorchRL: expand_as_right requires",
        "8 in SerialEnv | replay_buffer=rb, extend_buffer=False | TensorDictReplayBuffer, ndim=2",
    ),
    *rows(
        "MultiSyncCollector or MultiAsyncCollector",
        "TorchRL: dim0 and dim1 must be within the range",
        """
        one | replay_buffer=rb | ReplayBuffer, ndim=2, shared=True
        8 in SerialEnv | replay_buffer=rb, trajs_per_batch=4 | ReplayBuffer, ndim=2, shared=True
        """,
    ),
    *rows(
        "MultiSyncCollector or MultiAsyncCollector",
        "TorchRL: At least one process failed",
        """
        8 in SerialEnv | replay_buffer=rb | ReplayBuffer, shared=True
        8 in SerialEnv | replay_buffer=rb | TensorDictReplayBuffer, shared=True
        8 in SerialEnv | replay_buffer=rb, extend_buffer=False | TensorDictReplayBuffer, ndim=2, shared_init=True
        """,
    ),
    *rows(
        "MultiSyncCollector or MultiAsyncCollector",
        "TorchRL: tensor shape is incompatible with dest shape",
        "8 in SerialEnv | replay_buffer=rb | TensorDictReplayBuffer, ndim=2, shared=True",
    ),
    *rows(
        "MultiSyncCollector or MultiAsyncCollector",
        "TorchRL: cannot be shared between processes",
        "one | replay_buffer=rb | TensorDictPrioritizedReplayBuffer, shared=True",
    ),
]


@pytest.fixture(scope="module", autouse=True)
def quick_start():
    """Start processes from one that imported everything: they are given what "spawn", TorchRL's default, gives."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)
    multiprocessing.set_forkserver_preload(["torchrl.collectors", "torchrl.envs", "torchrl_her"])
    yield
    multiprocessing.set_start_method(before, force=True)


def those_that(result: str) -> list:
    return [pytest.param(row, id=str(row)) for row in ROWS if row.result.startswith(result)]


@pytest.mark.parametrize("row", those_that("works"))
def test_goals_are_right_nothing_is_lost_and_hindsight_happens(row):
    rb = make_buffer(row.buffer)
    fill(row, rb)
    (how, *_), options = read(row.data)
    only_whole = "trajs_per_batch" in options  # the collector holds the other episodes back
    how_far_is_told = how == "replay_buffer=rb" or not only_whole
    check_that_nothing_is_lost(
        unpadded(rb[:]),
        environments=ENVIRONMENTS[row.environments][1] * (1 if row.collector == "Collector" else 2),
        steps=STEPS * BATCHES if how_far_is_told and how != "start()" and "Async" not in row.collector else None,
        only_whole=only_whole,
        reset_every=STEPS if "reset_at_each_iter" in options else None,
    )
    check_hindsight(rb, flags="set_truncated" not in options)


@pytest.mark.parametrize("row", those_that("refused"))
def test_what_cannot_be_right_is_refused(row):
    with pytest.raises((KeyError, RuntimeError), match=re.escape(row.result.removeprefix("refused: "))):
        fill(row, make_buffer(row.buffer))


@pytest.mark.parametrize("row", those_that("TorchRL"))
def test_what_torchrl_cannot_do_it_cannot_do_without_the_transform(row):
    with pytest.raises(Exception, match=re.escape(row.result.removeprefix("TorchRL: "))):
        fill(row, make_buffer(row.buffer, hindsight=False))


# What takes more than the words of a row


SPECIAL: list[Row] = []


def of(*own: Row):
    """A test is that of these rows, and gets one of them at a time."""
    SPECIAL.extend(own)
    return pytest.mark.parametrize("row", own, ids=str)


@of(
    *rows(
        "your own loop",
        "works",
        """
        8 in SerialEnv | one step of all at a time, extend | ReplayBuffer
        8 in SerialEnv | one step of all at a time, extend | TensorDictReplayBuffer
        8 in SerialEnv | one step of all at a time, add | ReplayBuffer
        8 in SerialEnv | one step of all at a time, add | TensorDictReplayBuffer
        """,
    ),
)
def test_steps_of_all_environments_without_trajectory_ids(row):
    rb, env = make_buffer(row.buffer), serial(0)
    write = getattr(rb, read(row.data)[0][-1])
    state = env.reset()
    for _ in range(STEPS * BATCHES):
        transition, state = env.step_and_maybe_reset(env.rand_action(state))
        write(transition)
    rows = unpadded(rb[:])
    assert "collector" not in list(rows.keys())
    assert len(rows) == NUMBER * STEPS * BATCHES
    check_that_nothing_is_lost(rows, NUMBER)
    check_hindsight(rb)


@of(
    *rows("AsyncBatchedCollector", "works", "8, each in a thread | by hand | TensorDictReplayBuffer"),
)
def test_steps_of_environments_in_any_order_without_trajectory_ids(row):
    policy = TensorDictModule(lambda seen: torch.zeros(*seen.shape[:-1], 2), ["observation"], ["action"])
    makers = [functools.partial(make_tape, number) for number in range(NUMBER)]
    collector = AsyncBatchedCollector(makers, policy=policy, frames_per_batch=NUMBER * STEPS, total_frames=-1)
    rb = make_buffer(row.buffer)
    for batch in itertools.islice(collector, BATCHES):
        rb.extend(batch)
    collector.shutdown()
    assert "collector" not in list(unpadded(rb[:]).keys())
    check_that_nothing_is_lost(unpadded(rb[:]), NUMBER)
    check_hindsight(rb)


@of(
    *rows(
        "two of Collector",
        "works",
        """
        8 in SerialEnv | by hand, in turn | TensorDictReplayBuffer
        8 in SerialEnv | by hand, both in one write | TensorDictReplayBuffer
        8 in SerialEnv | start() | ReplayBuffer, ndim=2
        """,
    ),
)
def test_trajectory_ids_of_two_collectors_collide(row):
    rb = make_buffer(row.buffer)
    in_the_background = row.data == "start()"
    options = {
        "frames_per_batch": NUMBER * STEPS,
        "total_frames": -1,
        "replay_buffer": rb if in_the_background else None,
    }
    first, second = (Collector(serial(number), None, **options) for number in (0, NUMBER))
    if in_the_background:
        first.start()
        run_in_the_background(second, rb)
        first.async_shutdown()
    else:
        for one, other in itertools.islice(zip(first, second, strict=True), BATCHES):
            if "in turn" in row.data:
                rb.extend(one.reshape(-1))
                rb.extend(other.reshape(-1))
            else:
                rb.extend(torch.cat([one, other]).transpose(0, 1).reshape(-1))
    rows = unpadded(rb[:])
    of_first = rows["observation"][:, 0] < NUMBER
    ids = rows["collector", "traj_ids"]
    assert set(ids[of_first].tolist()) & set(ids[~of_first].tolist())
    check_that_nothing_is_lost(rows, 2 * NUMBER)
    check_hindsight(rb)


@of(
    *rows(
        "MultiSyncCollector, MultiAsyncCollector and Collector",
        "works",
        "one | start(), and by hand | TensorDictReplayBuffer, shared=True",
    ),
)
def test_three_collectors_with_the_same_trajectory_ids_write_from_five_processes(row):
    rb = make_buffer(row.buffer)
    options = {"frames_per_batch": STEPS, "total_frames": -1, "replay_buffer": rb}
    pairs = [[functools.partial(make_tape, 2 * i), functools.partial(make_tape, 2 * i + 1)] for i in range(2)]
    synchronous, asynchronous = (
        MultiSyncCollector(pairs[0], None, **options),
        MultiAsyncCollector(pairs[1], None, **options),
    )
    here = iter(Collector(make_tape(4), None, frames_per_batch=STEPS, total_frames=-1))
    with shut_down_after(synchronous, asynchronous):
        synchronous.start()
        asynchronous.start()
        for batch in until(lambda: len(rb) >= 400 and rb[:]["observation"][:, 0].unique().numel() == 5, here):
            rb.extend(batch)
            check(rb.sample(64))
    check_that_nothing_is_lost(rb[:], 5)
    check_hindsight(rb)


@of(
    *rows(
        "Collector",
        "works",
        """
        8 in SerialEnv | by hand, flattened, collector.reset() in between | TensorDictReplayBuffer
        8 in SerialEnv | by hand, flattened, from a new collector in between | TensorDictReplayBuffer
        """,
    ),
)
def test_resets_that_no_flag_tells_of(row):
    rb, env = make_buffer(row.buffer), serial(0)
    collector = Collector(env, None, frames_per_batch=NUMBER * STEPS, total_frames=-1)
    for i in range(BATCHES):
        rb.extend(collector.next().reshape(-1))
        if i % 2:
            continue
        if "collector.reset()" in row.data:
            collector.reset()
        else:
            collector.shutdown(close_env=False)
            collector = Collector(env, None, frames_per_batch=NUMBER * STEPS, total_frames=-1)
    rows = rb[:]
    assert len(rows) == len(set(places(rows))) == NUMBER * STEPS * BATCHES
    cut = {place[:2] for place in places(rows)} - {place[:2] for place in ended(places(rows))}
    assert len(cut) > NUMBER, "more than those that still run"
    check_hindsight(rb)


@of(
    *rows(
        "MultiAsyncCollector",
        "works; TorchRL drops what is being collected",
        "one | start() and pause() | TensorDictReplayBuffer, shared=True",
    ),
)
def test_rollouts_that_are_dropped_leave_no_wrong_goals(row):
    rb = make_buffer(row.buffer)
    with collecting(row.collector, row.environments, replay_buffer=rb) as running:
        running.start()
        for _ in until(lambda: rb.write_count >= 300):
            with running.pause():
                written = rb.write_count
                time.sleep(0.02)
                assert rb.write_count == written
            time.sleep(0.05)
    stored = set(places(rb[:]))
    assert len(stored) == len(rb)
    assert any(step and (number, episode, step - 1) not in stored for number, episode, step in stored), "none dropped"
    check_hindsight(rb)


@of(
    *rows(
        "MultiSyncCollector",
        "works; TorchRL gives an episode another id in each batch, and so its parts count as episodes",
        'one | by hand, flattened, split_trajs=True | TensorDictReplayBuffer, mask_key=("collector", "mask")',
    ),
)
def test_parts_of_an_episode_that_torchrl_gives_ids_of_their_own(row):
    rb = make_buffer(row.buffer)
    fill(row, rb)
    rows = unpadded(rb[:])
    ids = rows["collector", "traj_ids"].tolist()
    assert len({(place[:2], i) for place, i in zip(places(rows), ids, strict=True)}) > len(
        {p[:2] for p in places(rows)}
    )
    check_that_nothing_is_lost(rows, 2, STEPS * BATCHES)
    check_hindsight(rb)


def make_slow_tape(number):
    return GymWrapper(SlowTape(number))


@of(
    *rows(
        "MultiSyncCollector",
        "works",
        'one | by hand, flattened, preemptive_threshold=0.5 | TensorDictReplayBuffer, mask_key=("collector", "mask")',
    ),
)
def test_steps_that_a_slow_environment_did_not_come_to_are_left_out(row):
    rb = make_buffer(row.buffer)
    makers = [functools.partial(make_tape, 0), functools.partial(make_slow_tape, 1)]
    collector = MultiSyncCollector(makers, None, frames_per_batch=2 * STEPS, total_frames=-1, preemptive_threshold=0.5)
    with shut_down_after(collector):
        for batch in itertools.islice(collector, BATCHES):
            rb.extend(batch.reshape(-1))
    assert len(unpadded(rb[:])) < len(rb), "the slow one was not too slow"
    check_that_nothing_is_lost(unpadded(rb[:]), 2)
    check_hindsight(rb)


@of(
    *rows(
        "MultiSyncCollector",
        "TorchRL: done is that of another batch; use_buffers=False helps",
        "one | by hand, flattened, set_truncated=True | any",
    ),
)
def test_torchrl_yields_flags_of_another_batch(row):
    def has_wrong_flags(**options):
        with collecting(row.collector, row.environments, set_truncated=True, **options) as running:
            batches = [batch["next"].clone() for batch in itertools.islice(running, 3)]
        return any((batch["done"] != batch["terminated"] | batch["truncated"]).any() for batch in batches)

    assert has_wrong_flags()
    assert not has_wrong_flags(use_buffers=False)


@contextlib.contextmanager
def started_by(method: str) -> Iterator[None]:
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(method, force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@of(
    *rows(
        "MultiSyncCollector",
        "works",
        """
        one | replay_buffer=rb, started by spawn | TensorDictReplayBuffer, shared=True
        one | replay_buffer=rb, started by fork | TensorDictReplayBuffer, LazyMemmapStorage, shared=True
        one | replay_buffer=rb, started by fork | TensorDictReplayBuffer, shared=True, shared_init=True
        """,
    ),
)
def test_however_processes_are_started(row):
    rb = make_buffer(row.buffer)
    here = Collector(make_tape(2), None, frames_per_batch=STEPS, total_frames=-1)
    rb.extend(here.next())  # an episode that runs in this process when the others start
    with (
        started_by(row.data.split()[-1]),
        collecting(row.collector, row.environments, replay_buffer=rb) as running,
    ):
        for _ in itertools.islice(running, BATCHES):
            rb.extend(here.next())
    check_that_nothing_is_lost(rb[:], 3)
    check_hindsight(rb)


@of(
    *rows(
        "MultiSyncCollector",
        "TorchRL: samples something else than was written",
        "one | replay_buffer=rb, started by fork | TensorDictReplayBuffer, shared=True",
    ),
)
def test_torchrl_shares_no_storage_with_forked_processes(row):
    rb = make_buffer(row.buffer, hindsight=False)
    with started_by("fork"), collecting(row.collector, row.environments, replay_buffer=rb) as running:
        next(iter(running))
    assert len(rb) == 2 * STEPS
    assert sorted(rb[:]["observation"].tolist()) != sorted(map(list, tape(0, STEPS) + tape(1, STEPS)))


@of(
    *rows(
        "MultiSyncCollector",
        "refused, in the log of the process: a collector with compact_obs=True leaves it out",
        "one | replay_buffer=rb, compact_obs=True | TensorDictReplayBuffer, shared=True",
    ),
)
def test_what_a_process_refuses_stands_in_its_log(row, capfd):
    rb = make_buffer(row.buffer)
    with (
        started_by("fork"),  # that its log is this one
        pytest.raises(RuntimeError, match="At least one process failed"),
        collecting(row.collector, row.environments, replay_buffer=rb, compact_obs=True) as running,
    ):
        next(iter(running))
    assert row.result.removeprefix("refused, in the log of the process: ") in capfd.readouterr().err
    assert len(rb) == 0


@of(
    *rows(
        "Collector",
        "works",
        """
        8 in SerialEnv | replay_buffer=rb | ReplayBuffer, ndim=2, size=160
        8 in SerialEnv | by hand, flattened | TensorDictReplayBuffer, size=160
        """,
    ),
    *rows(
        "MultiSyncCollector or MultiAsyncCollector",
        "works",
        "one | replay_buffer=rb | TensorDictReplayBuffer, shared=True, size=40",
    ),
)
def test_a_buffer_that_has_been_full_for_long(row):
    rb = make_buffer(row.buffer)
    fill(row, rb)
    assert len(rb) == read(row.buffer)[1]["size"]
    forgotten = 0
    for environment, those in itertools.groupby(sorted(places(unpadded(rb[:]))), key=lambda place: place[0]):
        whole, newest = tape(environment, 1000), list(those)
        first = whole.index(newest[0])
        assert newest == whole[first : first + len(newest)]
        forgotten += first
    assert forgotten > 0
    check_hindsight(rb, least=0.3)


@of(
    *rows(
        "Collector",
        "works with a capacity of size T",
        "8 in SerialEnv | by hand, [B, T] | TensorDictReplayBuffer, size=40",
    )
)
def test_rows_of_the_storage_that_hold_many_transitions_need_as_much_capacity(row):
    def share(capacity):
        rb = make_buffer(row.buffer, capacity=capacity)
        fill(row, rb)
        assert rb[:].shape == (40, STEPS)
        return rb[:]["hindsight", "relabelled"].float().mean()

    assert share(capacity=40) < 0.2
    assert share(capacity=40 * STEPS) > 0.7  # the rest belongs to running episodes


def test_flush_ends_the_episodes_of_the_process_that_writes():
    rb = make_buffer("TensorDictReplayBuffer, shared=True")
    with collecting("MultiSyncCollector", "one", replay_buffer=rb) as running:
        for _ in itertools.islice(running, BATCHES):
            pass
    here = Collector(make_tape(2), None, frames_per_batch=STEPS, total_frames=-1)
    for batch in itertools.islice(here, BATCHES):
        rb.extend(batch)
    rows = rb[:]
    of_running = torch.tensor([place not in ended(places(rows)) for place in places(rows)])
    of_this_process = rows["observation"][:, 0] == 2
    assert (of_running & of_this_process).any()
    assert (of_running & ~of_this_process).any()
    assert not rows["hindsight", "relabelled"][of_running].any()
    rb.transform[0].flush()
    relabelled = rb[:]["hindsight", "relabelled"].squeeze(-1)
    assert relabelled[of_running].equal(of_this_process[of_running])
    check(rb[:])


def test_the_tables_in_the_docs_are_what_is_tested():
    page = Path(__file__).parent.parent / "docs" / "collectors.md"
    lines = [
        line.replace("`", "").strip("| ").split(" | ") for line in page.read_text().splitlines() if line[:1] == "|"
    ]
    documented = [
        Row(collector, *cells)
        for collectors, *cells in lines
        if collectors not in ("collector", "---|---|---|---|---")
        for collector in collectors.split(" or ")
    ]
    assert Counter(documented) == Counter([*ROWS, *SPECIAL])
