"""Shows the policy of a run: a table of greedy episodes, and a picture of some of them with their goals.

It loads the run's last checkpoint, or the one that is named::

    python examples/show.py outputs/ddpg/torchrl_her/PointReach-v0/2026-01-31_12-00-00
    python examples/show.py outputs/ddpg/torchrl_her/PointReach-v0/2026-01-31_12-00-00 --step 5000 --episodes 8 --render

The picture goes to ``episodes.png`` in the folder of the run. With ``--render`` it shows what the environment renders,
where it can (``rgb_array``); MuJoCo needs ``MUJOCO_GL=egl`` for that where there is no display.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import torch
from common import EVALUATION_SEED, LONGEST_EPISODE, Evaluation, Normalization, make_env, unwrap
from omegaconf import DictConfig
from plots import draw_episodes
from settings import read_config
from tensordict.nn import TensorDictModuleBase
from torchrl import torchrl_logger
from torchrl.checkpoint import Checkpoint, CheckpointRotation
from torchrl.envs import EnvBase, ExplorationType, set_exploration_type
from training import make_policy

PIXELS = {"from_pixels": True, "pixels_only": False}  # of GymEnv: what it renders, and the rest


def load_policy(config: DictConfig, checkpoint: Path) -> TensorDictModuleBase:
    """Return the greedy policy of a checkpoint, with its normalization."""
    env = make_env(config.env)
    normalization = Normalization(config, env)
    script = importlib.import_module(config.algorithm)
    actor, *_ = script.make_networks(config, env, normalization.keys)
    policy = make_policy(normalization, actor)
    Checkpoint(policy=policy).load(checkpoint, components=["policy"], map_location=config.device)
    return policy


def find_checkpoint(folder: Path, step: int | None) -> Path:
    """Return the last checkpoint of a run, or that of a step."""
    checkpoints = CheckpointRotation(folder / "checkpoints", keep_last=1).checkpoints()
    if not checkpoints:
        raise SystemExit(f"There is no checkpoint in {folder}.")
    if step is None:
        return checkpoints[-1]
    steps = [int(path.name.rpartition("-")[2]) for path in checkpoints]
    if step not in steps:
        raise SystemExit(f"There is no checkpoint of step {step} in {folder}: there are those of {steps}.")
    return checkpoints[steps.index(step)]


def play(env: EnvBase, policy: TensorDictModuleBase, seed: int, success: str) -> tuple[dict[str, Any], int]:
    """Return one greedy episode, as ``draw_episodes`` shows it, and the seed of the next."""
    next_seed = env.set_seed(seed)
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        steps = env.rollout(LONGEST_EPISODE, policy)
    goals = torch.cat([steps["achieved_goal"][:1], steps["next", "achieved_goal"]]).flatten(1)
    episode = {
        "achieved_goal": goals.numpy(),  # [steps + 1, goal]
        "desired_goal": steps["desired_goal"][0].flatten().numpy(),  # [goal]
        "success": bool(steps["next", success][-1]),
    }
    if ("next", "pixels") in steps.keys(include_nested=True):
        episode["frames"] = steps["next", "pixels"].numpy()  # [steps, height, width, 3]
    return episode, next_seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the run")
    parser.add_argument("--step", type=int, help="of the checkpoint; by default the last")
    parser.add_argument("--episodes", type=int, default=4, help="in the picture")
    parser.add_argument("--render", action="store_true", help="draw frames of the environment")
    arguments = parser.parse_args()
    if arguments.episodes < 1:
        parser.error("--episodes has to be 1 or more.")
    torchrl_logger.setLevel("WARNING")
    config = read_config(arguments.folder)
    config.device = "cpu"  # wherever it was trained
    torch.set_float32_matmul_precision(config.matmul_precision)
    checkpoint = find_checkpoint(arguments.folder, arguments.step)
    policy = load_policy(config, checkpoint)

    evaluation = Evaluation(config)
    outcomes = evaluation(policy)
    evaluation.close()
    print(f"{checkpoint.name}: {evaluation.episodes} greedy episodes of {config.env.name}")
    print(f"{'':10}{'mean':>10}{'lowest':>10}{'median':>10}{'highest':>10}")
    for name, values in outcomes.items():
        values = values.float()
        columns = (values.mean(), values.min(), values.median(), values.max())
        print(f"{name:10}" + "".join(f"{float(value):10.3f}" for value in columns))

    # One environment for all: while one is cleared away, MuJoCo draws black in another.
    env = make_env(config.env)
    if arguments.render and "rgb_array" not in unwrap(env).metadata["render_modes"]:
        print(f"{config.env.name} renders nothing: the picture shows goals.")
    elif arguments.render:
        env.close()
        env = make_env(config.env, **PIXELS)
    episodes, seed = [], EVALUATION_SEED  # the first of those above
    for _ in range(arguments.episodes):
        episode, seed = play(env, policy, seed, config.env.success)
        episodes.append(episode)
    env.close()
    picture = arguments.folder / "episodes.png"
    draw_episodes(episodes, picture, f"{config.algorithm}, {config.env.name}, {checkpoint.name}")
    print(f"Picture: {picture}")


if __name__ == "__main__":
    main()
