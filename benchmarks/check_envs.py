"""Findings of check_goal_env in published environments, and its run time.

Prints a table. Needs the extra `benchmarks`. Pass ids to check other environments:

    python benchmarks/check_envs.py
    python benchmarks/check_envs.py FetchReach-v4 AntMaze_UMaze-v5
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import gymnasium_robotics
from stable_baselines3.common.envs import BitFlippingEnv

from torchrl_her import check_goal_env
from torchrl_her.envs import BitFlipping

IDS = [
    "FetchReach-v4",
    "FetchPush-v4",
    "FetchSlide-v4",
    "FetchPickAndPlace-v4",
    "FetchReachDense-v4",
    "HandReach-v3",
    "HandManipulateBlock-v1",
    "HandManipulateBlockRotateZ-v1",
    "HandManipulateEgg-v1",
    "HandManipulatePen-v1",
    "PointMaze_UMaze-v3",
    "PointMaze_Large-v3",
    "PointMaze_UMazeDense-v3",
    "AntMaze_UMaze-v5",
    "AntMaze_Large_Diverse_G-v5",
    "FrankaKitchen-v1",
    "torchrl_her/PointReach-v0",
]
MADE: dict[str, Callable[[], Any]] = {
    "PointMaze_UMaze-v3, continuing_task=False": lambda: gymnasium.make("PointMaze_UMaze-v3", continuing_task=False),
    "PointMaze_UMaze-v3, reset_target=True": lambda: gymnasium.make("PointMaze_UMaze-v3", reset_target=True),
    "BitFlipping(15)": BitFlipping,
    "BitFlipping(4)": partial(BitFlipping, 4),
    "BitFlipping(4, discrete_observation=True)": partial(BitFlipping, 4, discrete_observation=True),
    "BitFlipping(8, image_observation=True)": partial(BitFlipping, 8, image_observation=True),
    "BitFlippingEnv(4) of Stable-Baselines3": partial(BitFlippingEnv, 4),
    "the same, continuous=True": partial(BitFlippingEnv, 4, continuous=True),
    "the same, discrete_obs_space=True": partial(BitFlippingEnv, 4, discrete_obs_space=True),
    "the same, image_obs_space=True": partial(BitFlippingEnv, 4, image_obs_space=True),
}


def main() -> None:
    warnings.filterwarnings("ignore")
    gymnasium.register_envs(gymnasium_robotics)
    envs = {name: name for name in sys.argv[1:] or IDS} | ({} if sys.argv[1:] else MADE)
    print(f"| {'environment':<41} | {'seconds':>7} | steps | found |\n|{'-' * 43}|{'-' * 9}|{'-' * 7}|{'-' * 7}|")
    for name, env in envs.items():
        begin = time.perf_counter()
        report = check_goal_env(env)
        seconds = time.perf_counter() - begin
        lists = {"error": report.errors, "warning": report.warnings, "note": report.notes}
        found = [f"{severity} {finding.name}" for severity, findings in lists.items() for finding in findings]
        print(f"| {name:<41} | {seconds:7.1f} | {report.steps:>5,} | {', '.join(found) or 'nothing'} |", flush=True)


if __name__ == "__main__":
    main()
