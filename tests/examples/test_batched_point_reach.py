"""The batched PointReach behaves like the Gymnasium environment, and never waits for the device."""

import gymnasium
import numpy as np
import pytest
import torch
from batched_point_reach import BatchedPointReach, reward
from torchrl.envs.utils import check_env_specs

from support.dispatch import NoWaits

OBSERVATIONS = "observation", "achieved_goal", "desired_goal"
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@each_device
def test_steps_are_those_of_the_gymnasium_environment(device):
    """Half of the masses drive to their goals, and half into the corners."""
    batched = BatchedPointReach(30, device=device, seed=0)
    check_env_specs(batched)
    state, reached = batched.reset(), 0
    envs = [gymnasium.make("torchrl_her/PointReach-v0") for _ in range(30)]
    for env, position, goal in zip(envs, *(state[key].cpu().numpy() for key in OBSERVATIONS[1:]), strict=True):
        env.reset(seed=0)
        env.unwrapped.position, env.unwrapped.goal = position.copy(), goal.copy()
    for _ in range(50):
        position, velocity = state["observation"].split(2, dim=-1)
        state["action"] = (8 * (state["desired_goal"] - position) - 2 * velocity).contiguous()
        state["action"][15:] = 5 * state["desired_goal"][15:].sign()
        with NoWaits():
            state = batched._step(state).update(state.select("action"))
        found = state.cpu()
        for number, env in enumerate(envs):
            observation, of_step, terminated, truncated, _ = env.step(found["action"][number].numpy())
            for key in OBSERVATIONS:
                np.testing.assert_allclose(found[key][number], observation[key], atol=1e-5, err_msg=key)
            distance = np.linalg.norm(observation["achieved_goal"] - observation["desired_goal"])
            assert abs(distance - 0.05) < 1e-5 or float(found["reward"][number]) == of_step
            assert [bool(found[key][number]) for key in ("terminated", "truncated")] == [terminated, truncated]
            reached += of_step == 0
    assert reached > 150
    assert torch.equal(found["achieved_goal"][15:], found["desired_goal"][15:].sign())  # in the corners
    assert reward(torch.tensor([0.05, 0.0]), torch.zeros(2)) == 0  # the boundary belongs to the goal


@each_device
def test_a_partial_reset_resets_the_chosen_ones_alone(device):
    env = BatchedPointReach(6, device=device, seed=0)
    state = env.rollout(7)[:, -1]["next"].exclude("reward")
    reset = torch.tensor([True, False, False, True, False, False], device=device)
    with NoWaits():
        after = env._reset(state.clone().set("_reset", reset.unsqueeze(-1)))
    for key in OBSERVATIONS:
        assert torch.equal((after[key] == state[key]).all(-1), ~reset)
    assert not after["observation"][reset, 2:].any()
    following = env.rollout(50, tensordict=after, auto_reset=False, break_when_any_done=False)
    lengths = following["next", "truncated"].squeeze(-1).int().argmax(1) + 1
    assert lengths.tolist() == [50 if each else 43 for each in reset.tolist()]
