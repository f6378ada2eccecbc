"""Which running episode a transition continues, and when an episode that nothing continues counts as ended."""

import copy
import itertools
import sys

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer

from support.factories import make_transform
from support.goals import reward_of
from support.recorded import recorded_in
from support.world import Goals, World, whole_episodes
from torchrl_her import HERTransform
from torchrl_her.episodes import lanes

RELABELLED = ("hindsight", "relabelled")


def make_buffer(size=1000, capacity=10_000, ndim=1):
    hindsight = make_transform(strategy="final", her_ratio=1.0, capacity=capacity)
    return ReplayBuffer(storage=LazyTensorStorage(size, ndim=ndim), transform=hindsight, batch_size=64)


def record(envs=1, **options):
    return recorded_in(make_buffer(**options), envs, "final")


def write(rb, *rows):
    """Write a transition of each environment, the goals before and after it: ``[rows, 1]``, or ``[rows]``."""
    states, outcomes = torch.tensor(rows, dtype=torch.float32).reshape(-1, 1, 2, 1).unbind(2)
    desired, done = torch.full_like(states, 99), torch.zeros(len(rows), 1, 1, dtype=torch.bool)
    following = {
        "achieved_goal": outcomes,
        "desired_goal": desired,
        "reward": reward_of(outcomes, desired).unsqueeze(-1),
    }
    flags = {"done": done, "terminated": done}
    data = {"achieved_goal": states, "desired_goal": desired, "next": following | flags}
    frame = TensorDict(data, [len(rows), 1])
    rb.extend(frame if rb.storage.ndim == 2 else frame.reshape(-1))


def test_among_episodes_at_the_same_goals_the_one_that_waited_longest_is_continued():
    rb = make_buffer()
    # A third environment, which arrives at 21 and 22, was written last, so its row says nothing about the others.
    for row in [(1, 5), (2, 5), (20, 21), (5, 6), (21, 22), (5, 7), (6, 8), (7, 9)]:
        write(rb, row)
    rb.transform[0].flush()
    assert rb[:]["desired_goal"].flatten().tolist() == [8, 9, 22, 8, 22, 9, 8, 9]


def test_among_episodes_at_the_same_goals_the_one_in_the_same_row_is_continued():
    rb = make_buffer(ndim=2)
    for rows in ([(1, 5), (2, 4), (3, 4)], [(9, 10), (4, 5), (4, 5)], [(10, 11), (5, 6), (5, 7)]):
        write(rb, *rows)
    rb.transform[0].flush()
    assert rb[:]["desired_goal"].squeeze(-1).tolist() == [[5, 11, 11], [6] * 3, [7] * 3]
    assert rb[:]["hindsight", "relabelled"].all()


def test_in_a_frame_an_environment_that_starts_where_another_one_arrived_continues_the_one_in_the_same_row():
    rb = make_buffer()
    for rows in ([(0, 1), (10, 11)], [(1, 2), (11, 5)], [(2, 5), (5, 6)]):
        write(rb, *rows)
    rb.transform[0].flush()
    assert rb[:]["desired_goal"].flatten().tolist() == [5, 6] * 3


@pytest.mark.parametrize("ids", [[0, 0], [2**40, -7]], ids=["one id for both", "ids of any value"])
@pytest.mark.parametrize("time_major", [False, True])
def test_environments_are_distinguished_by_their_goals_and_ids(ids, time_major):
    """An id that is used again after the end of its episode begins another one."""
    recorded = record(envs=2)
    for moves in (["go"] * 5, ["go", "terminated", "go", "go", "truncated"]):
        played = [recorded.world.play(env, moves) for env in range(2)]
        rows = [*itertools.chain(*(zip(*played, strict=True) if time_major else played))]
        data = recorded.world.tensordict(rows)
        data["collector", "traj_ids"] = torch.tensor([ids[row.env] for row in rows])
        recorded.write(rows, data)
    assert recorded.check() == 20


@pytest.mark.parametrize("ndim", [1, 2], ids=["in one write", "in the same row of the next write"])
def test_an_episode_ends_with_its_trajectory_id(ndim):
    """There is no done flag, and the next trajectory starts with the last goals of this one."""
    recorded, writes = record(envs=ndim, ndim=ndim), []
    for end in ("cut", "go"):
        rows = [row for env in range(ndim) for row in recorded.world.play(env, ["go"] * 3 + [end])]
        data = recorded.world.tensordict(rows).reshape(ndim, 4)
        for flag in ("done", "truncated"):
            data["next", flag].zero_()
        writes.append(data)
    for data in writes if ndim == 2 else [torch.cat(writes, 1)[0]]:
        recorded.rb.extend(data)
    recorded.rb.transform[0].flush()
    assert recorded.rb[:]["desired_goal"][..., 1].reshape(ndim, 8).tolist() == [[4] * 4 + [8] * 4] * ndim


def test_episodes_enter_the_table_in_the_order_of_writing_whatever_their_ids():
    """So the goals of all transitions in the storage are in a table of the same size."""
    recorded = record(size=75, capacity=75)
    for _ in range(3):
        rows = recorded.world.play(0, ["terminated"] * 50)
        data = recorded.world.tensordict(rows)
        data["collector", "traj_ids"] = -data["collector", "traj_ids"]
        recorded.write(rows, data)
    assert recorded.check() == 75


# Episodes that wait


def test_the_state_of_a_transform_without_transitions_drops_running_episodes_and_goals():
    recorded = record()
    for moves in (["go"] * 3 + ["truncated"], ["go"] * 3):
        recorded.play([moves])
    hindsight, empty = recorded.rb.transform[0], make_buffer().transform[0]
    for each in (hindsight, empty):
        each.load_state_dict(make_buffer().transform[0].state_dict())
        assert each.report().running == 0
    assert not recorded.rb[:][RELABELLED].any()


def test_steps_that_were_written_after_the_loaded_state_keep_their_goals_and_no_episode_is_used_twice():
    """Of their first episode, the loaded state has only the first steps."""
    recorded = record()
    hindsight = recorded.rb.transform[0]
    recorded.play([["go"] * 3])
    state = copy.deepcopy(hindsight.state_dict())
    recorded.play([["go"] * 4 + ["truncated"] + whole_episodes(5)])
    hindsight.load_state_dict(state)
    assert recorded.rb[:][RELABELLED].flatten().tolist() == [True] * 3 + [False] * 10
    recorded.play([whole_episodes(5, 5)])
    assert recorded.rb[:][RELABELLED].flatten().tolist() == [True] * 3 + [False] * 10 + [True] * 10


@pytest.mark.parametrize(("pauses", "episodes"), [([60] * 8 + [110], 2), ([90, 150], 3)])
def test_an_episode_may_pause_nearly_twice_as_long_as_usual_even_if_that_exceeds_the_capacity(pauses, episodes):
    """A single long pause does not count as usual."""
    recorded = record(envs=2, capacity=100)
    for pause in pauses:
        recorded.play([[], ["go"]])
        for _ in range(pause // 5):
            recorded.play([["go"] * 5])
    recorded.play([[], ["go"]])
    assert recorded.rb.transform[0].report().episodes == episodes


def test_an_episode_that_nothing_continues_for_the_capacity_is_closed():
    recorded = record(envs=2, capacity=10)
    recorded.play([[], ["go"]])
    for steps, running in ((5, 1), (7, 0)):
        recorded.play([["terminated"] * steps])
        assert recorded.rb.transform[0].report().running == running


ALTERNATIVES = {
    "a constant hash": (lanes, "hash_goals", lambda goals, trajectory: np.zeros(len(goals), np.int64)),
    "no short path": (lanes.Lanes, "_track_stream", lambda *arguments: None),
}


@pytest.mark.filterwarnings("ignore:.* of the transitions do not continue an episode")
@pytest.mark.parametrize("alternative", ALTERNATIVES)
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("envs", [1, 2, 6])
@pytest.mark.parametrize("layout", ["flat", "time-major", "lanes", "add"])
def test_a_slower_way_to_find_episodes_gives_the_same_stamps(monkeypatch, layout, envs, ids, alternative):
    results = []
    for _ in range(2):
        rb = make_buffer(ndim=2 if layout == "lanes" else 1)
        recorded = recorded_in(rb, envs, "final", ids=ids)
        for moves in itertools.product(("go", "silent", "stay"), ("go", "terminated", "silent"), ("go", "stay")):
            recorded.play([[*moves[env % 3 :], *moves[: env % 3]] for env in range(envs)], layout)
        recorded.play([["go"] * 4 + ["terminated"]] * envs, layout)
        stamps, report = rb.storage[:]["hindsight_stamp"], rb.transform[0].report()
        first = stamps.min() >> 25 << 25  # the first step of the first episode
        results.append((stamps - first, report.episodes, report.running, report.mean_length, report.discontinuous))
        monkeypatch.setattr(*ALTERNATIVES[alternative])
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]


@pytest.mark.filterwarnings("ignore:.* of the transitions do not continue an episode")
def test_idle_episodes_do_not_pile_up():
    recorded = record(size=10_000, capacity=10_000)
    for _ in range(6):
        recorded.play([["silent"] * 500])
    assert recorded.rb.transform[0].report().running == 1024
    assert recorded.check() >= 2500, "all but those of the last write are relabelled"


# Cost


def lines_of(action):
    """Return the number of Python lines of the package that a call executes."""
    lines = 0

    def trace(frame, event, argument):
        nonlocal lines
        lines += event == "line" and "/torchrl_her/" in frame.f_code.co_filename
        return trace

    before = sys.gettrace()  # that of coverage
    sys.settrace(trace)
    action()
    sys.settrace(before)
    return lines


def test_no_python_line_is_executed_per_transition():
    counts = []
    for steps in (100, 400):
        recorded = record()
        recorded.play([["go"] * 5])
        data = recorded.world.tensordict(recorded.world.play(0, ["go"] * steps))
        written = lines_of(lambda: recorded.rb.extend(data))  # noqa: B023
        rows = recorded.rb.storage[:steps]
        counts.append((written, lines_of(lambda: recorded.rb.transform[0](rows))))  # noqa: B023
    assert all(abs(more - few) < 100 for few, more in zip(*counts, strict=True))


def test_no_python_line_is_executed_per_environment():
    counts = []
    for envs in (50, 200):
        recorded, lines = record(envs=envs), []
        for moves in (["go"] * 5, ["go"], ["terminated"], ["go"], ["silent"] + ["go"] * 70):
            rows = [row for env in range(envs) for row in recorded.world.play(env, moves)]
            data = recorded.world.tensordict(rows)
            lines.append(lines_of(lambda: recorded.rb.extend(data)))  # noqa: B023
        counts.append(lines)
    assert all(abs(more - few) < 100 for few, more in zip(*counts, strict=True))


def walks(episodes, steps=8, states=3):
    """Return the transitions of episodes that start at 0 and whose goals are the same again and again."""
    data = World(1, Goals(())).written(whole_episodes(*[steps] * episodes))
    moves = np.random.default_rng(0).integers(-1, 2, len(data))
    place = 0
    for row, move in enumerate(moves.tolist()):
        place = 0 if row % steps == 0 else place
        data["achieved_goal"][row] = place
        place = min(max(place + move, 0), states - 1)
        data["next", "achieved_goal"][row] = place
    data["desired_goal"] = data["next", "desired_goal"] = torch.full((len(data),), 9.0)
    return data


@pytest.mark.parametrize("ids", ["of the environment", "of episodes", None])
def test_an_environment_that_starts_its_episodes_in_one_state_is_followed_through_writes_of_equal_size(ids):
    """A write often ends with the first step of an episode, at the goals at which the last write ended."""
    data, hindsight = walks(60), HERTransform(None)
    if ids is None:
        data = data.exclude("collector")
    elif ids == "of the environment":
        data["collector", "traj_ids"].zero_()
    for rows in (data[:1], *data[1:].split(8)):
        hindsight.inv(rows)
    report = hindsight.report()
    assert (report.episodes, report.min_length, report.max_length) == (60, 8, 8)


def test_the_rows_of_the_first_write_are_environments_although_one_starts_where_another_arrived():
    rows, hindsight = walks(20).exclude("collector").reshape(20, 8), HERTransform(None)
    for part in (rows[:, :3], rows[:, 3:]):
        hindsight.inv(part.clone())
    report = hindsight.report()
    assert (report.episodes, report.min_length, report.max_length, report.ambiguous) == (20, 8, 8, 0.0)


def test_goals_of_another_size_than_those_of_running_episodes_are_refused():
    hindsight, data = make_transform(), World(1, Goals()).written(["go"] * 6)
    hindsight.inv(data[:3])
    for key in ("achieved_goal", ("next", "achieved_goal")):
        data[key] = data[key].double()
    with pytest.raises(ValueError, match=r"take 24 bytes per transition, and those of the running episodes 16.*flush"):
        hindsight.inv(data[3:])
    hindsight.flush()
    hindsight.inv(data[3:])
