"""Shared parts of the training scripts: environments, network inputs, replay buffer, collector and evaluation."""

import contextlib
import io
import math
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from record import Recorded
from settings import Env, Priority, Settings, Speedup, When
from tensordict import TensorDictBase
from tensordict.nn import CudaGraphModule, TensorDictModuleBase, TensorDictSequential, WrapModule
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.data import PrioritizedSampler, TensorDictReplayBuffer
from torchrl.envs import EnvBase, GymEnv, ParallelEnv, SerialEnv, default_info_dict_reader, set_exploration_type
from torchrl.envs.transforms import ClipTransform, Compose, DoubleToFloat, MultiStepTransform
from torchrl.modules import AdditiveGaussianModule, EGreedyModule

import torchrl_her.envs  # noqa: F401 (registers BitFlipping and PointReach)
from torchrl_her import (
    EnvReward,
    HERKeys,
    HERTransform,
    HindsightAugmentation,
    MovementPriority,
    NormalizedInputs,
    PackedStorage,
)

with contextlib.suppress(ImportError), contextlib.redirect_stderr(io.StringIO()):  # hides a notice about Adroit
    import gymnasium_robotics  # noqa: F401 (registers Fetch, PointMaze and other robots)

EVALUATION_SEED = 1_000_000  # of the first episode
LONGEST_EPISODE = 100_000  # steps after which an evaluation fails
PACKAGES = (
    "For an environment of another package, set env.name=module:Name-v0, and put its module on PYTHONPATH. Fetch, "
    "PointMaze and other robots need: pip install -c constraints.txt gymnasium-robotics mujoco"
)
Function = Callable[[TensorDictBase], TensorDictBase]

# Environments


class InfoReader(default_info_dict_reader):
    """Reads entries of info as ``float32``. Some are plain bools, and some are missing after a reset."""

    def __call__(self, info: dict[str, Any], tensordict: TensorDictBase) -> TensorDictBase:  # noqa: D102
        return super().__call__({key: np.float32(info[key]) for key in self.keys if key in info}, tensordict)


def make_env(config: Env, **kwargs: Any) -> EnvBase:
    """Make an environment in single precision that returns the required entries of info."""
    try:
        env = GymEnv(config.name, categorical_action_encoding=True, **config.kwargs, **kwargs)
    except (gymnasium.error.Error, ImportError) as error:
        message = f"The environment {config.name!r} cannot be made: {str(error).rstrip('.?')}. {PACKAGES}"
        raise SystemExit(message) from None
    env.set_info_dict_reader(InfoReader([key for key in (config.success, *config.info_keys) if key != "terminated"]))
    if any(spec.dtype == torch.float64 for spec in env.observation_spec.values(True, True)):
        env = env.append_transform(DoubleToFloat())  # only if needed: transforms take time at every step
    if (limit := config.clip_observation) is not None:
        env = env.append_transform(ClipTransform(["observation"], low=-limit, high=limit))
    return env


def make_envs(config: Env, num_envs: int, parallel: bool) -> EnvBase:
    """Make a batch of environments, ``[num_envs]``."""
    kind = ParallelEnv if parallel else SerialEnv
    return kind(num_envs, partial(make_env, config), num_threads=torch.get_num_threads())


def load_function(name: str | None) -> Callable | None:
    """Return the function with the name ``module:function``, or None if there is no name."""
    return pkgutil.resolve_name(name) if name else None


def make_reward(config: Env) -> EnvReward:
    """Make the reward of relabelled transitions."""
    info_keys = [("next", key) for key in config.info_keys]
    return EnvReward(partial(make_env, config), info_keys=info_keys, terminated_fn=load_function(config.terminated_fn))


# Networks


def make_keys(config: Env) -> HERKeys:
    """Make the keys of the goals."""
    return HERKeys(achieved_goal=config.achieved_goal, desired_goal=config.desired_goal)


def make_inputs(config: Settings, env: EnvBase) -> NormalizedInputs:
    """Make the first layer of the policy. If normalization is disabled, never update it: it then only concatenates."""
    normalization, goal_fn = config.normalization, load_function(config.env.goal_fn)
    clip = normalization.clip if normalization.enabled else math.inf
    inputs = NormalizedInputs(config.inputs, keys=make_keys(config.env), goal_fn=goal_fn, clip=clip)
    inputs(env.fake_tensordict())  # sets the number of features
    return inputs.to(config.device)


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
    hindsight, reward = config.hindsight, make_reward(config.env)
    arguments: dict[str, Any] = {
        "strategy": hindsight.strategy.name, "goal_fn": load_function(config.env.goal_fn),
        "keys": make_keys(config.env),
    }  # fmt: skip
    if hindsight.enabled and hindsight.when == When.writing:
        return HindsightAugmentation(reward, n_sampled_goal=hindsight.copies, **arguments)
    her_ratio = hindsight.her_ratio if hindsight.enabled else 0.0
    return HERTransform(reward, her_ratio=her_ratio, capacity=config.buffer.size, **arguments)


def make_replay_buffer(config: Settings, hindsight: Any, inputs: NormalizedInputs) -> TensorDictReplayBuffer:
    """Make a buffer whose samples are relabelled and contain the inputs of the networks."""
    buffer, env, priority = config.buffer, config.env, config.buffer.prioritized
    transforms = [MultiStepTransform(buffer.n_steps, config.gamma)] if buffer.n_steps > 1 else []
    if priority == Priority.movement:
        goal_fn = load_function(env.goal_fn)
        transforms.append(MovementPriority(buffer.far, goal_fn=goal_fn))
    return TensorDictReplayBuffer(
        storage=PackedStorage(buffer.size, device=config.device, ndim=2 if buffer.n_steps > 1 else 1),
        sampler=PrioritizedSampler(buffer.size, buffer.alpha, buffer.beta) if priority else None,
        priority_key="movement" if priority == Priority.movement else "td_error",
        transform=Compose(*transforms, hindsight, inputs),
    )


# Collection


def record_policy(policy: TensorDictModuleBase) -> TensorDictModuleBase:
    """Return a policy that replays the recorded operations of another policy, which must be operations on tensors."""
    keys, act = list(policy.in_keys), Recorded(lambda data: policy(data).select("action"))
    return WrapModule(lambda data: act(data.select(*keys)), inplace=True, in_keys=keys, out_keys=["action"])


def anneal(policy: TensorDictSequential, chunks: int = 1) -> None:
    """Reduce the exploration of a collector's policy by a number of chunks of steps (see `Exploration.final`)."""
    for explorer in list(policy)[1:]:  # after the recorded policy
        explorer.step(chunks)


def make_collector(config: Settings, policy: TensorDictModuleBase, gaussian: bool = False) -> Collector:
    """Make a collector that explores with uniformly random actions and, if ``gaussian``, with Gaussian noise.

    It yields transitions as they are written: ``[environments, time]`` for n-step windows, else ``[n]``.
    """
    env, device, exploration = config.env, config.device, config.exploration
    noise, share = exploration.noise, exploration.random_actions
    chunks = -(-exploration.anneal_steps // config.collector.steps_per_chunk)
    anneals: dict[str, Any] = {"annealing_num_steps": chunks, "device": device}
    envs = make_envs(env, env.num_envs, env.parallel) if env.num_envs > 1 else make_env(env)
    envs.set_seed(config.seed)
    spec, explorers = envs.action_spec.to(device), []
    if gaussian:
        explorers.append(AdditiveGaussianModule(spec, sigma_init=noise, sigma_end=noise * exploration.final, **anneals))
    explorers.append(EGreedyModule(spec, eps_init=share, eps_end=share * exploration.final, **anneals))
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


# Evaluation


class Evaluation:
    """Plays greedy episodes, with the same starts and goals every time."""

    def __init__(self, config: Settings):
        self.config, settings = config, config.evaluation
        self.goal_fn = load_function(config.env.goal_fn) or nn.Identity()
        self.envs = make_envs(config.env, min(settings.num_envs, settings.episodes), settings.parallel)
        self.close = partial(self.envs.close, raise_if_closed=False)  # they start with the first evaluation

    @torch.no_grad()
    @set_exploration_type("DETERMINISTIC")
    def __call__(self, policy: TensorDictModuleBase) -> dict[str, Tensor]:
        """Return success and distance at the last step, and return and length of the episode, ``[episodes]`` each."""
        seed, found, count = EVALUATION_SEED, [], self.config.evaluation.episodes
        cast = self.config.device != "cpu"
        for _ in range(0, count, self.envs.batch_size.numel()):
            seed = self.envs.set_seed(seed)
            steps = self.envs.rollout(LONGEST_EPISODE, policy, break_when_all_done=True, auto_cast_to_device=cast)
            found.append(self._outcomes(steps["next"]))
        return {name: torch.cat([values[name] for values in found])[:count] for name in found[0]}

    def _outcomes(self, steps: TensorDictBase) -> dict[str, Tensor]:
        # An episode that ends before others is padded with its last step.
        env, end, running = self.config.env, steps[:, -1], ~steps["done"].squeeze(-1)  # [envs, time]
        if running[:, -1].any():
            raise SystemExit(f"Episodes do not end in {LONGEST_EPISODE:,} steps: set +env.kwargs.max_episode_steps=...")
        length = running.sum(1) + 1  # [envs]
        achieved = self.goal_fn(end[env.achieved_goal])
        return {
            "success": end[env.success].reshape(-1),
            "return": (steps["reward"].squeeze(-1) * (torch.arange(steps.shape[1]) < length.unsqueeze(1))).sum(1),
            "distance": (achieved.float() - end[env.desired_goal].float()).flatten(1).norm(dim=1),
            "length": length,
        }
