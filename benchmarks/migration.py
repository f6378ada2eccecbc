"""Success of both scripts on the page "From Stable-Baselines3": SAC on FetchReach after 2,000 and 5,000 steps.

Each script runs once for each seed and number of steps. Both are evaluated on the same 100 greedy episodes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torchrl import torchrl_logger
from torchrl.envs import set_exploration_type

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "from-stable-baselines3.md"
SB3, OURS = "Stable-Baselines3", "torchrl_her"  # in the order of the page
EPISODES, FIRST_SEED = 100, 1_000_000  # of the evaluation


@torch.no_grad()
@set_exploration_type("DETERMINISTIC")
def act(names: dict[str, Any], observation: dict[str, np.ndarray]) -> np.ndarray:
    """Return the greedy actions of the agent that a script has trained; ``names`` are the script's variables."""
    if "policy" in names:
        return names["policy"](TensorDict(observation, EPISODES))["action"].numpy()
    return names["model"].predict(names["env"].normalize_obs(observation), deterministic=True)[0]


def success(script: str, seed: int, steps: int) -> float:
    """Run a script of the page, and return the share of episodes whose last step is at the goal."""
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its own evaluation
        exec(script.replace("seed, steps = 0, 5_000", f"seed, steps = {seed}, {steps}"), names)
    envs, ended = gymnasium.make_vec("FetchReach-v4", EPISODES, "sync"), np.zeros(EPISODES, bool)
    observation, _ = envs.reset(seed=[FIRST_SEED + i for i in range(EPISODES)])
    while not ended.any():  # all episodes have the same length
        observation, _, _, ended, info = envs.step(act(names, observation))
    return float(info["is_success"].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description='Success of both scripts on the page "From Stable-Baselines3".')
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, nargs="+", default=[2_000, 5_000])
    arguments = parser.parse_args()
    torchrl_logger.setLevel("WARNING")
    torch.set_num_threads(1)
    scripts = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    seeds = ", ".join(map(str, arguments.seeds))
    print(" | ".join([f"| success with seeds {seeds}", *(f"{steps:,} steps" for steps in arguments.steps)]), "|")
    print("|---" * (len(arguments.steps) + 1), end="|\n")
    for library, script in zip((SB3, OURS), scripts, strict=True):
        cells = [
            ", ".join(f"{success(script, seed, steps):.2f}" for seed in arguments.seeds) for steps in arguments.steps
        ]
        print("|", " | ".join([library, *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
