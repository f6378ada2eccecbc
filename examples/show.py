"""Shows the policy of a run: a table of greedy episodes, and a picture of some of them with their goals.

It loads the last checkpoint of the run, or those of ``--step``, which then play the same episodes::

    python examples/show.py outputs/ddpg/torchrl_her-PointReach-v0/2026-01-31_12-00-00
    python examples/show.py outputs/ddpg/torchrl_her-PointReach-v0/2026-01-31_12-00-00 --seed 7 --evaluate 1000
    python examples/show.py outputs/ddpg/torchrl_her-PointReach-v0/2026-01-31_12-00-00 --step 500 5000 --episodes 2
    MUJOCO_GL=egl python examples/show.py outputs/ddpg/FetchReach-v4/2026-01-31_12-00-00 --render --video
    python examples/show.py outputs/sac/PointMaze_Large-v3/2026-01-31_12-00-00 --goals 10000 50000 200000

The picture is ``episodes.png`` in the folder of the run. With ``--render``, it shows frames that the environment
renders (``rgb_array``), with the goal drawn in. ``--video`` also writes these frames to ``episodes.gif``, those of
several checkpoints side by side. MuJoCo needs ``MUJOCO_GL=egl`` or ``MUJOCO_GL=osmesa`` to render without a display.
With ``--goals``, ``goals.png`` shows which goals a run with ``goals.selection`` selected until each of these steps.
"""

from __future__ import annotations

import argparse
import importlib
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import imageio.v3 as imageio
import numpy as np
import torch
from omegaconf import OmegaConf
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl import torchrl_logger
from torchrl.checkpoint import Checkpoint, CheckpointRotation
from torchrl.envs import EnvBase, ExplorationType, set_exploration_type
from training.command import read_settings
from training.environments import EVALUATION_SEED, LONGEST_EPISODE, Evaluation, load_function, make_env
from training.parts import make_buffer, make_hindsight, make_inputs
from training.plots import Walls, draw_episodes, draw_frames, draw_goals, save
from training.rendering import make_rendering_env, mark_goal
from training.settings import Env, Settings

from torchrl_her.checkpoints import damage_of

MAZE_RADIUS = 0.45  # metres; an attribute for it is missing in the mazes of Gymnasium-Robotics
FRAMES_PER_SECOND = 20  # of the video
MOST_POINTS = 4_000  # in a panel of the picture of goals


def load_settings(folder: Path) -> Settings:
    """Return the settings of a run, for this machine's CPU."""
    config = cast(Settings, OmegaConf.to_object(read_settings(folder)))
    config.device = "cpu"
    return config


def load_policy(config: Settings, checkpoint: Path) -> TensorDictModuleBase:
    """Return the greedy policy of a checkpoint, with its normalization."""
    if damage := damage_of(checkpoint):
        raise SystemExit(f"{checkpoint} is damaged ({damage}): name other ones with --step.")
    env = make_env(config.env)
    policy = importlib.import_module(config.algorithm).make_policy(config, env, make_inputs(config, env))
    Checkpoint(policy=policy).load(checkpoint, components=["policy"], map_location=config.device)
    return policy


def find_checkpoints(folder: Path, steps: list[int]) -> dict[int, Path]:
    """Return the checkpoints of some steps of a run, or its last one if there are none, by step."""
    paths = CheckpointRotation(folder / "checkpoints", keep_last=1).checkpoints()
    if not paths:
        raise SystemExit(f"There is no checkpoint in {folder}/.")
    found = {int(path.name.rpartition("-")[2]): path for path in paths}
    for step in steps:
        if step not in found:
            raise SystemExit(
                f"There is no checkpoint of step {step} in {folder}/, only of {', '.join(map(str, found))}."
            )
    return {step: found[step] for step in steps or [max(found)]}


def success_radius(env: EnvBase) -> float | None:
    """Return the largest distance at which a goal is reached, or None if the environment has no such attribute."""
    gym_env = env.unwrapped
    default = MAZE_RADIUS if hasattr(gym_env, "maze") else None
    return getattr(gym_env, "distance_threshold", getattr(gym_env, "threshold", default))


def play(env: EnvBase, policy: TensorDictModuleBase, seed: int, config: Env) -> tuple[dict[str, Any], int]:
    """Return one greedy episode, in the form for `draw_episodes` and `draw_frames`, and the next seed."""
    next_seed = env.set_seed(seed)
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        steps = env.rollout(LONGEST_EPISODE, policy)

    def with_start(key: str) -> Tensor:
        return torch.cat([steps[key][:1], steps["next", key]])  # [steps + 1, ...]

    achieved, goal_fn = with_start(config.achieved_goal), load_function(config.goal_fn)
    episode = {
        "achieved_goal": (achieved if goal_fn is None else goal_fn(achieved)).flatten(1).numpy(),
        "desired_goal": steps[config.desired_goal][0].flatten().numpy(),
        "success": bool(steps["next", config.success][-1]),
    }
    if "pixels" in steps.keys():  # noqa: SIM118
        pixels = with_start("pixels").numpy()
        every = max(1, pixels.shape[1] // 240)
        episode["video"] = pixels[:, ::every, ::every]
    return episode, next_seed


def make_video(episodes: list[dict[str, Any]], count: int) -> list[np.ndarray]:
    """Return the frames of ``count`` episodes of each checkpoint, ``[height, width, 3]``, one after the other."""
    frames = []
    for number in range(count):
        videos = [episode["video"] for episode in episodes[number::count]]  # side by side
        for step in range(max(map(len, videos))):
            frames.append(np.hstack([video[min(step, len(video) - 1)] for video in videos]))
    return frames


def find_walls(env: EnvBase) -> Walls:
    """Return the walls of a maze of Gymnasium-Robotics as squares (left, lower, side), or an empty list."""
    maze = getattr(env.unwrapped, "maze", None)
    if maze is None:
        return []
    side = maze.maze_size_scaling
    cells = np.argwhere(np.array(maze.maze_map, dtype=str) == "1")
    return [(*(maze.cell_rowcol_to_xy(cell) - side / 2), side) for cell in cells]


def goals_between(config: Settings, checkpoint: Path, env: EnvBase, steps: list[int]) -> dict[str, Any]:
    """Return the goals that the buffer of a run contains, for each part of the run, in the form for `draw_goals`."""
    buffer = make_buffer(config, make_hindsight(config), make_inputs(config, env))
    Checkpoint(buffer=buffer).load(checkpoint, components=["buffer"], map_location=config.device)
    if config.buffer.n_steps > 1 or max(steps) > len(buffer):
        raise SystemExit(f"--goals needs steps up to {len(buffer):,}, the size of the buffer, and buffer.n_steps=1.")
    data, goal_fn, panels = buffer.storage[:], load_function(config.env.goal_fn), {}
    for begin, end in pairwise([0, *sorted(steps)]):
        part = data[begin:end]
        achieved, goals = part["next", config.env.achieved_goal], part[config.env.desired_goal]
        selection = part.get("goal_selection", None)
        selected = torch.zeros(len(part), 1) if selection is None else selection["selected"]
        panels[f"{begin:,} to {end:,} steps"] = {
            "achieved goals": (achieved if goal_fn is None else goal_fn(achieved))[
                :: -(-len(part) // MOST_POINTS)
            ].numpy(),
            "selected goals": goals[selected.flatten().bool()].unique(dim=0).numpy(),
            "goals of the environment": (goals if selection is None else selection["desired_goal"])
            .unique(dim=0)
            .numpy(),
        }
    return panels


def table(outcomes: dict[str, Tensor]) -> str:
    """Return a table with the mean, minimum, median and maximum of each outcome."""
    lines = [f"{'':10}{'mean':>10}{'lowest':>10}{'median':>10}{'highest':>10}"]
    for name, values in outcomes.items():
        values = values.float()
        columns = (values.mean(), values.min(), values.median(), values.max())
        lines.append(f"{name:10}" + "".join(f"{float(value):10.3f}" for value in columns))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the run")
    parser.add_argument("--step", type=int, nargs="+", default=[], help="steps of the checkpoints (default: the last)")
    parser.add_argument("--evaluate", type=int, default=100, help="number of episodes in the table")
    parser.add_argument("--seed", type=int, default=EVALUATION_SEED, help="seed (default: the seed of evaluations)")
    parser.add_argument("--episodes", type=int, default=4, help="number of episodes in the picture")
    parser.add_argument("--render", action="store_true", help="draw frames that the environment renders")
    parser.add_argument("--video", action="store_true", help="write a video of the episodes in the picture")
    parser.add_argument("--goals", type=int, nargs="+", metavar="STEP", help="draw only the goals until these steps")
    arguments = parser.parse_args()
    if min(arguments.episodes, arguments.evaluate) < 1:
        parser.error("--episodes and --evaluate must be 1 or more.")
    torchrl_logger.setLevel("WARNING")
    config = load_settings(arguments.folder)
    config.evaluation.episodes = arguments.evaluate
    torch.set_float32_matmul_precision(config.matmul_precision.name)
    checkpoints = find_checkpoints(arguments.folder, arguments.step)
    env = make_env(config.env)
    radius, walls, note = success_radius(env), find_walls(env), ""
    if arguments.goals:
        picture = arguments.folder / "goals.png"
        figure = draw_goals(goals_between(config, max(checkpoints.items())[1], env, arguments.goals), walls)
        save(figure, picture, f"{config.algorithm}, {config.env.name}")
        print(f"Picture: {picture}")
        return
    policies = {step: load_policy(config, checkpoint) for step, checkpoint in checkpoints.items()}
    if arguments.render or arguments.video:
        env = make_rendering_env(config.env)  # for all episodes: MuJoCo renders black frames after one is closed
        note = mark_goal(env, radius)

    evaluation, episodes = Evaluation(config, arguments.seed), []
    for step, policy in policies.items():
        print(f"{arguments.evaluate} greedy episodes of {config.env.name} after {step:,} steps, seed {arguments.seed}")
        print(table(evaluation(policy)))
        seed = arguments.seed  # the first episodes of the table
        for number in range(1, arguments.episodes + 1):
            episode, seed = play(env, policy, seed, config.env)
            after = f"{step:,} steps" if len(policies) > 1 else f"episode {number}"
            episodes.append(episode | {"title": f"{after}: {'success' if episode['success'] else 'failure'}"})
    evaluation.close()
    env.close()
    figure = draw_frames(episodes, note) if arguments.render else draw_episodes(episodes, radius, walls)
    picture, steps = arguments.folder / "episodes.png", " and ".join(f"{step:,}" for step in policies)
    save(figure, picture, f"{config.algorithm}, {config.env.name}, after {steps} steps")
    print(f"Picture: {picture}")
    if arguments.video:
        frames = make_video(episodes, arguments.episodes)
        imageio.imwrite(picture.with_suffix(".gif"), frames, duration=1000 / FRAMES_PER_SECOND, loop=0)
        print(f"Video: {picture.with_suffix('.gif')}")


if __name__ == "__main__":
    main()
