"""Goal-conditioned learning from data alone: behavioural cloning, GCIQL, HIQL and CRL, as in OGBench.

The algorithms, goals and hyperparameters are those of OGBench (Park et al. 2024, arXiv:2410.20092). GCBC clones the
actions that led to a goal. GCIQL learns values with implicit Q-learning (Kostrikov et al. 2021, arXiv:2110.06169). HIQL
(Park et al. 2023, arXiv:2307.11949) also learns a policy that selects subgoals. CRL (Eysenbach et al. 2022,
arXiv:2206.07568) learns which goals are reached later, without rewards. Each sampled transition has a goal for the
values and others for the policies, all from one ``HERTransform``. Only evaluations use the simulator. What differs from
OGBench is listed in ``docs/reference/results/offline.md``::

    python examples/pointmaze_data.py
    python examples/offline.py algorithm=hiql
    python examples/offline.py --multirun algorithm=gcbc,gciql,hiql,crl seed=1,2,3 hydra.sweep.dir=outputs/offline/seeds
    python examples/compare.py outputs/offline/seeds
"""

from __future__ import annotations

from training.command import run_command
from training.offline_settings import Algorithm, Config

if __name__ == "__main__":  # before the imports that take seconds
    run_command("offline")

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import ogbench  # noqa: F401  # registers the environments
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict, TensorDictBase, TensorDictParams
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn
from torchrl.data import TensorDictReplayBuffer, TensorStorage
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.modules import MLP, IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import BCLoss, IQLLoss, LossModule, SoftUpdate
from torchrl.record import CSVLogger
from tqdm import tqdm
from training.record import Recorded

from torchrl_her import (
    Current,
    Future,
    Geometric,
    HERKeys,
    HERTransform,
    Mixture,
    Random,
    ReachedReward,
    Subgoal,
    load_ogbench,
)

EVALUATION_SEED = 1_000_000  # of NumPy's global generator, from which OGBench draws starts and goals
AT_ONCE = 16  # batches sampled in one call, which is faster

# Data


class Normalize(nn.Module):
    """Maps states ``[*batch, n]`` to features with mean 0 and standard deviation 1 in the data, ``[N, n]``."""

    def __init__(self, data: Tensor):
        super().__init__()
        self.mean, self.std = nn.Buffer(data.mean(0)), nn.Buffer(data.std(0).clamp(min=0.01))

    def forward(self, states: Tensor) -> Tensor:  # noqa: D102
        return (states - self.mean) / self.std


def load_data(config: Config) -> tuple[TensorDict, Normalize]:
    """Return transitions with normalized states (OGBench does not normalize), and the module that normalizes."""
    data = load_ogbench(config.data)
    normalize = Normalize(data["observation"])
    for key in ("observation", ("next", "observation")):
        data[key] = normalize(data[key])
    return data, normalize


def make_replay_buffer(config: Config, data: TensorDict) -> TensorDictReplayBuffer:
    """Make a buffer whose samples have a goal for the values, ``desired_goal``, and goals for the policies."""
    later, values = Future(own=False), Mixture({Current(): 0.2, Geometric(config.gamma): 0.5, Random(): 0.3})
    steps = config.hiql.subgoal_steps
    strategies: dict[Algorithm, dict[Any, Any]] = {
        Algorithm.gcbc: {"desired_goal": later},
        Algorithm.gciql: {"desired_goal": values, "actor_goal": later},
        Algorithm.hiql: {
            "desired_goal": values,
            "high_goal": later,  # of the policy that selects subgoals
            "subgoal": Subgoal(steps, limit="high_goal"),  # which it learns to select
            "low_goal": Subgoal(steps, limit=None),  # of the policy that selects actions
        },
        Algorithm.crl: {"desired_goal": Geometric(config.gamma), "actor_goal": later},
    }
    strategy, keys = strategies[config.algorithm], HERKeys(achieved_goal="observation")
    reward = None if config.algorithm == Algorithm.crl else ReachedReward()
    her = HERTransform(reward, strategy=strategy, her_ratio=1.0, capacity=len(data), keys=keys)
    storage = TensorStorage(her.adopt(data))  # the data itself, not a copy
    return TensorDictReplayBuffer(storage=storage, transform=her, batch_size=AT_ONCE * config.batch_size)


# Networks


def make_layers(config: Config, inputs: int, outputs: int, *, norm: bool) -> MLP:
    """Make an MLP, with layer normalization for values."""
    options: dict[str, Any] = {"num_cells": config.hidden, "activation_class": nn.GELU}
    if norm:
        options["norm_class"] = nn.LayerNorm
        options["norm_kwargs"] = [{"normalized_shape": units} for units in config.hidden]
    return MLP(inputs, outputs, **options)


def make_actor(config: Config, sizes: dict[str, int], output: str, size: int) -> ProbabilisticActor:
    """Make a normal policy with standard deviation 1, which reads the entries in ``sizes`` and writes ``output``."""
    means = make_layers(config, sum(sizes.values()), size, norm=False)
    return ProbabilisticActor(
        TensorDictModule(means, [*sizes], ["loc"]),
        in_keys=["loc"],
        out_keys=[output],
        distribution_class=IndependentNormal,
        distribution_kwargs={"scale": 1.0, "validate_args": False},
    )


def scale(features: Tensor) -> Tensor:
    """Return features ``[*batch, n]`` of length √n in the same direction."""
    return nn.functional.normalize(features, dim=-1) * math.sqrt(features.shape[-1])


class TwoValues(nn.Module):
    """Two independent values ``[*batch, 2]`` of concatenated inputs."""

    def __init__(self, config: Config, width: int):
        super().__init__()
        self.first, self.second = (make_layers(config, width, 1, norm=True) for _ in range(2))

    def forward(self, *inputs: Tensor) -> Tensor:  # noqa: D102
        return torch.cat([self.first(*inputs), self.second(*inputs)], -1)


class TwoRepresentations(nn.Module):
    """Two independent representations, ``[*batch, 2, n]``, of a state and an action, and of a goal."""

    def __init__(self, config: Config, pair: int, goal: int):
        super().__init__()
        networks = [make_layers(config, width, config.hidden[-1], norm=True) for width in (pair, pair, goal, goal)]
        self.pairs, self.goals = nn.ModuleList(networks[:2]), nn.ModuleList(networks[2:])

    def forward(self, observation: Tensor, action: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        pairs = torch.stack([network(observation, action) for network in self.pairs], -2)
        return pairs, torch.stack([network(goal) for network in self.goals], -2)


# Losses


def maximize_and_clone(policy: Any, action: Tensor, value: Tensor, alpha: float) -> Tensor:
    """Return the loss DDPG+BC: maximize the values of a policy's mean actions, and clone the actions of the data."""
    return -alpha * policy.log_prob(action).mean() - value.mean() / value.abs().mean().detach()


class GCIQLLoss(IQLLoss):
    """The losses of IQL, with DDPG+BC as that of the actor.

    The goals of the values are ``"desired_goal"``, those of the actor ``"actor_goal"``. The actor maximizes the value
    of its mean action and, with the weight ``alpha``, the likelihood of the action in the data.
    """

    def __init__(self, *args: Any, alpha: float, **kwargs: Any):
        super().__init__(*args, loss_function="l2", deactivate_vmap=True, **kwargs)
        self.alpha = alpha

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return the losses of transitions ``[batch]``, without the entropy that IQLLoss adds."""
        functions = {"loss_actor": self.actor_loss, "loss_qvalue": self.qvalue_loss, "loss_value": self.value_loss}
        return TensorDict({name: function(tensordict)[0] for name, function in functions.items()})

    def actor_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict]:
        """Return the loss of the actor, and no metadata."""
        batch = tensordict.select("observation", "action").set("desired_goal", tensordict["actor_goal"])
        with self.actor_network_params.to_module(self.actor_network):
            policy = self.actor_network.get_dist(batch)
        acting, values = batch.copy().set("action", policy.mean.clamp(-1, 1)), []
        for params in self.qvalue_network_params.data.unbind(0):  # the actor does not change the critics
            with params.to_module(self.qvalue_network):
                values.append(self.qvalue_network(acting.copy())["state_action_value"])
        return maximize_and_clone(policy, batch["action"], torch.minimum(*values), self.alpha), {}


class HIQLLoss(LossModule):
    """The losses of HIQL: two values V(s, φ(s, g)), a policy that selects φ of a subgoal, and one of actions.

    Reads ``"observation"``, ``"action"``, ``("next", "observation")``, ``("next", "reward")``, ``("next",
    "terminated")`` and the goals ``"desired_goal"`` (of the values), ``"high_goal"``, ``"subgoal"`` and ``"low_goal"``.

    Args:
        high_actor (ProbabilisticActor): reads ``"observation"`` and ``"desired_goal"``, selects a representation φ.
        low_actor (ProbabilisticActor): reads ``"observation"`` and ``"representation"``, selects an action.
        value_network (TensorDictSequential): its first module writes ``"representation"``, its second one
            ``"state_value"``, ``[*batch, 2]``.

    Keyword Args:
        gamma (float): the discount.
        expectile (float): the expectile of the values, more than 0.5 for optimistic ones.
        alpha (float): the inverse temperature of the advantages that weight the actions.
    """

    high_actor: ProbabilisticActor
    low_actor: ProbabilisticActor
    value_network: TensorDictSequential
    high_actor_params: TensorDictParams
    low_actor_params: TensorDictParams
    value_network_params: TensorDictParams
    target_high_actor_params: TensorDictParams  # unused, but every LossModule has them
    target_low_actor_params: TensorDictParams
    target_value_network_params: TensorDictParams

    def __init__(
        self, high_actor: Any, low_actor: Any, value_network: Any, *, gamma: float, expectile: float, alpha: float
    ):
        super().__init__()
        self.convert_to_functional(high_actor, "high_actor")
        self.convert_to_functional(low_actor, "low_actor")
        self.convert_to_functional(value_network, "value_network", create_target_params=True)
        self.gamma, self.expectile, self.alpha = gamma, expectile, alpha
        self.in_keys = ["observation", "action", "desired_goal", "high_goal", "subgoal", "low_goal", "next"]

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return the losses of transitions ``[batch]``."""
        actors = {
            "loss_high_actor": self.high_actor_loss(tensordict),
            "loss_low_actor": self.low_actor_loss(tensordict),
        }
        return TensorDict({"loss_value": self.value_loss(tensordict)} | actors)

    def value_loss(self, batch: TensorDictBase) -> Tensor:
        """Return the expectile loss, whose backups and weights come from the target network."""
        goal, target = batch["desired_goal"], self.target_value_network_params
        continues = ~batch["next", "terminated"]
        future = self._evaluate(batch["next", "observation"], goal, target)["state_value"]
        targets = batch["next", "reward"] + self.gamma * continues * future  # [batch, 2]
        present = self._evaluate(batch["observation"], goal, target)["state_value"].mean(-1, keepdim=True)
        is_above = targets.min(-1, keepdim=True).values >= present
        weight = torch.where(is_above, self.expectile, 1 - self.expectile)
        values = self._evaluate(batch["observation"], goal, self.value_network_params)["state_value"]
        return (weight * (targets - values).square()).sum(-1).mean()

    def high_actor_loss(self, batch: TensorDictBase) -> Tensor:
        """Return the loss of the policy that selects the representation of a subgoal on the way to a goal."""
        state, goal, subgoal = map(batch.get, ("observation", "high_goal", "subgoal"))
        fixed = self._fixed
        before, after = self._evaluate(state, goal, fixed), self._evaluate(subgoal, goal, fixed)
        with fixed.to_module(self.value_network):
            target = self.value_network[0](TensorDict({"observation": state, "desired_goal": subgoal}, len(state)))
        with self.high_actor_params.to_module(self.high_actor):
            policy = self.high_actor.get_dist(TensorDict({"observation": state, "desired_goal": goal}, len(state)))
        return self._weighted_cloning(policy.log_prob(target["representation"]), before, after)

    def low_actor_loss(self, batch: TensorDictBase) -> Tensor:
        """Return the loss of the policy that selects an action on the way to a subgoal."""
        state, goal, fixed = batch["observation"], batch["low_goal"], self._fixed
        before, after = self._evaluate(state, goal, fixed), self._evaluate(batch["next", "observation"], goal, fixed)
        with self.low_actor_params.to_module(self.low_actor):
            policy = self.low_actor.get_dist(before.select("observation", "representation"))
        return self._weighted_cloning(policy.log_prob(batch["action"]), before, after)

    @property
    def _fixed(self) -> Any:
        """The parameters of the values, without gradients: the policies do not change them."""
        return self.value_network_params.data

    def _evaluate(self, observation: Tensor, goal: Tensor, params: Any) -> TensorDict:
        """Return the representation of goals and both values, of states ``[batch, n]``."""
        with params.to_module(self.value_network):
            return self.value_network(TensorDict({"observation": observation, "desired_goal": goal}, len(goal)))

    def _weighted_cloning(self, log_prob: Tensor, before: TensorDict, after: TensorDict) -> Tensor:
        """Return the loss of advantage-weighted regression."""
        advantage = (after["state_value"] - before["state_value"]).mean(-1)
        return -((self.alpha * advantage).exp().clamp(max=100.0) * log_prob).mean()


class CRLLoss(LossModule):
    """The losses of contrastive RL on data: binary NCE for the critics, and DDPG+BC for the actor.

    The logit of a state, an action and a goal is φ(s, a)·ψ(g)/√n. The ``"desired_goal"`` of each transition is the
    positive example, those of the others in the batch are the negative ones. The actor's goals are ``"actor_goal"``.

    Args:
        actor_network (ProbabilisticActor): the policy.
        critic_network (TensorDictModule): writes ``"pairs"`` and ``"goals"``, two representations each.

    Keyword Args:
        alpha (float): the weight of behavioural cloning.
    """

    actor_network: ProbabilisticActor
    critic_network: TensorDictModule
    actor_network_params: TensorDictParams
    critic_network_params: TensorDictParams
    target_actor_network_params: TensorDictParams  # unused, but every LossModule has them
    target_critic_network_params: TensorDictParams

    def __init__(self, actor_network: Any, critic_network: Any, *, alpha: float):
        super().__init__()
        self.convert_to_functional(actor_network, "actor_network")
        self.convert_to_functional(critic_network, "critic_network")
        self.alpha = alpha
        self.in_keys = ["observation", "action", "desired_goal", "actor_goal"]

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Return the losses of transitions ``[batch]``."""
        return TensorDict({"loss_actor": self.actor_loss(tensordict), "loss_critic": self.critic_loss(tensordict)})

    def critic_loss(self, batch: TensorDictBase) -> Tensor:
        """Return the cross-entropy of classifying each goal of the batch as a transition's own or another's."""
        pairs, goals = self._represent(batch, self.critic_network_params)
        logits = pairs.transpose(0, 1) @ goals.permute(1, 2, 0) / math.sqrt(pairs.shape[-1])  # [2, batch, batch]
        labels = torch.eye(len(pairs), device=pairs.device).repeat(2, 1, 1)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)

    def actor_loss(self, batch: TensorDictBase) -> Tensor:
        """Return the loss of the actor, which does not change the critics."""
        acting = batch.select("observation").set("desired_goal", batch["actor_goal"])
        with self.actor_network_params.to_module(self.actor_network):
            policy = self.actor_network.get_dist(acting)
        acting.set("action", policy.mean.clamp(-1, 1))
        pairs, goals = self._represent(acting, self.critic_network_params.data)
        value = (pairs * goals).sum(-1).min(-1).values / math.sqrt(pairs.shape[-1])
        return maximize_and_clone(policy, batch["action"], value, self.alpha)

    def _represent(self, batch: TensorDictBase, params: Any) -> tuple[Tensor, Tensor]:
        """Return the representations of states and actions, and of goals, ``[batch, 2, n]`` each."""
        with params.to_module(self.critic_network):
            represented = self.critic_network(batch.copy())
        return represented["pairs"], represented["goals"]


def make_loss(config: Config, batch: TensorDictBase) -> tuple[LossModule, TensorDictModuleBase]:
    """Make the loss, and the policy that selects actions by its networks, for samples like ``batch``."""
    sizes = {key: batch[key].shape[-1] for key in ("observation", "desired_goal")}
    width, actions = sum(sizes.values()), batch["action"].shape[-1]
    if config.algorithm == Algorithm.hiql:
        features = config.hiql.representation
        encoder = TensorDictModule(make_layers(config, width, features, norm=True), [*sizes], ["representation"])
        scaled = TensorDictModule(scale, ["representation"], ["representation"])
        high_actor = make_actor(config, sizes, "representation", features)
        inputs = {"observation": sizes["observation"], "representation": features}
        low_actor = make_actor(config, inputs, "action", actions)
        values = TensorDictModule(TwoValues(config, sum(inputs.values())), [*inputs], ["state_value"])
        networks = high_actor, low_actor, TensorDictSequential(TensorDictSequential(encoder, scaled), values)
        options = {"gamma": config.gamma, "expectile": config.hiql.expectile, "alpha": config.hiql.alpha}
        loss: LossModule = HIQLLoss(*networks, **options)
        return loss, TensorDictSequential(high_actor, scaled, low_actor)
    actor = make_actor(config, sizes, "action", actions)
    if config.algorithm == Algorithm.gcbc:
        return BCLoss(actor), actor
    if config.algorithm == Algorithm.crl:
        representations = TwoRepresentations(config, sizes["observation"] + actions, sizes["desired_goal"])
        critic = TensorDictModule(representations, ["observation", "action", "desired_goal"], ["pairs", "goals"])
        return CRLLoss(actor, critic, alpha=config.crl.alpha), actor
    critic = ValueOperator(make_layers(config, width + actions, 1, norm=True), in_keys=[*sizes, "action"])
    value = ValueOperator(make_layers(config, width, 1, norm=True), in_keys=[*sizes])
    loss = GCIQLLoss(actor, critic, value, expectile=config.gciql.expectile, alpha=config.gciql.alpha)
    loss.make_value_estimator(gamma=config.gamma)
    return loss, actor


# Evaluation


class Evaluation:
    """Greedy episodes of each task of an environment of OGBench. All evaluations have the same starts and goals."""

    def __init__(self, config: Config):
        env: Any = gymnasium.make(config.env).unwrapped
        self.tasks = torch.arange(1, env.num_tasks + 1).repeat(config.evaluation.episodes)
        self.envs = [gymnasium.make(config.env, disable_env_checker=True) for _ in self.tasks]

    @torch.no_grad()
    @set_exploration_type(ExplorationType.DETERMINISTIC)
    def run(self, policy: TensorDictModuleBase) -> dict[str, float]:
        """Return the success rate of all episodes, which is the mean over tasks, and of each task."""
        np.random.seed(EVALUATION_SEED)  # noqa: NPY002
        pairs = zip(self.envs, self.tasks.tolist(), strict=True)
        states, infos = zip(*(env.reset(seed=task, options={"task_id": task}) for env, task in pairs), strict=True)
        observation = torch.tensor(np.array(states), dtype=torch.float32)
        goal = torch.tensor(np.array([info["goal"] for info in infos]), dtype=torch.float32)
        success, running = torch.zeros(len(goal)), list(range(len(goal)))
        while running:
            batch = TensorDict({"observation": observation[running], "desired_goal": goal[running]}, len(running))
            actions, still = policy(batch)["action"].clamp(-1, 1).numpy(), []
            for i, action in zip(running, actions, strict=True):
                state, _, terminated, truncated, info = self.envs[i].step(action)
                observation[i], success[i] = torch.from_numpy(state), info["success"]
                if not (terminated or truncated):
                    still.append(i)
            running = still
        of_tasks = {f"task{task}": float(success[self.tasks == task].mean()) for task in self.tasks.unique().tolist()}
        return {"success": float(success.mean())} | of_tasks


# Update and loop


def train(config: Config, folder: Path) -> None:
    """Train an agent, and write logs and the policy into a folder."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(config.matmul_precision.name)
    torch.manual_seed(config.seed)
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.structured(replace(config, hydra=None)), folder / "config.yaml")
    data, normalize = load_data(config)
    replay_buffer = make_replay_buffer(config, data)
    replay_buffer.set_rng(torch.Generator().manual_seed(config.seed))
    loss, normalized_policy = make_loss(config, replay_buffer.sample())
    inputs = [TensorDictModule(normalize, [key], [key]) for key in ("observation", "desired_goal")]
    policy = TensorDictSequential(*inputs, normalized_policy)
    target_updater = None if config.algorithm in (Algorithm.gcbc, Algorithm.crl) else SoftUpdate(loss, tau=config.tau)
    # Each loss has gradients only for its own networks, so one optimizer suffices.
    parameters = [each for each in loss.parameters() if each.requires_grad]
    optimizer = torch.optim.Adam(parameters, config.learning_rate, fused=True)

    def update(batch: TensorDictBase) -> TensorDict:
        losses = loss(batch)
        sum(losses.values()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if target_updater is not None:
            target_updater.step()
        return losses.detach()

    run_update = Recorded(update) if config.record else update
    evaluation, logger = Evaluation(config), CSVLogger("csv", log_dir=str(folder / "logs"))
    bar = tqdm(range(1, config.updates + 1), f"{config.algorithm.name} {config.env}", unit=" updates")
    batches, seconds = list[TensorDictBase](), 0.0
    for step in bar:
        began = time.process_time()
        if not batches:
            batches = list(replay_buffer.sample().split(config.batch_size))
        losses = run_update(batches.pop())
        seconds += time.process_time() - began
        if step % config.evaluation.interval == 0 or step == config.updates:
            outcome = evaluation.run(policy)
            metrics = {f"evaluation/{name}": value for name, value in outcome.items()} | {"train/seconds": seconds}
            for name, value in (metrics | {f"train/{name}": float(value) for name, value in losses.items()}).items():
                logger.log_scalar(name, value, step)
            bar.set_postfix(success=f"{outcome['success']:.2f}")
            torch.save(policy.state_dict(), folder / "policy.pt")
    print(f"{config.updates:,} updates: success {outcome['success']:.2f}. See {folder}/")
