"""Generates data for `offline.py`: a noisy point mass that visits random cells of an OGBench maze.

This is OGBench's procedure for its "navigate" data sets (Park et al. 2024, arXiv:2410.20092). A controller moves along
shortest paths, with noise on every action, and gets a new goal whenever it reaches one. The file has the format of
OGBench's files, which ``torchrl_her.load_ogbench`` reads. A million steps take one to two minutes::

    python examples/pointmaze_data.py
    python examples/pointmaze_data.py pointmaze-large-v0
"""

from __future__ import annotations

import argparse
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import ogbench  # noqa: F401  # registers the environments
from tqdm import tqdm

NOISE = 0.5  # standard deviation, in units of the action

Cell = tuple[int, int]  # row and column


def is_corridor(maze_map: np.ndarray, cell: Cell) -> bool:
    """Return whether a free cell has walls on two opposite sides, and free cells on the others."""
    row, column = cell
    above, below, left, right = maze_map[[row - 1, row + 1, row, row], [column, column, column - 1, column + 1]]
    return (above, below, left, right) in ((0, 0, 1, 1), (1, 1, 0, 0))


def generate(name: str, episodes: int, steps: int, seed: int) -> dict[str, np.ndarray]:
    """Return the states, actions and ends of episodes, each an array with ``episodes * steps`` rows.

    Args:
        name (str): an environment of OGBench, such as ``pointmaze-medium-v0``.
        episodes (int): the number of episodes.
        steps (int): the number of states of each episode, one more than its transitions.
        seed (int): the seed of all random numbers. This seeds NumPy's global generator, which the environment uses.
    """
    env = gymnasium.make(name, terminate_at_goal=False, max_episode_steps=steps, disable_env_checker=True)
    maze: Any = env.unwrapped
    rng = np.random.default_rng(seed)
    np.random.seed(seed)  # noqa: NPY002
    env.action_space.seed(seed)
    cells = [(int(row), int(column)) for row, column in np.argwhere(maze.maze_map == 0)]
    goals = [cell for cell in cells if not is_corridor(maze.maze_map, cell)]

    @cache
    def waypoint(start: Cell, end: Cell) -> np.ndarray:
        """Return the center of the cell that comes after ``start`` on a shortest path, by breadth-first search."""
        return maze.get_oracle_subgoal(maze.ij_to_xy(start), maze.ij_to_xy(end))[0]

    states = np.empty((episodes, steps, 2), np.float32)
    actions = np.empty((episodes, steps, 2), np.float32)
    for episode in tqdm(range(episodes), name, unit=" episodes"):
        task = {"init_ij": cells[rng.integers(len(cells))], "goal_ij": goals[rng.integers(len(goals))]}
        state, _ = env.reset(seed=seed if episode == 0 else None, options={"task_info": task})
        for step in range(steps):
            way = waypoint(maze.xy_to_ij(state), maze.xy_to_ij(maze.cur_goal_xy)) - state
            action = way / (np.linalg.norm(way) + 1e-6) + NOISE * rng.standard_normal(2)
            states[episode, step], actions[episode, step] = state, np.clip(action, -1, 1)
            state, *_, info = env.step(actions[episode, step])
            if info["success"]:
                cell = goals[rng.integers(len(goals))]
                # With `goal_ij`, OGBench sets the position of the goal's marker to None.
                maze.set_goal(goal_xy=maze.add_noise(maze.ij_to_xy(cell)))
    env.close()
    terminals = np.zeros((episodes, steps), bool)
    terminals[:, -1] = True
    return {
        "observations": states.reshape(-1, 2),
        "actions": actions.reshape(-1, 2),
        "terminals": terminals.flatten(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    mazes = [f"pointmaze-{size}-v0" for size in ("medium", "large", "giant")]
    parser.add_argument("env", nargs="?", choices=mazes, default=mazes[0], metavar="ENV", help=", ".join(mazes))
    parser.add_argument("--episodes", type=int, default=1_000)
    parser.add_argument("--steps", type=int, default=1_001, help="states of each episode (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="an .npz file (default: outputs/data/ENV.npz)")
    config = parser.parse_args()
    path = config.output or Path("outputs", "data", f"{config.env}.npz")
    if path.exists():
        raise SystemExit(f"{path} exists already: remove it, or choose another --output.")
    data = generate(config.env, config.episodes, config.steps, config.seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **data)  # type: ignore[arg-type]
    print(f"{len(data['terminals']):,} states of {config.episodes:,} episodes are in {path}.")


if __name__ == "__main__":
    main()
