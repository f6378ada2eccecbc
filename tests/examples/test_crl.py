"""Contrastive RL: the loss, and a short run."""

import csv
import math
import sys

import crl
import gymnasium
import pytest
import torch
from torchrl.envs import GymEnv

from torchrl_her import NormalizedInputs
from torchrl_her.envs import PointReach


@pytest.fixture
def loss_and_batch():
    env = GymEnv("torchrl_her/PointReach-v0")
    batch = env.rollout(12)
    inputs = NormalizedInputs()
    inputs(batch)
    networks = crl.make_networks(env, inputs, hidden=[8], features=3)
    return crl.ContrastiveLoss(*networks, target_entropy=-1.0, penalty=0.1), batch


def test_the_critics_loss_is_symmetric_infonce_with_a_penalty(loss_and_batch):
    loss, batch = loss_and_batch
    values = loss(batch)
    encoded = loss.encoders(batch.copy())
    pairs, goals = encoded["representation"].tolist(), encoded["goal_representation"].tolist()
    logits = [[-math.dist(pair, goal) for goal in goals] for pair in pairs]
    expected, correct = 0.0, 0
    for i, row in enumerate(logits):
        column = [other[i] for other in logits]
        of_row, of_column = (math.log(sum(math.exp(logit) for logit in each)) for each in (row, column))
        expected += (of_row - row[i] + of_column - row[i] + 0.1 * of_row**2) / len(logits)
        correct += max(range(len(row)), key=row.__getitem__) == i
    assert values["loss_critic"].item() == pytest.approx(expected, rel=1e-4)
    assert values["accuracy"].item() == pytest.approx(correct / len(logits))


def test_each_loss_changes_only_its_own_networks(loss_and_batch):
    loss, batch = loss_and_batch
    values = loss(batch)
    changed = {"loss_actor": {"actor"}, "loss_alpha": {"log_alpha"}, "loss_critic": {"encoders"}}
    for name, owners in changed.items():
        loss.zero_grad()
        values[name].backward(retain_graph=True)
        found = {each.split(".")[0] for each, p in loss.named_parameters() if p.grad is not None and p.grad.any()}
        assert found == owners


@pytest.mark.parametrize("env", ["torchrl_her/PointReach-v0", "gymnasium_robotics:FetchReach-v4"])
def test_a_short_run_trains_and_writes_its_evaluations(env, monkeypatch, tmp_path):
    path, evaluate = tmp_path / "run.csv", crl.evaluate
    arguments = f"--env {env} --steps 700 --random-steps 500 --hidden 16 --evaluate-every 100 --output"
    monkeypatch.setattr(sys, "argv", ["crl.py", *arguments.split(), str(path)])
    monkeypatch.setattr(crl, "evaluate", lambda policy, name: evaluate(policy, name, episodes=3))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    crl.main()
    rows = list(csv.DictReader(path.open()))
    assert [row["steps"] for row in rows] == ["0", "600", "700"]
    assert all(0 <= float(row["success"]) <= 1 for row in rows)
    assert float(rows[-1]["seconds"]) > 0


class Uneven(PointReach):
    """Its episodes have different lengths."""

    def step(self, action):
        observation, reward, _, truncated, info = super().step(action)
        return observation, reward, self.np_random.random() < 0.5, truncated, info


class Unjudged(PointReach):
    """It does not say whether an episode succeeds."""

    def _info(self):
        return {}


@pytest.mark.parametrize("env", [Uneven, Unjudged])
def test_environments_that_cannot_be_evaluated_are_refused(env):
    gymnasium.register(f"{env.__name__}-v0", env, max_episode_steps=5)
    act = crl.TensorDictModule(lambda goal: torch.zeros_like(goal), ["desired_goal"], ["action"])
    with pytest.raises(SystemExit, match=r"needs episodes of equal length, and info\['is_success'\]"):
        crl.evaluate(act, f"{env.__name__}-v0", episodes=8)
