"""Read this to see how the networks' inputs, the replay buffer and the collector follow from the settings."""

import math
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import CudaGraphModule, TensorDictModuleBase, TensorDictSequential, WrapModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import PrioritizedSampler, TensorDictReplayBuffer, TensorSpec
from torchrl.envs import EnvBase
from torchrl.envs.transforms import Compose, MultiStepTransform, RewardScaling
from torchrl.modules import AdditiveGaussianModule, EGreedyModule

from torchrl_her import (
    GoalSelection,
    HERTransform,
    HindsightAugmentation,
    LowestDensity,
    Mixture,
    MovementPriority,
    NormalizedInputs,
    PackedStorage,
    Uniform,
)
from training.environments import load_function, make_env, make_envs, make_keys, make_reward
from training.record import Recorded
from training.settings import Priority, Selection, Settings, Speedup, When

Function = Callable[[TensorDictBase], TensorDictBase]

# Networks


def make_inputs(config: Settings, env: EnvBase) -> NormalizedInputs:
    """Make the first layer of the policy. If normalization is disabled, it only concatenates."""
    normalization, goal_fn = config.normalization, load_function(config.env.goal_fn)
    clip = normalization.clip if normalization.enabled else math.inf
    keys, normalize = make_keys(config.env), normalization.enabled
    inputs = NormalizedInputs(config.inputs, keys=keys, goal_fn=goal_fn, clip=clip, normalize=normalize)
    inputs(env.fake_tensordict())  # sets the number of features
    return inputs.to(config.device)


def hidden_layers(config: Settings) -> dict[str, Any]:
    """Return the arguments of an MLP for its hidden layers."""
    layers: dict[str, Any] = {"num_cells": config.hidden, "activation_class": nn.ReLU, "device": config.device}
    if config.layer_norm:
        norms = [{"normalized_shape": units} for units in config.hidden]
        layers |= {"norm_class": nn.LayerNorm, "norm_kwargs": norms}
    return layers


def speed_up(update: Function, speedup: Speedup) -> Function:
    """Return the update, sped up as `Settings.speedup` says. Only ``record`` has equal results, bit for bit."""
    if speedup == Speedup.cudagraph:
        return CudaGraphModule(update, in_keys=[], out_keys=[])
    if speedup == Speedup.compile:
        return torch.compile(update)
    return Recorded(update) if speedup == Speedup.record else update


def make_adam(config: Settings, parameters: Any) -> torch.optim.Adam:
    """Make an optimizer."""
    capturable = config.device.startswith("cuda")  # also without CUDA graphs: a resumed run can turn them on
    return torch.optim.Adam(parameters, lr=config.learning_rate, fused=True, capturable=capturable)


# Replay buffer


def make_hindsight(config: Settings) -> HERTransform | HindsightAugmentation:
    """Make the transform that relabels transitions. If hindsight is disabled, it relabels none."""
    hindsight, her_ratio = config.hindsight, config.hindsight.her_ratio if config.hindsight.enabled else 0.0
    names = hindsight.strategy.split("+")
    strategy = Mixture(dict.fromkeys(names, 1 / len(names)))
    goal_fn, keys = load_function(config.env.goal_fn), make_keys(config.env)
    options: dict[str, Any] = {"strategy": strategy, "goal_fn": goal_fn, "keys": keys}
    if not her_ratio or hindsight.when == When.sampling:
        return HERTransform(make_reward(config.env), her_ratio=her_ratio, capacity=config.buffer.size, **options)
    copies = round(her_ratio / (1 - her_ratio)) if her_ratio < 1 else 0
    if not copies or abs(copies / (copies + 1) - her_ratio) > 0.005:
        raise SystemExit("hindsight.when=writing stores k copies: hindsight.her_ratio must be k / (k + 1).")
    return HindsightAugmentation(make_reward(config.env), n_sampled_goal=copies, **options)


def make_selection(config: Settings, hindsight: Any) -> GoalSelection:
    """Make the transform of training environments that selects goals from those that hindsight has stored."""
    goals = config.goals
    selector = LowestDensity(fitted=goals.fitted) if goals.selection == Selection.lowest_density else Uniform()
    options: dict[str, Any] = {"share": goals.share, "start": goals.start, "candidates": goals.candidates}
    return GoalSelection(hindsight, selector, bounded=goals.bounded, **options)


def make_buffer(config: Settings, hindsight: Any, inputs: NormalizedInputs) -> TensorDictReplayBuffer:
    """Make a buffer whose samples are relabelled and contain the inputs of the networks."""
    buffer: Any = config.buffer  # `prepare` has set what was null
    env, priority = config.env, buffer.prioritized
    transforms = [MultiStepTransform(buffer.n_steps, config.gamma)] if buffer.n_steps > 1 else []
    if priority == Priority.movement:
        transforms.append(MovementPriority(buffer.far, goal_fn=load_function(buffer.moved or env.goal_fn)))
    scale = getattr(config, "reward_scale", None)
    scales = [RewardScaling(0.0, scale, [("next", "reward")]).to(config.device)] if scale else []
    return TensorDictReplayBuffer(
        storage=PackedStorage(buffer.size, device=config.device, ndim=2 if buffer.n_steps > 1 else 1),
        sampler=PrioritizedSampler(buffer.size, buffer.alpha, buffer.beta) if priority else None,
        priority_key="movement" if priority == Priority.movement else "td_error",
        transform=Compose(*transforms, hindsight, inputs, *scales),
    )


# Collection


def record_policy(policy: TensorDictModuleBase) -> TensorDictModuleBase:
    """Return a policy that replays the recorded operations of another policy, which must be operations on tensors."""
    keys, act = list(policy.in_keys), Recorded(lambda data: policy(data).select("action"))
    return WrapModule(lambda data: act(data.select(*keys)), inplace=True, in_keys=keys, out_keys=["action"])


class RepeatedActions(EGreedyModule):
    """Replaces a share ``eps`` of the components of actions with random ones, each for 1 to ``repeat`` steps.

    The method is temporally extended exploration (Dabney et al. 2021, arXiv:2006.01782), with uniform durations. Each
    component is repeated on its own: a gripper stays closed while the policy moves the arm.
    """

    def __init__(self, spec: TensorSpec, repeat: int, **options: Any):
        super().__init__(spec, **options)
        self.repeat = repeat
        self.stop()

    def stop(self) -> None:
        """End all repetitions."""
        self.random = self.spec["action"].zero()  # [*batch, components]; a resumed run must draw the same numbers
        self.steps_left = torch.zeros_like(self.random, dtype=torch.int64)

    def forward(self, data: TensorDictBase) -> TensorDictBase:  # noqa: D102
        mean = (self.repeat + 1) / 2  # steps
        begins = torch.rand_like(self.random) < self.eps / (mean - self.eps * (mean - 1))
        begins &= self.steps_left == 0
        steps = torch.randint_like(self.steps_left, 1, self.repeat + 1)
        self.steps_left = torch.where(begins, steps, self.steps_left)
        self.random = torch.where(begins, self.spec["action"].rand(), self.random)
        data.set("action", torch.where(self.steps_left > 0, self.random, data["action"]))
        self.steps_left = (self.steps_left - 1).clamp_min(0)
        return data


def anneal(policy: TensorDictSequential, chunks: int = 1) -> None:
    """Reduce the exploration of a collector's policy by a number of chunks of steps (see `Exploration.final`)."""
    for explorer in policy:
        if isinstance(explorer, AdditiveGaussianModule | EGreedyModule):
            explorer.step(chunks)
        if isinstance(explorer, RepeatedActions):
            explorer.stop()  # a resumed run knows of no repetitions


def explore_at_goals(spec: Any, share: float) -> TensorDictModuleBase:
    """Return a module that replaces an action with a random one, more often the longer its goal has been reached."""
    key = ("goal_selection", "steps_at_goal")

    def explore(data: TensorDictBase) -> TensorDictBase:
        random = torch.rand(data[key].shape, device=data[key].device) < share * data[key]  # [*batch, 1]
        random = random if data["action"].ndim == random.ndim else random.squeeze(-1)  # discrete actions: [*batch]
        return data.set("action", torch.where(random, spec.rand(), data["action"]))

    return WrapModule(explore, inplace=True, in_keys=[key, "action"], out_keys=["action"])


def make_collector(config: Settings, policy: TensorDictModuleBase, hindsight: Any, gaussian: bool = False) -> Collector:
    """Make a collector that explores with uniformly random actions and, if ``gaussian``, with Gaussian noise.

    With ``goals.selection``, its environments pursue achieved goals in some episodes. It yields transitions as they are
    written: ``[environments, time]`` for n-step windows, else ``[n]``.
    """
    env, device = config.env, config.device
    exploration: Any = config.exploration  # `prepare` has set what was null
    noise, share = exploration.noise, exploration.random_actions
    chunks = -(-exploration.anneal_steps // config.collector.steps_per_chunk)
    anneals: dict[str, Any] = {"annealing_num_steps": chunks, "device": device}
    envs = make_envs(env, env.num_envs, env.parallel) if env.num_envs > 1 else make_env(env)
    envs.set_seed(config.seed)
    selects = config.goals.selection and config.hindsight.enabled
    if selects:
        envs = envs.append_transform(make_selection(config, hindsight))
    spec, explorers = envs.action_spec.to(device), []
    if gaussian:
        explorers.append(AdditiveGaussianModule(spec, sigma_init=noise, sigma_end=noise * exploration.final, **anneals))
    anneals |= {"eps_init": share, "eps_end": share * exploration.final}
    repeat = exploration.repeat
    explorers.append(RepeatedActions(spec, repeat, **anneals) if repeat > 1 else EGreedyModule(spec, **anneals))
    if selects and exploration.at_goal:
        explorers.append(explore_at_goals(spec, exploration.at_goal))
    acts = record_policy(policy) if config.speedup == Speedup.record else policy
    # On a CPU, leave the devices out: nothing is moved then, which is faster.
    devices = {} if device == "cpu" else {"policy_device": device, "storing_device": "cpu"}
    rows = (env.num_envs, -1) if config.buffer.n_steps > 1 else (-1,)

    def after_chunk(_: Any) -> None:
        torch.set_num_threads(config.threads)  # TorchRL changes it when it closes environments, before the last chunk
        anneal(collector.policy)

    collector = Collector(
        envs, TensorDictSequential(acts, *explorers, selected_out_keys=["action"]), total_frames=config.total_steps,
        frames_per_batch=config.collector.steps_per_chunk, init_random_frames=config.collector.random_steps,
        auto_register_policy_transforms=False, postproc=lambda data: data.reshape(rows),
        post_collect_hook=after_chunk, **devices,
    )  # fmt: skip
    return collector
