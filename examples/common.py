"""What the training scripts share: environments, normalization, replay buffer and evaluation."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.data import TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
from torchrl.envs import (
    ClipTransform,
    Compose,
    DoubleToFloat,
    EnvBase,
    ExplorationType,
    GymEnv,
    MultiStepTransform,
    ObservationNorm,
    ParallelEnv,
    SerialEnv,
    Transform,
    TransformedEnv,
    default_info_dict_reader,
    set_exploration_type,
)

import torchrl_her.envs  # noqa: F401 (registers BitFlipping and PointReach)
from torchrl_her import EnvReward, HERTransform, HindsightAugmentation, PackedStorage

with contextlib.suppress(ImportError):  # an extra, see make_env
    import gymnasium_robotics

    gymnasium.register_envs(gymnasium_robotics)

EVALUATION_SEED = 1_000_000  # of the first of the episodes
LONGEST_EPISODE = 100_000  # steps of an evaluation
INPUTS = ("observation", "achieved_goal", "desired_goal")

# Environments


def make_env(config: DictConfig, **kwargs: Any) -> EnvBase:
    """Make one goal environment, whose info entry of success stands in the data."""
    try:
        env = GymEnv(
            config.name, categorical_action_encoding=True, **cast(dict, OmegaConf.to_object(config.kwargs)), **kwargs
        )
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        reason = str(error).rstrip(".")
        raise SystemExit(f"The environment {config.name!r} cannot be made: {reason}. {how_to_install()}") from None
    if missing := set(INPUTS) - set(env.observation_spec.keys()):
        raise SystemExit(f"{config.name} is not a goal environment: its observations have no {sorted(missing)}.")
    env.set_info_dict_reader(SuccessReader([config.success]))
    transforms: list[Transform] = []
    if any(env.observation_spec[key].dtype == torch.float64 for key in INPUTS):
        transforms.append(DoubleToFloat())
    if config.clip_observation is not None:
        transforms.append(ClipTransform(["observation"], low=-config.clip_observation, high=config.clip_observation))
    return TransformedEnv(env, Compose(*transforms)) if transforms else env


def how_to_install() -> str:
    """Say how environments are installed that are not."""
    if importlib.util.find_spec("gymnasium_robotics") and importlib.util.find_spec("mujoco"):
        return "Those of other packages are named with the module that registers them, module:Name-v0."
    return (
        "Fetch, the hand, the mazes and the other environments of Gymnasium-Robotics need MuJoCo, with versions that "
        "belong together:\n    pip install -c constraints.txt gymnasium-robotics mujoco"
    )


def check_actions(env: EnvBase, continuous: bool) -> None:
    """Check that a script can act in an environment."""
    name, space = name_of(env), outermost(env).action_space
    if env.action_spec.dtype.is_floating_point != continuous:
        found, scripts = ("numbers", "dqn.py") if continuous else ("vectors", "ddpg.py, td3.py or sac.py")
        raise SystemExit(f"Actions of {name} are {found}: train it with {scripts}.")
    if continuous and not space.is_bounded():
        raise SystemExit(f"Actions of {name} have no bounds: the agents here act between bounds.")
    if not continuous and not (isinstance(space, gymnasium.spaces.Discrete) and space.start == 0):
        raise SystemExit(f"Actions of {name} are {space}: dqn.py chooses one of the numbers from 0 on.")


class SuccessReader(default_info_dict_reader):
    """Reads the info entry of success, which some environments give as a plain bool, and others not at every reset."""

    def __call__(self, info: dict[str, Any], tensordict: TensorDictBase) -> TensorDictBase:  # noqa: D102
        found = {key: np.asarray(info[key], dtype=np.float32) for key in self.keys if key in info}
        return super().__call__(found, tensordict)


def check_success(env: EnvBase, success: str) -> None:
    """Check that a step of an environment tells of success."""
    gym_env = unwrap(env)
    gym_env.reset()
    *_, info = gym_env.step(gym_env.action_space.sample())
    if success not in info:
        raise SystemExit(
            f"A step of {name_of(env)} has no info entry {success!r}, but {sorted(info)}: name the one that tells "
            "whether the goal is reached, env.success=..."
        )


def unwrap(env: EnvBase) -> gymnasium.Env:
    """Return the Gymnasium environment in an environment of `make_env`, with no wrapper around it."""
    return outermost(env).unwrapped


def name_of(env: EnvBase) -> str:
    """Return the id of an environment of `make_env`."""
    spec = unwrap(env).spec
    return str(spec and spec.id)


def outermost(env: EnvBase) -> GymEnv:
    """Return what passes on the attributes of the Gymnasium environment, with the wrappers around it."""
    return env.base_env if isinstance(env, TransformedEnv) else env


def make_envs(config: DictConfig, num_envs: int, parallel: bool) -> EnvBase:
    """Make a batch of environments; ``num_envs=1`` makes a batch of one."""
    return (ParallelEnv if parallel else SerialEnv)(num_envs, partial(make_env, config))


def on_device(envs: EnvBase, device: str) -> dict[str, bool]:
    """Return what a rollout is told where the policy is on another device than environments, which are on the CPU."""
    if device == "cpu":  # nothing is moved, and no device named: that costs time
        return {}
    envs.to("cpu")
    return {"auto_cast_to_device": True}


def rewards_of(env: EnvBase) -> tuple[float, float]:
    """Return what a step earns that ends at its goal, and the least of those that end where episodes begin."""
    env.set_seed(EVALUATION_SEED)
    starts: Any = torch.stack([env.reset() for _ in range(20)])
    goals = torch.cat([starts["desired_goal"], starts["desired_goal"][:1]])
    achieved = torch.cat([starts["achieved_goal"], goals[-1:]])
    steps = TensorDict({"desired_goal": goals, "next": {"achieved_goal": achieved}}, [len(goals)])
    *at_starts, at_goal = EnvReward(env).forward(steps)["next", "reward"].flatten().tolist()
    return at_goal, min(at_starts)


# Normalization


class Moments(nn.Module):
    """Mean and deviation of all values so far that it is told of.

    TorchRL's VecNormV2 takes note of what it normalizes: of what is sampled, too, and of each entry for itself.
    """

    count: Tensor
    mean: Tensor
    mean_square: Tensor
    loc: Tensor
    scale: Tensor

    def __init__(self, shape: torch.Size, device: str):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("mean_square", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("loc", torch.zeros(shape, device=device))
        self.register_buffer("scale", torch.ones(shape, device=device))

    def update(self, values: Tensor) -> None:
        """Take note of values ``[*batch, *shape]``."""
        values = values.reshape(-1, *self.mean.shape).to(self.mean)  # [n, *shape]
        self.count += len(values)
        self.mean.lerp_(values.mean(0), len(values) / self.count)
        self.mean_square.lerp_(values.square().mean(0), len(values) / self.count)
        self.loc.copy_(self.mean)
        # A deviation of at least 0.01, as in the original experiments: what hardly moves is not blown up.
        self.scale.copy_((self.mean_square - self.mean.square()).clamp_min(1e-4).sqrt())


class Normalization(nn.Module):
    """Running normalization of observations and goals, clipped (Plappert et al. 2018, arXiv:1802.09464).

    Environments and buffer hold raw values, so that rewards can be computed. The same tensors normalize in front
    of the policy that acts and what is sampled, after relabelling; desired and achieved
    goals have one statistic. Networks read the entries ``keys``.
    """

    def __init__(self, config: DictConfig, env: EnvBase):
        super().__init__()
        self.enabled, self.clip = config.normalization.enabled, config.normalization.clip
        self.inputs = list(config.inputs)
        self.keys = [f"normalized_{key}" for key in self.inputs] if self.enabled else self.inputs
        shapes = {key: env.observation_spec[key].shape for key in ("observation", "desired_goal")}
        self.moments = nn.ModuleDict({key: Moments(shape, config.device) for key, shape in shapes.items()})

    def when_acting(self) -> list[Transform]:
        """Return the transforms in front of a policy."""
        return list(self._transforms([()])) if self.enabled else []

    def when_sampling(self) -> list[Transform]:
        """Return the transforms of the buffer, which stand after HERTransform."""
        return list(self._transforms([(), ("next",)])) if self.enabled else []

    def _transforms(self, places: list[tuple[str, ...]]) -> Iterator[Transform]:
        for key, normalized in zip(self.inputs, self.keys, strict=True):
            moments = self.moments["desired_goal" if key == "achieved_goal" else key]
            in_keys = [unravel_key((*place, key)) for place in places]
            out_keys = [unravel_key((*place, normalized)) for place in places]
            yield ObservationNorm(moments.loc, moments.scale, in_keys, out_keys, standard_normal=True)
            yield ClipTransform(out_keys, low=-self.clip, high=self.clip)

    def update(self, data: TensorDictBase) -> None:
        """Follow what was collected."""
        if self.enabled:
            cast(Moments, self.moments["observation"]).update(data["observation"])
            cast(Moments, self.moments["desired_goal"]).update(
                torch.cat([data["desired_goal"], data["next", "achieved_goal"]])
            )


# Replay buffer


def make_hindsight(config: DictConfig) -> HERTransform | HindsightAugmentation:
    """Make the transform that relabels what is sampled, or what is written.

    ``hindsight.enabled=false`` only sets her_ratio to 0.
    """
    reward = EnvReward(partial(make_env, config.env))
    strategy, her_ratio = config.hindsight.strategy, config.hindsight.her_ratio
    if config.hindsight.when not in ("sampling", "writing"):
        raise SystemExit(f"hindsight.when is 'sampling' or 'writing', not {config.hindsight.when!r}.")
    if config.hindsight.enabled and config.hindsight.when == "writing":
        copies = round(her_ratio / (1 - her_ratio)) if 0 < her_ratio < 1 else 0
        if not copies or abs(copies / (copies + 1) - her_ratio) > 0.005:
            raise SystemExit(f"hindsight.when=writing writes k copies, her_ratio = k / (k + 1), not {her_ratio}.")
        return HindsightAugmentation(reward, strategy=strategy, n_sampled_goal=copies)
    longest = outermost(make_env(config.env)).spec.max_episode_steps
    publishes_early = longest is not None and longest >= 64
    return HERTransform(
        reward,
        strategy=strategy,
        her_ratio=her_ratio if config.hindsight.enabled else 0.0,
        # Goals of episodes that run while others end come in late, and long episodes are published twice.
        capacity=(3 if publishes_early else 1) * config.buffer.size + 100 * config.env.num_envs,
    )


def make_replay_buffer(
    config: DictConfig, normalization: Normalization
) -> tuple[TensorDictReplayBuffer, HERTransform | HindsightAugmentation]:
    """Make the buffer and its transform."""
    hindsight = make_hindsight(config)
    n_steps, prioritized = config.buffer.n_steps, config.buffer.prioritized
    if prioritized not in (None, "error", "movement"):
        raise SystemExit(f"buffer.prioritized is null, 'error' or 'movement', not {prioritized!r}.")
    if n_steps > 1 and isinstance(hindsight, HindsightAugmentation):
        raise SystemExit(
            "Returns of several steps need hindsight.when=sampling: what is written are copies of one step."
        )
    if prioritized == "movement" and (n_steps > 1 or isinstance(hindsight, HindsightAugmentation)):
        raise SystemExit(
            "buffer.prioritized=movement needs a row of the buffer for each step: use buffer.n_steps=1 and "
            "hindsight.when=sampling."
        )
    windows = [MultiStepTransform(n_steps, config.gamma)] if n_steps > 1 else []
    arguments = {
        # Windows are made along time: environments stay apart, [environments, time].
        "storage": PackedStorage(config.buffer.size, device=config.device, ndim=2 if n_steps > 1 else 1),
        "transform": Compose(*windows, hindsight, *normalization.when_sampling()),
    }
    if prioritized:
        buffer = TensorDictPrioritizedReplayBuffer(alpha=config.buffer.alpha, beta=config.buffer.beta, **arguments)
    else:
        buffer = TensorDictReplayBuffer(**arguments)
    return buffer, hindsight


# Evaluation


class Evaluation:
    """Greedy episodes, with the same starts and goals every time."""

    def __init__(self, config: DictConfig):
        self.episodes, self.success = config.evaluation.episodes, config.env.success
        self.envs = make_envs(config.env, min(config.evaluation.num_envs, self.episodes), config.evaluation.parallel)
        self.envs.set_seed(EVALUATION_SEED)  # starts them
        self.on_device = on_device(self.envs, config.device)

    def __call__(self, policy: TensorDictModuleBase) -> dict[str, Tensor]:
        """Return success and distance at the last step, return and length of each episode, ``[episodes]``."""
        seed, outcomes = EVALUATION_SEED, []
        for _ in range(0, self.episodes, self.envs.batch_size.numel()):
            seed = self.envs.set_seed(seed)
            with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
                steps = self.envs.rollout(
                    LONGEST_EPISODE, policy, break_when_any_done=False, break_when_all_done=True, **self.on_device
                )  # [envs, time]
            outcomes.append(self._outcomes(steps["next"]))
        return {name: torch.cat([outcome[name] for outcome in outcomes])[: self.episodes] for name in outcomes[0]}

    def _outcomes(self, steps: TensorDictBase) -> dict[str, Tensor]:
        done = steps["done"].squeeze(-1)  # [envs, time]
        if not done.any(1).all():
            raise SystemExit(
                f"An episode of the evaluation did not end in {LONGEST_EPISODE:,} steps: give it an end, "
                "+env.kwargs.max_episode_steps=..."
            )
        last = done.int().argmax(1)  # its first end: nothing after it counts
        counts = torch.arange(done.shape[1]) <= last.unsqueeze(1)  # [envs, time]
        end = steps[torch.arange(len(steps)), last]  # [envs]
        distance = (end["achieved_goal"].float() - end["desired_goal"].float()).reshape(len(end), -1).norm(dim=1)
        return {
            "success": end[self.success].reshape(-1).float(),
            "return": (steps["reward"].squeeze(-1) * counts).sum(1),
            "distance": distance,
            "length": last + 1,
        }

    def close(self) -> None:
        """Close the environments."""
        self.envs.close()
