"""The share of relabelled transitions with long episodes, many environments and silent resets.

    python benchmarks/relabelled_share.py

``capacity`` is the size of the storage, and ``her_ratio`` is 0.8. The share is measured once the storage has wrapped.
"""

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from torchrl_her import HERTransform, SparseReward

CASES = {  # environments, steps of an episode, size of the storage, whether the end of an episode sets a flag
    "16 environments, 1,000 steps, 64,000 transitions": (16, 1000, 64_000, True),
    "1,024 environments, 1,000 steps, 256,000 transitions": (1024, 1000, 256_000, True),
    "1 environment, silent resets after 100 steps, 10,000 transitions": (1, 100, 10_000, False),
}
MOMENTS = 20  # during the last episode at which the share is measured


def frames(envs: int, steps: int, first: int, count: int, has_flag: bool) -> TensorDict:
    """Return frames ``[count * envs]``, one step of each environment after the other; all environments are in step."""
    time = torch.arange(first, first + count).repeat_interleave(envs)
    env = torch.arange(envs).repeat(count)
    episode, step = time // steps, time % steps
    goal = torch.stack([env + envs * episode, step], dim=1).float()
    desired = torch.full_like(goal, -1.0)
    done = (step == steps - 1)[:, None] & has_flag
    after = {"achieved_goal": goal + torch.tensor([0.0, 1.0]), "desired_goal": desired, "done": done}
    after |= {"reward": torch.full((len(goal), 1), -1.0), "terminated": torch.zeros_like(done), "truncated": done}
    ids = {"traj_ids": env if not has_flag else env + envs * episode}
    return TensorDict(
        {"achieved_goal": goal, "desired_goal": desired, "next": after, "collector": ids}, batch_size=len(goal)
    )


def shares(envs: int, steps: int, size: int, has_flag: bool) -> list[float]:
    """Return the share of relabelled transitions at several moments."""
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(size), transform=HERTransform(SparseReward(0.5), capacity=size), batch_size=4096
    )
    frame = max(1, steps // MOMENTS)
    needed = 2 * -(-size // envs) + steps
    measured = []
    for first in range(0, needed, frame):
        if envs == 1:
            buffer.extend(frames(envs, steps, first, frame, has_flag))
        else:
            for step in range(first, first + frame):
                buffer.extend(frames(envs, steps, step, 1, has_flag))
        if first >= needed - steps:
            measured.append(float(buffer.sample()["hindsight", "relabelled"].float().mean()))
    return measured


def main() -> None:
    """Print one line for each case."""
    for name, case in CASES.items():
        measured = shares(*case)
        print(f"{name}: {min(measured):.2f} to {max(measured):.2f}, mean {sum(measured) / len(measured):.2f}")


if __name__ == "__main__":
    main()
