"""The data of `gciql.py`: a waypoint follower and random play, in the layout of TorchRL's collectors."""

import itertools

import numpy as np
import pytest
import torch
from tensordict import TensorDict

pytest.importorskip("gymnasium_robotics")
import gymnasium
import pointmaze_data

STEPS = 10_200  # twenty episodes and a part of another


@pytest.fixture(scope="module")
def data():
    env = gymnasium.make("PointMaze_UMaze-v3", max_episode_steps=pointmaze_data.EPISODE_STEPS)
    with pointmaze_data.tqdm(disable=True) as bar:
        return pointmaze_data.record(env, STEPS, np.random.default_rng(0), bar)


def episodes(data):
    return data.split([500] * 20 + [200])


def test_a_transition_begins_where_the_one_before_it_ended(data):
    for episode in episodes(data):
        for key in ("observation", "achieved_goal"):
            assert torch.equal(episode[key][1:], episode["next", key][:-1])
        assert torch.equal(episode["achieved_goal"], episode["observation"][:, :2])
        assert len(set(episode["collector", "traj_ids"].tolist())) == 1
        assert len(set(episode["random_play"].flatten().tolist())) == 1


def test_an_episode_ends_after_500_steps_or_with_the_data_and_never_terminates(data):
    ends = data["next", "done"].flatten().nonzero().flatten()
    assert ends.tolist() == [*range(499, STEPS - 200, 500), STEPS - 1]
    assert torch.equal(data["next", "done"], data["next", "truncated"])
    for key in ("done", "truncated", "terminated", ("next", "terminated")):
        assert not data[key].any()
    ids = data["collector", "traj_ids"]
    assert torch.equal(ids[1:] != ids[:-1], data["next", "done"][:-1, 0])


def test_shapes_and_dtypes_are_those_of_a_collector(data):
    widths = {
        "observation": 4,
        "achieved_goal": 2,
        "action": 2,
        ("next", "observation"): 4,
        ("next", "achieved_goal"): 2,
    }
    for key, width in widths.items():
        assert data[key].shape == (STEPS, width)
        assert data[key].dtype == torch.float32
    for key in ("done", ("next", "done"), "random_play"):
        assert data[key].shape == (STEPS, 1)
        assert data[key].dtype == torch.bool
    assert data["collector", "traj_ids"].shape == (STEPS,)
    assert data["action"].abs().max() <= 1


def test_there_are_no_goals_and_no_rewards_because_no_action_depends_on_them(data):
    assert not {"desired_goal", "reward"} & {*data.keys(), *data["next"].keys()}


def test_random_play_holds_its_actions_and_the_follower_visits_more_cells(data):
    cells = {True: [], False: []}
    for episode in episodes(data)[:-1]:
        random_play = bool(episode["random_play"][0])
        held = [len(list(group)) for _, group in itertools.groupby(map(tuple, episode["action"].tolist()))]
        if random_play:
            assert max(held) <= pointmaze_data.LONGEST_HOLD
            assert np.mean(held) > 5
        else:
            pushes = episode["action"].abs() < 1  # noise that was not clipped
            assert episode["action"][pushes].unique().numel() > 0.99 * pushes.sum()
        cells[random_play].append(len(episode["achieved_goal"].round().unique(dim=0)))
    assert len(cells[True]) >= 1
    assert len(cells[False]) > len(cells[True])
    assert np.mean(cells[False]) > np.mean(cells[True])


def test_a_path_goes_through_neighbouring_free_cells_and_none_is_shorter():
    maze_map = gymnasium.make("PointMaze_Medium-v3").unwrapped.maze.maze_map
    free = [tuple(map(int, cell)) for cell in np.argwhere(np.array(maze_map) != 1)]
    distance = {(a, b): 0 if a == b else np.inf for a in free for b in free}
    for a, b in itertools.product(free, free):
        if abs(a[0] - b[0]) + abs(a[1] - b[1]) == 1:
            distance[a, b] = 1
    for through, a, b in itertools.product(free, free, free):
        distance[a, b] = min(distance[a, b], distance[a, through] + distance[through, b])
    for a, b in itertools.product(free, free):
        path = [a, *pointmaze_data.shortest_path(maze_map, a, b)]
        assert path[-1] == b
        assert len(path) - 1 == distance[a, b]
        assert all(distance[pair] == 1 for pair in itertools.pairwise(path))


def test_the_command_saves_what_a_seed_determines(run_script, tmp_path):
    for folder, seed in (("a", 3), ("b", 3), ("c", 4)):
        printed = run_script("pointmaze_data", "PointMaze_UMaze-v3", "--steps", 600, "--seed", seed, "--folder", folder)
        assert printed.startswith("600 steps, ")
        assert printed.endswith(f"are in {folder}.\n")
    a, b, c = (TensorDict.load_memmap(tmp_path / folder) for folder in "abc")
    assert (a == b).all()
    assert not torch.equal(a["action"], c["action"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["FetchReach-v4"], "FetchReach-v4 is not a PointMaze, such as PointMaze_UMaze-v3"),
        (["PointMaze_None-v3"], "'PointMaze_None-v3' cannot be made"),
        (["PointMaze_UMaze-v3", "--steps", 0], "--steps 0 must be 1 or more"),
        (["PointMaze_UMaze-v3", "--folder", "."], r"\. exists already: remove it, or choose another --folder"),
    ],
)
def test_wrong_arguments_are_named_and_nothing_is_written(arguments, message, run_script, tmp_path):
    with pytest.raises(SystemExit, match=message):
        run_script("pointmaze_data", *arguments)
    assert not list(tmp_path.iterdir())
