"""The comparison of ways to sample and relabel transitions leaves goals alone where it should."""

import torch
from movement import MovementFilter
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer
from torchrl.envs import Compose

from torchrl_her import HERTransform, PackedStorage, SparseReward


def make_episode(positions):
    """Return an episode in which an object has these positions, ``[steps + 1]``, and does not reach its goal."""
    here, there = positions[:-1].unsqueeze(1), positions[1:].unsqueeze(1)
    goal, last = torch.full_like(here, 9.0), torch.arange(len(here)).unsqueeze(1) == len(here) - 1
    outcome = TensorDict(
        achieved_goal=there, desired_goal=goal, reward=-torch.ones_like(here), terminated=torch.zeros_like(last),
        truncated=last, done=last, batch_size=len(here),
    )  # fmt: skip
    return TensorDict(achieved_goal=here, desired_goal=goal, next=outcome, batch_size=len(here))


def test_the_filter_relabels_only_episodes_with_movement():
    rb = TensorDictReplayBuffer(
        storage=PackedStorage(100),
        transform=Compose(MovementFilter(far=0.1), HERTransform(SparseReward(0.01), capacity=100)),
    )
    rb.extend(make_episode(torch.linspace(0, 0.02, 11)))
    rb.extend(make_episode(torch.linspace(1, 1.005, 11)))  # moves less than 1 cm
    batch = rb.sample(1000)
    relabelled, moved = batch["hindsight", "relabelled"], batch["achieved_goal"] < 0.5
    assert 0.7 < relabelled[moved].float().mean() < 0.9
    assert not relabelled[~moved].any()
    assert (~moved).sum() > 300
