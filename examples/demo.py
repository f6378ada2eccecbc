"""The demo: an agent learns to reach goals, with hindsight and without.

It trains plain DDPG on PointReach with and without hindsight, otherwise with the same settings, and writes a table and
two pictures to ``outputs/demo/``::

    python examples/demo.py
    python examples/demo.py --seeds 11 12 13 14 15
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import compare
import ddpg
import torch
from torchrl.data import TensorDictReplayBuffer
from training.command import plain_ddpg
from training.plots import draw_comparison, draw_relabelled

SETTINGS: dict[str, Any] = {"evaluation": {"interval": 500, "episodes": 100, "num_envs": 20}}
GROUPS = {"with hindsight": True, "without hindsight": False}
EPISODE_STEPS = 50


def relabelled_episodes(replay_buffer: TensorDictReplayBuffer) -> list[dict[str, Any]]:
    """Return three stored episodes, and the new goals of transitions sampled from them.

    These are the episodes that moved farthest among those that missed their goal.
    """
    stored = replay_buffer.storage[:].reshape(-1, EPISODE_STEPS)  # [episodes, steps], not relabelled
    missed = stored["next", "reward"][:, -1, 0] < 0
    went = torch.linalg.vector_norm(stored["next", "achieved_goal"][:, -1] - stored["achieved_goal"][:, 0], dim=-1)
    sampled: Any = replay_buffer.sample(2048)
    sampled = sampled[sampled["hindsight", "relabelled"].flatten()]
    episodes = []
    for index in (went * missed).topk(3).indices.sort().values:
        episode = stored[index]
        transitions = sampled[sampled["collector", "traj_ids"] == episode["collector", "traj_ids"][0]]
        episodes.append(
            {
                "first_step": int(index) * EPISODE_STEPS + 1,
                "path": torch.cat([episode["achieved_goal"], episode["next", "achieved_goal"][-1:]]).numpy(),
                "desired_goal": episode["desired_goal"][0].numpy(),  # [2]
                "positions": transitions["achieved_goal"].numpy(),  # [sampled, 2]
                "relabelled_goals": transitions["desired_goal"].numpy(),  # [sampled, 2]
            }
        )
    return episodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="each is trained with and without hindsight")
    parser.add_argument("--output", type=Path, default=Path("outputs/demo"), help="folder of runs and pictures")
    arguments = parser.parse_args()
    start, folder = time.perf_counter(), arguments.output / time.strftime("%Y-%m-%d_%H-%M-%S")
    groups: dict[str, list[compare.Run]] = {name: [] for name in GROUPS}
    for seed in arguments.seeds:
        for name, has_hindsight in GROUPS.items():
            config = plain_ddpg(seed=seed, hindsight={"enabled": has_hindsight}, **SETTINGS)
            run = ddpg.train(config, folder / f"{name.replace(' ', '-')}-{seed}")
            groups[name].append(compare.Run.read(run.folder))
            if has_hindsight and seed == arguments.seeds[0]:
                draw_relabelled(relabelled_episodes(run.buffer), folder / "hindsight.png")
    print(f"\nAfter {run.steps:,} environment steps:\n\n{compare.table(groups, run.steps)}\n")
    curves = {name: compare.curves(runs) for name, runs in groups.items()}
    seeds = f", median of {len(arguments.seeds)} seeds" if len(arguments.seeds) > 1 else ""
    draw_comparison({"": curves}, folder / "success.png", f"PointReach: DDPG with and without hindsight{seeds}")
    print(f"{time.perf_counter() - start:.0f} s in total. Pictures and runs: {folder}/")


if __name__ == "__main__":
    main()
