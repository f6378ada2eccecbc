"""The batched PointReach behaves like the Gymnasium environment, and hindsight finds its episodes."""

import sys

import gymnasium
import numpy as np
import pytest
import torch
from batched_point_reach import BatchedPointReach, main, reward
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs.utils import check_env_specs

import torchrl_her.envs
from support.dispatch import NoWaits
from torchrl_her import HERTransform, SparseReward

OBSERVATIONS = "observation", "achieved_goal", "desired_goal"
on_cuda = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
)
each_device = pytest.mark.parametrize("device", ["cpu", on_cuda])


def gymnasium_envs(state):
    """Gymnasium environments with the starts and goals of a reset batch."""
    envs = []
    for position, goal in zip(state["achieved_goal"].cpu().numpy(), state["desired_goal"].cpu().numpy(), strict=True):
        env = gymnasium.make("torchrl_her/PointReach-v0")
        env.reset(seed=0)
        env.unwrapped.position, env.unwrapped.goal = position.copy(), goal.copy()
        envs.append(env)
    return envs


def actions_towards(state, strength):
    """Actions that drive towards the goal, beyond [-1, 1] if ``strength`` is large, so that some goals are reached."""
    position, velocity = state["observation"].split(2, dim=-1)
    return (strength * (state["desired_goal"] - position) - strength / 4 * velocity).contiguous()


@each_device
@pytest.mark.parametrize("strength", [1.0, 8.0])
def test_steps_are_those_of_the_gymnasium_environment(device, strength):
    batched = BatchedPointReach(30, device=device, seed=0)
    state = batched.reset()
    envs = gymnasium_envs(state)
    reached = 0
    for step in range(50):
        state["action"] = actions_towards(state, strength) + 0.3 * torch.randn(30, 2, device=device)
        state = batched.step(state)
        following = state["next"].cpu()
        for number, env in enumerate(envs):
            observation, of_step, terminated, truncated, _ = env.step(state["action"][number].cpu().numpy())
            for key in OBSERVATIONS:
                np.testing.assert_allclose(following[key][number], observation[key], atol=1e-5, err_msg=key)
            distance = np.linalg.norm(observation["achieved_goal"] - observation["desired_goal"])
            if abs(distance - 0.05) > 1e-5:
                assert float(following["reward"][number]) == of_step
            flags = [bool(following[key][number]) for key in ("terminated", "truncated", "done")]
            assert flags == [terminated, truncated, terminated or truncated]
            assert truncated == (step == 49)
            reached += of_step == 0
        state = state["next"].exclude("reward").clone()
    assert strength == 1.0 or reached > 300  # both rewards were compared
    assert abs(following["observation"][:, :2]).max() <= 1.0


@each_device
def test_masses_stop_at_the_walls_and_at_the_highest_speed_as_they_do_there(device):
    batched = BatchedPointReach(4, device=device, seed=1)
    state = batched.reset()
    envs = gymnasium_envs(state)
    corner = torch.tensor([[5.0, 5.0], [-5.0, 5.0], [5.0, -5.0], [-0.5, -5.0]], device=device)
    for _ in range(50):
        state["action"] = corner
        state = batched.step(state)["next"].exclude("reward")
        for number, env in enumerate(envs):
            observation, *_ = env.step(corner[number].cpu().numpy())
            np.testing.assert_allclose(state["observation"][number].cpu(), observation["observation"], atol=1e-5)
    assert torch.equal(state["achieved_goal"].cpu(), corner.sign().cpu())
    assert torch.equal(state["observation"][:, 2:].abs().cpu(), torch.ones(4, 2))  # the velocity is kept at the wall


def test_the_reward_is_that_of_the_gymnasium_environment():
    achieved, desired = (2 * torch.rand(2, 20_000, 2) - 1).mul(0.1)
    expected = gymnasium.make("torchrl_her/PointReach-v0").unwrapped.compute_reward(achieved, desired, {})
    clear = ((achieved - desired).norm(dim=-1) - 0.05).abs() > 1e-6
    assert torch.equal(reward(achieved, desired)[clear], torch.from_numpy(expected)[clear])
    assert 0.05 < float((reward(achieved, desired) == 0).float().mean()) < 0.95
    assert reward(torch.tensor([0.05, 0.0]), torch.zeros(2)) == 0  # the boundary belongs to the goal


@each_device
def test_it_fits_its_specs(device):
    env = BatchedPointReach(5, device=device)
    check_env_specs(env)
    assert env.rollout(3).device.type == device
    assert {str(value.device.type) for value in env.rollout(3).values(True, True)} == {device}


def test_no_tensor_is_on_the_default_device():
    """So a mistake that only a GPU would show is found on a CPU."""
    with torch.device("meta"):
        env = BatchedPointReach(5, device="cpu", seed=0)
        episodes = env.rollout(60, break_when_any_done=False)
    assert {value.device.type for value in episodes.values(True, True)} == {"cpu"}


@each_device
def test_a_partial_reset_resets_the_chosen_ones_alone(device):
    env = BatchedPointReach(6, device=device, seed=0)
    state = env.rollout(7)[:, -1]["next"].exclude("reward")
    reset = torch.tensor([True, False, False, True, False, False], device=device)
    after = env.reset(state.clone().set("_reset", reset.unsqueeze(-1)))
    for key in OBSERVATIONS:
        assert torch.equal(after[key][~reset], state[key][~reset])
        assert (after[key][reset] != state[key][reset]).any(-1).all()
    assert not after["observation"][reset, 2:].any()
    assert (after["observation"][~reset, 2:] != 0).any()
    after["action"] = torch.zeros(6, 2, device=device)  # the masses keep their velocity
    outcome = env.step(after)["next"]
    position, velocity = after["observation"].split(2, dim=-1)
    expected = torch.cat([(position + 0.05 * velocity).clamp(-1, 1), velocity], dim=-1)
    assert torch.allclose(outcome["observation"], expected, atol=1e-6)
    after = outcome.exclude("reward")
    lengths = []  # of the remaining episodes: 49 or 42 steps
    for _ in range(50):
        after = env.rand_step(after)["next"].exclude("reward")
        lengths.append(after["truncated"].flatten().cpu())
    first = torch.stack(lengths).int().argmax(0) + 1
    assert first.tolist() == [49 if each else 42 for each in reset.tolist()]


def test_a_long_rollout_resets_each_environment_at_its_end():
    env = BatchedPointReach(3, seed=0)
    state = env.reset()
    env.steps = torch.tensor([[0], [10], [20]])
    episodes = env.rollout(100, tensordict=state, auto_reset=False, break_when_any_done=False)
    ends = [row.flatten().nonzero().flatten().tolist() for row in episodes["next", "truncated"]]
    assert ends == [[49, 99], [39, 89], [29, 79]]
    goals = episodes["desired_goal"]
    changed = (goals[:, 1:] != goals[:, :-1]).any(-1)
    assert [row.nonzero().flatten().tolist() for row in changed] == [[49], [39, 89], [29, 79]]


def test_starts_and_goals_are_uniform_and_a_seed_repeats_them():
    first, again, other = (BatchedPointReach(20_000, seed=seed).reset() for seed in (3, 3, 4))
    assert (first == again).all()
    assert (first["desired_goal"] != other["desired_goal"]).any(-1).all()
    for key in ("achieved_goal", "desired_goal"):
        values = first[key]
        assert values.abs().max() <= 1
        assert torch.allclose(values.mean(0), torch.zeros(2), atol=0.02)
        assert torch.allclose(values.var(0), torch.full((2,), 1 / 3), atol=0.01)  # of the uniform distribution
    assert (
        abs(torch.corrcoef(torch.cat([first["achieved_goal"], first["desired_goal"]], 1).T).fill_diagonal_(0)).max()
        < 0.04
    )
    torch.manual_seed(0)
    unseeded = BatchedPointReach(5).reset()
    assert (unseeded["desired_goal"] != BatchedPointReach(5).reset()["desired_goal"]).any()


def test_stepping_and_resetting_read_no_value():
    env = BatchedPointReach(5)
    state = env.reset()
    state["action"] = torch.rand(5, 2)
    some = state.clone().set("_reset", torch.tensor([True, False, True, False, False]).unsqueeze(-1))
    with NoWaits():
        env._step(state)
        env._reset(None)
        env._reset(some)


@each_device
def test_hindsight_draws_goals_that_the_same_episode_reaches_later(device):
    env = BatchedPointReach(40, device=device, seed=0)
    her = HERTransform(SparseReward(torchrl_her.envs.PointReach.threshold), capacity=4000)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4000, device=device), transform=her)
    written = torch.cat([env.rollout(50).reshape(-1) for _ in range(2)])
    rb.extend(written)
    report = her.report()
    assert (report.episodes, report.running, report.min_length, report.max_length) == (80, 0, 50, 50)
    sample = rb.sample(3000).cpu()
    outcomes = written["next", "achieved_goal"].cpu().view(80, 50, 2)
    relabelled = sample["hindsight", "relabelled"].flatten()
    assert abs(relabelled.float().mean() - 0.8) < 0.04
    episode, step = sample["index"].flatten() // 50, sample["index"].flatten() % 50
    is_goal = (outcomes[episode] == sample["desired_goal"].unsqueeze(1)).all(-1)  # [sample, step]
    is_later = torch.arange(50) >= step.unsqueeze(-1)
    assert (is_goal & is_later).any(1)[relabelled].all()
    original = written["desired_goal"].cpu()[sample["index"].flatten()]
    assert torch.equal(sample["desired_goal"][~relabelled], original[~relabelled])
    expected = reward(sample["next", "achieved_goal"], sample["desired_goal"])
    assert torch.equal(sample["next", "reward"].flatten(), expected)


def test_the_command_prints_steps_per_second(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["batched_point_reach.py", "--num-envs", "10", "--device", "cpu"])
    main()
    assert "steps per second on cpu" in capsys.readouterr().out
