"""Contrastive reinforcement learning with hindsight: no rewards, no values, no target networks.

The critic learns which future states of the same episode follow a state and an action (Eysenbach et al. 2022,
arXiv:2206.07568). Losses and goals are those of JaxGCRL (Bortkiewicz et al. 2024, arXiv:2408.11052); the goals
come from ``HERTransform(None, strategy=Geometric(gamma, truncated=True))``::

    python examples/crl.py
    python examples/crl.py --env gymnasium_robotics:FetchReach-v4 --steps 10000
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import Compose, ExplorationType, GymEnv, set_exploration_type
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal
from tqdm import tqdm

import torchrl_her.envs  # noqa: F401  # registers PointReach
from torchrl_her import Geometric, HERTransform, NormalizedInputs

EVALUATION_SEED = 1_000_000  # of the first episode


class ContrastiveLoss(nn.Module):
    """The loss of contrastive RL: symmetric InfoNCE for the encoders, and an actor with a learned entropy weight.

    The logit of a state-action pair and a goal is the negative distance of their representations. Each row of a batch
    is the positive example of its own goal, and a negative example of the others.

    Args:
        actor: the policy.
        encoder: writes the ``"representation"`` of state and action, ``[batch, features]``.
        goal_encoder: writes the ``"goal_representation"``, ``[batch, features]``.
        target_entropy: the entropy of the policy that the weight maintains.
        penalty: the weight of the squared log-sum-exp of logits, which keeps them bounded.
    """

    def __init__(
        self, actor: ProbabilisticActor, encoder: TensorDictModule, goal_encoder: TensorDictModule,
        *, target_entropy: float, penalty: float = 0.1,
    ):  # fmt: skip
        super().__init__()
        self.actor, self.encoders = actor, TensorDictSequential(encoder, goal_encoder)
        self.log_alpha = nn.Parameter(torch.zeros(()))
        self.target_entropy, self.penalty = target_entropy, penalty

    def forward(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        """Return the losses of transitions ``[batch]`` whose goals were reached later in their episodes."""
        encoded = self.encoders(tensordict.copy())
        pairs, goals = encoded["representation"], encoded["goal_representation"]  # [batch, features]
        logits = -torch.cdist(pairs, goals)  # [batch, goals]
        correct, over_goals, over_pairs = logits.diagonal(), logits.logsumexp(1), logits.logsumexp(0)
        # The cross-entropies of classifying the goal of each pair, and the pair of each goal
        critic = (over_goals + over_pairs - 2 * correct).mean() + self.penalty * over_goals.square().mean()

        policy = self.actor.get_dist(tensordict)
        action = policy.rsample()
        log_prob = policy.log_prob(action)
        alpha = self.log_alpha.exp().detach()
        with TensorDict.from_module(self.encoders).data.to_module(self.encoders):  # the actor does not change them
            encoded = self.encoders(tensordict.copy().set("action", action))
        distance = (encoded["representation"] - encoded["goal_representation"]).norm(dim=-1)
        return {
            "loss_actor": (alpha * log_prob + distance).mean(),
            "loss_critic": critic,
            "loss_alpha": -self.log_alpha * (log_prob.detach() + self.target_entropy).mean(),
            "accuracy": (logits.argmax(1) == torch.arange(len(logits))).float().mean(),
        }


def make_networks(env: GymEnv, inputs: NormalizedInputs, hidden: list[int], features: int = 64) -> list[Any]:
    """Return the actor and both encoders, which read the normalized observation and goal."""
    spec, goal = env.action_spec, env.observation_spec["desired_goal"].shape[-1]
    width, actions = len(inputs.mean), spec.shape[-1]
    layers: dict[str, Any] = {"num_cells": hidden, "activation_class": nn.SiLU}
    layers |= {"norm_class": nn.LayerNorm, "norm_kwargs": [{"normalized_shape": units} for units in hidden]}
    parameters = nn.Sequential(MLP(width, 2 * actions, **layers), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(parameters, ["inputs"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=spec,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": spec.space.low, "high": spec.space.high, "tanh_loc": False},
    )
    split = TensorDictModule(lambda inputs: inputs.split([width - goal, goal], -1), ["inputs"], ["state", "goal"])
    of_pair, of_goal = MLP(width - goal + actions, features, **layers), MLP(goal, features, **layers)
    encoder = TensorDictSequential(split, TensorDictModule(of_pair, ["state", "action"], ["representation"]))
    goal_encoder = TensorDictSequential(split, TensorDictModule(of_goal, ["goal"], ["goal_representation"]))
    return [actor, encoder, goal_encoder]


@torch.no_grad()
@set_exploration_type(ExplorationType.DETERMINISTIC)
def evaluate(policy: TensorDictSequential, name: str, episodes: int = 100) -> float:
    """Return the share of greedy episodes whose last step is at the goal."""
    envs = gymnasium.make_vec(name, episodes, "sync")
    observation, _ = envs.reset(seed=EVALUATION_SEED)
    ended = np.zeros(episodes, dtype=bool)
    while not ended.any():
        action = policy(TensorDict(observation, episodes).float())["action"]
        observation, _, terminated, truncated, info = envs.step(action.numpy())
        ended = terminated | truncated
    envs.close()
    if not ended.all() or "is_success" not in info:
        raise SystemExit(f"{name}: crl.py needs episodes of equal length, and info['is_success'].")
    return float(info["is_success"].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--env", default="torchrl_her/PointReach-v0", help="a Gymnasium id, or module:id")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--random-steps", type=int, default=500)
    parser.add_argument("--updates-per-step", type=float, default=1.0)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--gamma", type=float, default=0.99, help="discount of the future states")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 256])
    parser.add_argument("--evaluate-every", type=int, default=1_000, help="steps")
    parser.add_argument("--output", type=Path, help="a CSV file for steps, success and CPU seconds of training")
    config = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(config.seed)
    env = GymEnv(config.env)
    env.set_seed(config.seed)
    chunk = len(env.rollout(100_000))  # the length of every episode

    inputs = NormalizedInputs()
    inputs(env.fake_tensordict())
    actor, *encoders = make_networks(env, inputs, config.hidden)
    policy = TensorDictSequential(inputs, actor)
    loss = ContrastiveLoss(actor, *encoders, target_entropy=-0.5 * env.action_spec.shape[-1])
    optimizer = torch.optim.Adam(loss.parameters(), config.learning_rate, fused=True)
    strategy, storage = Geometric(config.gamma, truncated=True), LazyTensorStorage(config.steps)
    hindsight = HERTransform(None, strategy=strategy, her_ratio=1.0, capacity=config.steps)
    rb = TensorDictReplayBuffer(storage=storage, transform=Compose(hindsight, inputs), batch_size=config.batch_size)
    options = {"init_random_frames": config.random_steps, "auto_register_policy_transforms": False}
    collector = Collector(env, policy, frames_per_batch=chunk, total_frames=config.steps, **options)

    def update() -> float:
        batch = rb.sample()
        losses = loss(batch[batch["hindsight", "relabelled"].squeeze(-1)])  # the others may never reach their goal
        (losses["loss_actor"] + losses["loss_critic"] + losses["loss_alpha"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(losses["accuracy"])

    rows = ["steps,success,seconds", f"0,{evaluate(policy, config.env):.4f},0"]
    bar, due, accuracy = tqdm(total=config.steps, unit=" steps"), 0.0, float("nan")
    seconds, began = 0.0, time.process_time()
    for data in collector:
        rb.extend(data)
        bar.update(len(data))
        due += len(data) * config.updates_per_step if bar.n > config.random_steps else 0
        while due >= 1:
            accuracy, due = update(), due - 1
        if (bar.n % config.evaluate_every < chunk and bar.n > config.random_steps) or bar.n >= config.steps:
            seconds += time.process_time() - began
            success = evaluate(policy, config.env)
            bar.set_postfix(success=success, accuracy=f"{accuracy:.2f}")
            rows.append(f"{bar.n},{success:.4f},{seconds:.2f}")
            if config.output:
                config.output.parent.mkdir(parents=True, exist_ok=True)
                config.output.write_text("\n".join(rows) + "\n")
            began = time.process_time()
    bar.close()
    print(f"{bar.n:,} steps: success {success:.2f}")


if __name__ == "__main__":
    main()
