"""The tasks of panda-gym, as the training scripts use them."""

import pytest
import torch
from torchrl.envs import GymEnv

pytest.importorskip("panda_gym", reason="panda-gym is in no extra: pybullet has wheels only for Python 3.11 and older")
import panda


def test_episodes_do_not_end_at_the_goal_and_depend_on_the_seed_alone():
    rollouts = []
    for seed in (3, 3, 4):
        env = GymEnv("PandaReachFixed-v3")
        env.set_seed(seed)
        torch.manual_seed(0)
        rollouts.append(env.rollout(150, break_when_any_done=False))
        env.close()
    first, again, other = rollouts
    assert torch.equal(first["desired_goal"], again["desired_goal"])
    assert torch.equal(first["next", "achieved_goal"], again["next", "achieved_goal"])
    assert len(first["desired_goal"].unique(dim=0)) == 3
    assert not torch.equal(first["desired_goal"], other["desired_goal"])
    assert first["next", "done"].flatten().nonzero().flatten().tolist() == [49, 99, 149]


def test_a_lift_counts_ten_times():
    assert panda.ten_heights(torch.tensor([[1.0, 2.0, 0.25]])).tolist() == [[1.0, 2.0, 2.5]]
