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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictParams, TensorDictSequential, dispatch
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import Compose, ExplorationType, GymEnv, set_exploration_type
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal
from torchrl.objectives import LossModule
from tqdm import tqdm

import torchrl_her.envs  # noqa: F401  # registers PointReach
from torchrl_her import Geometric, HERTransform, NormalizedInputs

EVALUATION_SEED = 1_000_000  # of the first episode


class ContrastiveLoss(LossModule):
    """The loss of contrastive RL: symmetric InfoNCE for the encoders, and an actor with a learned entropy weight.

    The logit of a state-action pair and a goal is the negative distance of their representations. Each row of a batch
    is the positive example of its own goal, and a negative example of the others.

    Args:
        actor_network (ProbabilisticActor): the policy.
        encoder (TensorDictModule): writes the representation of state and action, ``[batch, features]``.
        goal_encoder (TensorDictModule): writes the representation of the goal, ``[batch, features]``.

    Keyword Args:
        target_entropy (float): the entropy of the policy that the weight maintains.
        penalty (float): the weight of the squared log-sum-exp of logits, which keeps them bounded. Default: 0.1.
    """

    @dataclass
    class _AcceptedKeys:
        action: NestedKey = "action"
        representation: NestedKey = "representation"
        goal_representation: NestedKey = "goal_representation"

    default_keys = _AcceptedKeys
    actor_network: ProbabilisticActor
    encoder: TensorDictModule
    goal_encoder: TensorDictModule
    actor_network_params: TensorDictParams
    encoder_params: TensorDictParams
    goal_encoder_params: TensorDictParams
    target_actor_network_params: TensorDictParams  # unused, but every LossModule has them
    target_encoder_params: TensorDictParams
    target_goal_encoder_params: TensorDictParams
    out_keys = ["loss_actor", "loss_critic", "loss_alpha", "alpha", "accuracy"]  # noqa: RUF012

    def __init__(
        self,
        actor_network: ProbabilisticActor,
        encoder: TensorDictModule,
        goal_encoder: TensorDictModule,
        *,
        target_entropy: float,
        penalty: float = 0.1,
    ):
        super().__init__()
        self.convert_to_functional(actor_network, "actor_network")
        self.convert_to_functional(encoder, "encoder")
        self.convert_to_functional(goal_encoder, "goal_encoder")
        self.log_alpha = nn.Parameter(torch.zeros(()))
        self.target_entropy, self.penalty = target_entropy, penalty
        self.in_keys = [*actor_network.in_keys, self.tensor_keys.action]

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return the losses of transitions ``[batch]`` whose goals were reached later in their episodes."""
        pairs, goals = self._encode(tensordict, self.encoder_params, self.goal_encoder_params)  # [batch, features]
        logits = -torch.cdist(pairs, goals)  # [batch, goals]
        correct, over_goals, over_pairs = logits.diagonal(), logits.logsumexp(1), logits.logsumexp(0)
        # The cross-entropies of classifying the goal of each pair, and the pair of each goal
        critic = (over_goals + over_pairs - 2 * correct).mean() + self.penalty * over_goals.square().mean()

        with self.actor_network_params.to_module(self.actor_network):
            policy = self.actor_network.get_dist(tensordict)
        action = policy.rsample()
        log_prob = policy.log_prob(action)
        acting = tensordict.copy().set(self.tensor_keys.action, action)
        alpha = self.log_alpha.exp().detach()
        fixed = self.encoder_params.data, self.goal_encoder_params.data  # the actor does not change the encoders
        pairs, goals = self._encode(acting, *fixed)
        actor = (alpha * log_prob + (pairs - goals).norm(dim=-1)).mean()
        entropy_weight = -self.log_alpha * (log_prob.detach() + self.target_entropy).mean()
        accuracy = (logits.argmax(1) == torch.arange(len(logits), device=logits.device)).float().mean()
        return TensorDict(dict(zip(self.out_keys, (actor, critic, entropy_weight, alpha, accuracy), strict=True)))

    def _encode(self, tensordict: TensorDictBase, encoder: Any, goal_encoder: Any) -> tuple[Tensor, Tensor]:
        """Return the representations of states with their actions, and of goals, ``[batch, features]`` each."""
        with encoder.to_module(self.encoder), goal_encoder.to_module(self.goal_encoder):
            encoded = self.goal_encoder(self.encoder(tensordict.copy()))
        return encoded.get(self.tensor_keys.representation), encoded.get(self.tensor_keys.goal_representation)


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

    def update() -> TensorDict:
        batch = rb.sample()
        losses = loss(batch[batch["hindsight", "relabelled"].squeeze(-1)])  # the others may never reach their goal
        (losses["loss_actor"] + losses["loss_critic"] + losses["loss_alpha"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        return losses.detach()

    rows = ["steps,success,seconds", f"0,{evaluate(policy, config.env):.4f},0"]
    bar, due, losses = tqdm(total=config.steps, unit=" steps"), 0.0, TensorDict(accuracy=float("nan"))
    seconds, began = 0.0, time.process_time()
    for data in collector:
        rb.extend(data)
        bar.update(len(data))
        due += len(data) * config.updates_per_step if bar.n > config.random_steps else 0
        while due >= 1:
            losses, due = update(), due - 1
        if (bar.n % config.evaluate_every < chunk and bar.n > config.random_steps) or bar.n >= config.steps:
            seconds += time.process_time() - began
            success = evaluate(policy, config.env)
            bar.set_postfix(success=success, accuracy=f"{float(losses['accuracy']):.2f}")
            rows.append(f"{bar.n},{success:.4f},{seconds:.2f}")
            if config.output:
                config.output.parent.mkdir(parents=True, exist_ok=True)
                config.output.write_text("\n".join(rows) + "\n")
            began = time.process_time()
    bar.close()
    print(f"{bar.n:,} steps: success {success:.2f}")


if __name__ == "__main__":
    main()
