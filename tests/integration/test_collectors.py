"""HERTransform behind TorchRL's collectors, in one process, in several and in the background.

The cases are the rows of the tables in docs/reference/collectors.md. Each row is tested exactly once: by the test that
selects it with `of`, or by one of the three tests at the end. The words of a row are arguments: ``replay_buffer=rb,
extend_buffer=False`` are arguments of the collector, and ``shared=True`` is an argument of the buffer.
"""

import ast
import contextlib
import functools
import itertools
import multiprocessing
import re
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import AsyncBatchedCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import GymWrapper, ObservationNorm, ParallelEnv, SerialEnv

from support.factories import make_transform, start_processes_from_a_server
from support.named import named
from support.tape import Tape, check, length_of, make_serial, make_tape, places, taken
from torchrl_her import EnvReward

NUMBER = 8  # environments in one process
STEPS, BATCHES = 8, 6  # steps of each environment per batch, and batches per collector
SIZE = 30_000  # rows of storages and goal tables, large enough that nothing is overwritten
MASK = ("collector", "mask")


quick_start = pytest.fixture(scope="module", autouse=True)(start_processes_from_a_server)


class Row(NamedTuple):
    """A row of the tables in docs/reference/collectors.md, without backticks."""

    collector: str
    environments: str
    data: str
    buffer: str
    result: str

    def __str__(self):
        return "-".join(self)


def read_docs():
    """Return the rows of all tables; a line for two collectors is two rows."""
    page = (Path(__file__).parents[2] / "docs" / "reference" / "collectors.md").read_text()
    lines = re.findall(r"^\| (?!collector )(.+) \|$", page.replace("`", ""), flags=re.MULTILINE)
    cells = [line.split(" | ") for line in lines]
    return [Row(collector, *rest) for collectors, *rest in cells for collector in collectors.split(" or ")]


DOCUMENTED = read_docs()
SELECTED = []


def of(count, pattern):
    """Parametrize a test with the rows that match a pattern and were not selected by an earlier test."""
    own = [row for row in DOCUMENTED if row not in SELECTED and re.search(pattern, str(row))]
    assert len(own) == count, f"docs/reference/collectors.md has {len(own)} rows like {pattern!r}, not {count}"
    SELECTED.extend(own)
    return pytest.mark.parametrize("row", own, ids=str)


@contextlib.contextmanager
def started_by(method):
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(method, force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


# The meaning of the words in a row


class SlowTape(Tape):
    """A tape with slow steps."""

    def step(self, action):
        time.sleep(0.01)
        return super().step(action)


def tapes(first, number=NUMBER):
    return [functools.partial(make_tape, first + i) for i in range(number)]


def serial(first):
    # One function with arguments: with a list of functions, TorchRL creates each environment twice.
    return SerialEnv(NUMBER, make_tape, create_env_kwargs=[{"number": first + i} for i in range(NUMBER)])


def parallel(first):
    return ParallelEnv(NUMBER, tapes(first), mp_start_method="fork", shutdown_timeout=0.1)  # starts and ends quickly


COLLECTORS = {kind.__name__: kind for kind in (Collector, MultiSyncCollector, MultiAsyncCollector)}
ENVIRONMENTS = {"one": (make_tape, 1), "8 in SerialEnv": (serial, NUMBER), "8 in ParallelEnv": (parallel, NUMBER)}
GOAL_SPEC = make_tape().observation_spec["achieved_goal"]


def read(words):
    """Split ``"by hand, [B, T], split_trajs=True"`` into ``["by hand", "[B, T]"], {"split_trajs": True}``."""
    parts = re.split(r", (?![^\[(]*[\])])", words)
    options = [part for part in parts if "=" in part and part != "replay_buffer=rb"]
    values = dict(option.split("=") for option in options)
    return [part for part in parts if part not in options], {k: ast.literal_eval(v) for k, v in values.items()}


def make_buffer(words, hindsight=True, capacity=None):
    """Return a buffer that relabels as many transitions as possible."""
    (kind, *storage), options = read(words)
    size = options.pop("size", SIZE)
    options |= {"alpha": 0.7, "beta": 0.5} if "Prioritized" in kind else {}
    of_storage = {key: options.pop(key) for key in ("ndim", "shared_init") if key in options}
    of_transform = {key: options.pop(key) for key in ("goal_spec", "mask_key") if key in options}
    if hindsight:
        of_transform = {"goal_spec": GOAL_SPEC, "capacity": capacity or 2 * size} | of_transform
        options["transform"] = make_transform(reward=EnvReward(Tape(0)), her_ratio=1.0, **of_transform)
    make_storage = named((*storage, "LazyTensorStorage")[0])
    return named(kind)(storage=make_storage(size, **of_storage), **options)


@contextlib.contextmanager
def shut_down_after(*running):
    """End all processes, even if a test fails."""
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
def collecting(collector, environments, **options):
    """Return a collector in this process, or one with two processes that have their own environments."""
    make, number = ENVIRONMENTS[environments]
    frames = STEPS * number * (2 if collector == "MultiSyncCollector" else 1)
    options = {"frames_per_batch": frames, "total_frames": -1, **options}
    makers = make(0) if collector == "Collector" else [functools.partial(make, 0), functools.partial(make, number)]
    running = COLLECTORS[collector](makers, None, **options)
    with shut_down_after(running):
        yield running


def collector_here(number):
    """Return a collector of one environment in this process."""
    return Collector(make_tape(number), None, frames_per_batch=STEPS, total_frames=-1)


@functools.cache
def yielded(collector, environments, options):
    """Return the batches of a collector, shared by rows that differ only in the buffer."""
    with collecting(collector, environments, **dict(options)) as running:
        return [batch.clone() for batch in itertools.islice(running, BATCHES)]


def fill(row, rb):
    """Collect transitions into the buffer as the row describes."""
    (how, *layout), options = read(row.data)
    if how == "by hand":
        for batch in yielded(row.collector, row.environments, tuple(options.items())):
            rb.extend(batch.reshape(-1) if layout == ["flattened"] else batch)
        return
    with collecting(row.collector, row.environments, replay_buffer=rb, **options) as running:
        if how == "start()":
            run_in_the_background(running, rb)
        else:
            list(itertools.islice(running, BATCHES))


def until(is_true, things=None):
    """Yield items until the condition is met, for at most two minutes."""
    deadline = time.monotonic() + 120
    for thing in things or itertools.repeat(None):
        if is_true():
            return
        assert time.monotonic() < deadline, "not after two minutes"
        yield thing


def run_in_the_background(running, rb):
    """Let a collector write in the background, and sample meanwhile."""
    running.start()
    for _ in until(lambda: len(rb) >= 400):
        if len(rb):
            check(rb.sample(64))
        time.sleep(0.01)
    running.async_shutdown()


# The oracle


def unpadded(batch):
    """Return the transitions of a batch, ``[n]``."""
    rows = batch.reshape(-1)
    return rows[rows[MASK].reshape(-1)] if MASK in rows.keys(True) else rows


def taken_with_resets(number, steps, every):
    """Return the first steps of an environment that a collector resets at its creation and at an interval."""
    found, episode = [], 0
    for _ in range(0, steps, every):
        episode, state = episode + 1, 0
        for _ in range(every):
            found.append((number, episode, state))
            state += 1
            if state == length_of(number, episode):
                episode, state = episode + 1, 0
    return found[:steps]


def ended(steps):
    """Return the steps of complete episodes."""
    ends = {place[:2] for place in steps if place[2] + 1 == length_of(*place[:2])}
    return [place for place in steps if place[:2] in ends]


def check_nothing_is_lost(rows, environments, steps=None, only_whole=False, reset_every=None):
    """Check that the first ``steps`` steps of every environment, by default all, are stored once."""
    stored = sorted(places(rows))
    counts = Counter(number for number, _, _ in stored)
    assert sorted(counts) == list(range(environments))
    expected = []
    for number in range(environments):
        count = steps or counts[number]
        those = taken_with_resets(number, count, reset_every) if reset_every else taken(number, count)
        expected += ended(those) if only_whole else those
    assert stored == expected


def check_hindsight(rb, least=0.6, **kwargs):
    """Check that goals are correct, and that transitions of ended episodes are relabelled: all, or a share of 0.8."""
    stored = rb[:]
    rows = unpadded(stored)
    relabelled = rows["hindsight", "relabelled"].reshape(-1).tolist()
    assert sum(relabelled) == stored["hindsight", "relabelled"].sum(), "padding has hindsight"
    check(rows, **kwargs)
    stored_at = places(rows)
    last = defaultdict(int)
    for number, episode, _ in stored_at:
        last[number] = max(last[number], episode)
    over = {place for place in stored_at if place[1] < last[place[0]]}.union(ended(stored_at))
    assert len(over) > least * len(rows), "too few episodes are over"
    assert not [place for place, was in zip(stored_at, relabelled, strict=True) if place in over and not was]

    rb.transform[0].her_ratio = 0.8
    batch = unpadded(rb.sample(2000 // rb.sample(1).numel()))
    check(batch, **kwargs)
    of_over = torch.tensor([place in over for place in places(batch)])
    assert abs(batch["hindsight", "relabelled"].reshape(-1)[of_over].float().mean() - 0.8) < 0.06


def check_buffer(rb, environments, **kwargs):
    """Check that nothing is lost, all goals are correct, and transitions are relabelled."""
    check_nothing_is_lost(unpadded(rb[:]), environments, **kwargs)
    check_hindsight(rb)


# Rows that need more than their words


@of(4, "^your own loop")
def test_steps_of_all_environments_without_trajectory_ids(row):
    rb, env = make_buffer(row.buffer), serial(0)
    write = getattr(rb, read(row.data)[0][-1])
    state = env.reset()
    for _ in range(STEPS * BATCHES):
        transition, state = env.step_and_maybe_reset(env.rand_action(state))
        write(transition)
    assert "collector" not in list(rb[:].keys())
    check_buffer(rb, NUMBER, steps=STEPS * BATCHES)


@of(1, "^AsyncBatchedCollector")
def test_steps_of_environments_in_any_order_without_trajectory_ids(row):
    policy = TensorDictModule(lambda seen: torch.zeros(*seen.shape[:-1], 2), ["observation"], ["action"])
    collector = AsyncBatchedCollector(tapes(0), policy=policy, frames_per_batch=NUMBER * STEPS, total_frames=-1)
    rb = make_buffer(row.buffer)
    with shut_down_after(collector):
        for batch in itertools.islice(collector, BATCHES):
            rb.extend(batch)
    assert "collector" not in list(rb[:].keys())
    check_buffer(rb, NUMBER)


@of(3, "^two of Collector")
def test_trajectory_ids_of_two_collectors_collide(row):
    rb = make_buffer(row.buffer)
    options = {"frames_per_batch": NUMBER * STEPS, "total_frames": -1}
    if row.data == "start()":
        options["replay_buffer"] = rb
    first, second = (Collector(serial(number), None, **options) for number in (0, NUMBER))
    if row.data == "start()":
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
    check_buffer(rb, 2 * NUMBER)


@of(1, "^MultiSyncCollector, MultiAsyncCollector and Collector")
def test_three_collectors_with_the_same_trajectory_ids_write_from_five_processes(row):
    rb = make_buffer(row.buffer)
    options = {"frames_per_batch": STEPS, "total_frames": -1, "replay_buffer": rb}
    synchronous = MultiSyncCollector(tapes(0, 2), None, **options)
    asynchronous = MultiAsyncCollector(tapes(2, 2), None, **options)
    here = iter(collector_here(4))
    with shut_down_after(synchronous, asynchronous):
        synchronous.start()
        asynchronous.start()
        for batch in until(lambda: len(rb) >= 400 and rb[:]["observation"][:, 0].unique().numel() == 5, here):
            rb.extend(batch)
            check(rb.sample(64))
    check_buffer(rb, 5)


@of(2, "in between")
def test_silent_resets_end_episodes(row):
    rb, env = make_buffer(row.buffer), serial(0)
    make_collector = functools.partial(Collector, env, None, frames_per_batch=NUMBER * STEPS, total_frames=-1)
    collector = make_collector()
    for i in range(BATCHES):
        rb.extend(collector.next().reshape(-1))
        if i % 2 == 0 and "collector.reset()" in row.data:
            collector.reset()
        elif i % 2 == 0:
            collector.shutdown(close_env=False)
            collector = make_collector()
    stored = places(rb[:])
    assert len(stored) == len(set(stored)) == NUMBER * STEPS * BATCHES
    cut = {place[:2] for place in stored} - {place[:2] for place in ended(stored)}
    assert len(cut) > NUMBER, "only episodes that still run have no end"
    check_hindsight(rb)


@of(1, "pause")
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


@of(1, "parts of an episode count as episodes")
def test_parts_of_an_episode_with_different_ids_are_episodes(row):
    rb = make_buffer(row.buffer)
    fill(row, rb)
    rows = unpadded(rb[:])
    ids = rows["collector", "traj_ids"].tolist()
    episodes = [place[:2] for place in places(rows)]
    assert len(set(zip(episodes, ids, strict=True))) > len(set(episodes))
    check_buffer(rb, 2, steps=STEPS * BATCHES)


def make_slow_tape(number):
    return GymWrapper(SlowTape(number))


@of(1, "preemptive_threshold")
def test_the_padding_of_a_slow_environment_is_left_out(row):
    rb = make_buffer(row.buffer)
    makers = [make_tape, functools.partial(make_slow_tape, 1)]
    collector = MultiSyncCollector(makers, None, frames_per_batch=2 * STEPS, total_frames=-1, preemptive_threshold=0.5)
    with shut_down_after(collector):
        for batch in itertools.islice(collector, BATCHES):
            rb.extend(batch.reshape(-1))
    assert len(unpadded(rb[:])) < len(rb), "the slow environment completed its steps"
    check_buffer(rb, 2)


@of(1, "done belongs to another batch")
def test_torchrl_yields_the_flags_of_another_batch(row):
    def has_wrong_flags(**options):
        with collecting(row.collector, row.environments, set_truncated=True, **options) as running:
            batches = [batch["next"].clone() for batch in itertools.islice(running, 3)]
        return any((batch["done"] != batch["terminated"] | batch["truncated"]).any() for batch in batches)

    assert has_wrong_flags()
    assert not has_wrong_flags(use_buffers=False)


@of(3, "started by .*-works$")
def test_every_start_method_of_processes(row):
    rb = make_buffer(row.buffer)
    here = collector_here(2)
    rb.extend(here.next())  # an episode that is running in this process when the others start
    method = started_by(row.data.split()[-1])
    with method, collecting(row.collector, row.environments, replay_buffer=rb) as running:
        for _ in itertools.islice(running, BATCHES):
            rb.extend(here.next())
    check_buffer(rb, 3)


@of(1, "started by fork.*samples other data than was written")
def test_torchrl_shares_no_storage_with_forked_processes(row):
    rb = make_buffer(row.buffer, hindsight=False)
    with started_by("fork"), collecting(row.collector, row.environments, replay_buffer=rb) as running:
        next(iter(running))
    assert len(rb) == 2 * STEPS
    assert sorted(places(rb[:])) != sorted(taken(0, STEPS) + taken(1, STEPS))


@of(1, "in the log of the process")
def test_a_process_logs_what_it_refuses(row, capfd):
    rb = make_buffer(row.buffer)
    with (
        started_by("fork"),  # logs to the stderr of this process
        pytest.raises(RuntimeError, match="At least one process failed"),
        collecting(row.collector, row.environments, replay_buffer=rb, compact_obs=True) as running,
    ):
        next(iter(running))
    assert row.result.removeprefix("refused, in the log of the process: ") in capfd.readouterr().err
    assert len(rb) == 0


@of(4, "size=.*-works$")
def test_a_buffer_that_has_wrapped_round_many_times(row):
    rb = make_buffer(row.buffer)
    fill(row, rb)
    assert len(rb) == read(row.buffer)[1]["size"]
    forgotten = 0
    for environment, those in itertools.groupby(sorted(places(unpadded(rb[:]))), key=lambda place: place[0]):
        whole, newest = taken(environment, 1000), list(those)
        first = whole.index(newest[0])
        assert newest == whole[first : first + len(newest)]
        forgotten += first
    assert forgotten > 0
    check_hindsight(rb, least=0.3)


@of(1, "works with a capacity")
def test_storage_rows_with_many_transitions_need_more_capacity(row):
    def share(capacity):
        rb = make_buffer(row.buffer, capacity=capacity)
        fill(row, rb)
        assert rb[:].shape == (40, STEPS)
        return rb[:]["hindsight", "relabelled"].float().mean()

    assert share(capacity=40) < 0.2
    assert share(capacity=40 * STEPS) > 0.7  # all others belong to running episodes


def test_flush_ends_the_episodes_of_the_process_that_writes():
    rb = make_buffer("TensorDictReplayBuffer, shared=True")
    with collecting("MultiSyncCollector", "one", replay_buffer=rb) as running:
        list(itertools.islice(running, BATCHES))
    for batch in itertools.islice(collector_here(2), BATCHES):
        rb.extend(batch)
    rows = rb[:]
    whole = ended(places(rows))
    of_running = torch.tensor([place not in whole for place in places(rows)])
    of_this_process = rows["observation"][:, 0] == 2
    assert (of_running & of_this_process).any()
    assert (of_running & ~of_this_process).any()
    assert not rows["hindsight", "relabelled"][of_running].any()
    rb.transform[0].flush()
    relabelled = rb[:]["hindsight", "relabelled"].squeeze(-1)
    assert relabelled[of_running].equal(of_this_process[of_running])
    check(rb[:])


def test_statistics_of_goals_reach_policies_in_other_processes():
    loc, scale = torch.zeros(3), torch.ones(3)
    norm = ObservationNorm(loc, scale, in_keys=["desired_goal"], out_keys=["goal"], standard_normal=True)
    policy = TensorDictSequential(norm, TensorDictModule(nn.Linear(3, 2), ["goal"], ["action"]))
    collector = MultiSyncCollector([make_tape], policy, frames_per_batch=10, total_frames=30)
    with shut_down_after(collector):
        for batch, data in enumerate(collector):
            assert torch.equal(data["goal"], (data["desired_goal"] - 100.0 * batch) / (batch + 1))
            loc += 100.0
            scale += 1.0
            collector.update_policy_weights_()
    assert batch == 2


# All other rows of the docs


@of(84, "-works$")
def test_goals_are_correct_nothing_is_lost_and_transitions_are_relabelled(row):
    rb = make_buffer(row.buffer)
    fill(row, rb)
    (how, *_), options = read(row.data)
    only_whole = "trajs_per_batch" in options  # the collector holds back the other episodes
    has_all_steps = how == "replay_buffer=rb" or (how == "by hand" and not only_whole)
    check_nothing_is_lost(
        unpadded(rb[:]),
        environments=ENVIRONMENTS[row.environments][1] * (1 if row.collector == "Collector" else 2),
        steps=STEPS * BATCHES if has_all_steps and "Async" not in row.collector else None,
        only_whole=only_whole,
        reset_every=STEPS if "reset_at_each_iter" in options else None,
    )
    check_hindsight(rb, flags="set_truncated" not in options)


@of(8, "-refused: ")
def test_data_that_cannot_be_relabelled_correctly_is_refused(row):
    with pytest.raises((KeyError, RuntimeError), match=re.escape(row.result.removeprefix("refused: "))):
        fill(row, make_buffer(row.buffer))


@of(19, "-TorchRL: ")
def test_limits_of_torchrl_also_exist_without_the_transform(row):
    with pytest.raises(Exception, match=re.escape(row.result.removeprefix("TorchRL: "))):
        fill(row, make_buffer(row.buffer, hindsight=False))


def test_every_row_of_the_docs_is_tested_once():
    assert sorted(SELECTED) == sorted(DOCUMENTED)


def test_padding_can_be_left_out():
    rb = make_buffer("TensorDictReplayBuffer")
    collector = Collector(make_serial(0, 1, 2), None, frames_per_batch=63, total_frames=630, split_trajs=True)
    padding = 0
    with shut_down_after(collector):
        for batch in collector:
            rb.extend(batch[batch[MASK]])
            padding += (~batch[MASK]).sum()
    assert padding
    assert sorted(places(rb[:])) == sorted(place for number in range(3) for place in taken(number, 210))
    assert check(rb[:]).share > 0.8
