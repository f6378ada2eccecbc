"""Generates data for `gciql.py`: a noisy waypoint follower and random play in a PointMaze.

In four of five episodes, on average, a controller follows shortest paths to random cells, one after the other, with
noise on every action. In the other episodes, random actions are repeated for 1 to 20 steps each. Episodes have 500
steps. The behaviour does not depend on the environment's goal, so the data contain neither desired goals nor rewards.
Otherwise they have the layout of TorchRL's collectors. They are saved as a memory-mapped TensorDict. 100,000 steps take
about 20 seconds::

    python examples/pointmaze_data.py PointMaze_UMaze-v3
    python examples/pointmaze_data.py PointMaze_Medium-v3 --steps 500000
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable
from itertools import chain, count
from pathlib import Path
from typing import Any

import gymnasium
import gymnasium_robotics
import numpy as np
from tensordict import TensorDict
from tqdm import tqdm

gymnasium.register_envs(gymnasium_robotics)

EPISODE_STEPS = 500
RANDOM_PLAY = 0.2  # share of the episodes
NOISE = 0.5  # standard deviation, in units of the action
LONGEST_HOLD = 20  # steps for which a random action is repeated
GAINS = 10.0, 1.0  # of the follower: per metre to the waypoint, per metre per second of speed
WAYPOINT_RADIUS = 0.3  # metres

Cell = tuple[int, int]
Behaviour = Callable[[np.ndarray], np.ndarray]  # maps an observation [4] to an action [2]

# Behaviour


def shortest_path(maze_map: list[list[Any]], start: Cell, end: Cell) -> list[Cell]:
    """Return the cells from ``start`` to ``end``, without ``start``."""
    came_from, queue = {end: end}, deque([end])
    while start not in came_from:
        row, column = cell = queue.popleft()
        for neighbour in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
            if maze_map[neighbour[0]][neighbour[1]] != 1 and neighbour not in came_from:
                came_from[neighbour] = cell
                queue.append(neighbour)
    path = []
    while start != end:
        start = came_from[start]
        path.append(start)
    return path


def follow_waypoints(maze: Any, rng: np.random.Generator) -> Behaviour:
    """Return a behaviour that visits random cells along shortest paths, with noise on every action."""
    cells = [tuple(cell) for cell in np.argwhere(np.array(maze.maze_map) != 1)]
    waypoints: list[Cell] = []

    def act(observation: np.ndarray) -> np.ndarray:
        position, velocity = observation[:2], observation[2:]
        while waypoints and np.linalg.norm(maze.cell_rowcol_to_xy(np.array(waypoints[0])) - position) < WAYPOINT_RADIUS:
            waypoints.pop(0)
        while not waypoints:
            here = tuple(maze.cell_xy_to_rowcol(position))
            waypoints.extend(shortest_path(maze.maze_map, here, cells[rng.integers(len(cells))]))
        distance = maze.cell_rowcol_to_xy(np.array(waypoints[0])) - position
        return GAINS[0] * distance - GAINS[1] * velocity + NOISE * rng.standard_normal(2)

    return act


def play_at_random(rng: np.random.Generator) -> Behaviour:
    """Return a behaviour that repeats each random action for 1 to `LONGEST_HOLD` steps."""
    held = ([rng.uniform(-1, 1, 2)] * rng.integers(1, LONGEST_HOLD, endpoint=True) for _ in count())
    actions = chain.from_iterable(held)
    return lambda observation: next(actions)


# Data


def record(env: gymnasium.Env, steps: int, rng: np.random.Generator, bar: tqdm) -> TensorDict:
    """Return transitions ``[steps]`` of episodes with `EPISODE_STEPS` steps. The last one can be shorter."""
    before, after = np.empty((steps, 4), np.float32), np.empty((steps, 4), np.float32)
    actions = np.empty((steps, 2), np.float32)
    truncated, random_play = np.zeros((steps, 1), bool), np.zeros((steps, 1), bool)
    unwrapped: Any = env.unwrapped
    maze = unwrapped.maze
    for start in range(0, steps, EPISODE_STEPS):
        rows = slice(start, min(start + EPISODE_STEPS, steps))
        random_play[rows] = rng.random() < RANDOM_PLAY
        act = play_at_random(rng) if random_play[start] else follow_waypoints(maze, rng)
        state, _ = env.reset(seed=int(rng.integers(2**31)))
        for row in range(rows.start, rows.stop):
            before[row] = state["observation"]
            actions[row] = np.clip(act(state["observation"]), -1, 1)
            state, *_ = env.step(actions[row])
            after[row] = state["observation"]
        truncated[rows.stop - 1] = True
        bar.update(rows.stop - rows.start)
    never = np.zeros((steps, 1), bool)
    flags = {"done": truncated, "truncated": truncated, "terminated": never}
    data = {
        "observation": before, "achieved_goal": before[:, :2], "action": actions, "random_play": random_play,
        "collector": {"traj_ids": np.arange(steps) // EPISODE_STEPS}, **dict.fromkeys(flags, never),
        "next": {"observation": after, "achieved_goal": after[:, :2], **flags},
    }  # fmt: skip
    return TensorDict(data, [steps])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env", help="PointMaze_UMaze-v3, PointMaze_Medium-v3 or another PointMaze")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="folder for the data (default: outputs/data/ENV)")
    arguments = parser.parse_args()
    folder = arguments.folder or Path("outputs", "data", arguments.env)
    if folder.exists():
        raise SystemExit(f"{folder} exists already: remove it, or choose another --folder.")
    env = gymnasium.make(arguments.env, max_episode_steps=EPISODE_STEPS, continuing_task=True, reset_target=False)
    interval = 0.2 if sys.stderr.isatty() else 10.0  # seconds; longer for log files
    with tqdm(desc=arguments.env, total=arguments.steps, unit=" steps", mininterval=interval) as bar:
        data = record(env, arguments.steps, np.random.default_rng(arguments.seed), bar)
    data.memmap(folder)
    share = data["random_play"].float().mean()
    print(f"{arguments.steps:,} steps, {share:.0%} of them random play, are in {folder}.")


if __name__ == "__main__":
    main()
