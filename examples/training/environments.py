"""Read this to see how environments are made and evaluated."""

import contextlib
import io
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.envs import EnvBase, GymEnv, ParallelEnv, SerialEnv, default_info_dict_reader, set_exploration_type
from torchrl.envs.transforms import ClipTransform, DoubleToFloat

import torchrl_her.envs  # noqa: F401 (registers BitFlipping and PointReach)
from torchrl_her import EnvReward, HERKeys
from training.settings import SUCCESS, Env, Settings

with contextlib.suppress(ImportError), contextlib.redirect_stderr(io.StringIO()):  # hides a notice about Adroit
    import gymnasium_robotics  # noqa: F401 (registers Fetch, PointMaze and other robots)

EVALUATION_SEED = 1_000_000  # of the first episode
LONGEST_EPISODE = 100_000  # steps after which an evaluation fails
PACKAGES = (
    "For an environment of another package, set env.name=module:Name-v0, and put its module on PYTHONPATH. Fetch, "
    "PointMaze and other robots need: pip install -c constraints.txt gymnasium-robotics mujoco; panda.py needs: pip "
    "install -c constraints.txt panda-gym"
)


class InfoReader(default_info_dict_reader):
    """Reads entries of info as ``float32``. Some are plain bools, and some are missing after a reset.

    If ``is_success`` is missing after a step, it is whether the step has the reward of a reached goal.
    """

    def __init__(self, config: Env, env: GymEnv):
        success = config.success or SUCCESS
        super().__init__([key for key in (success, *config.info_keys) if key != "terminated"])
        self.config, self.env, self.success = config, env, success

    def __call__(self, info: dict[str, Any], tensordict: TensorDictBase) -> TensorDictBase:  # noqa: D102
        found = {key: np.float32(info[key]) for key in self.keys if key in info}
        is_left_out = self.success == SUCCESS and SUCCESS not in info and "reward" in tensordict
        if is_left_out and self.env.has_wrapper_attr("compute_reward"):
            goal_fn = load_function(self.config.goal_fn) or nn.Identity()
            goal = goal_fn(tensordict[self.config.achieved_goal].unsqueeze(0))[0].numpy()
            reached = self.env.get_wrapper_attr("compute_reward")(goal, goal, info)
            found[SUCCESS] = np.float32(np.isclose(tensordict["reward"].item(), reached).all())
        return super().__call__(found, tensordict)


def make_env(config: Env, **kwargs: Any) -> EnvBase:
    """Make an environment in single precision that returns the required entries of info."""
    try:
        env = GymEnv(config.name, categorical_action_encoding=True, **config.kwargs, **kwargs)
    except (gymnasium.error.Error, ImportError) as error:
        message = f"The environment {config.name!r} cannot be made: {str(error).rstrip('.?')}. {PACKAGES}"
        raise SystemExit(message) from None
    env.set_info_dict_reader(InfoReader(config, env))
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


def make_keys(config: Env) -> HERKeys:
    """Make the keys of the goals."""
    return HERKeys(achieved_goal=config.achieved_goal, desired_goal=config.desired_goal)


# Evaluation


class Evaluation:
    """Plays greedy episodes, with the same starts and goals every time: those of a seed.

    TorchRL's ``Evaluator`` does not seed its environments, so it evaluates on other episodes every time.
    """

    def __init__(self, config: Settings, seed: int = EVALUATION_SEED):
        self.config, self.seed, settings = config, seed, config.evaluation
        self.goal_fn = load_function(config.env.goal_fn) or nn.Identity()
        self.envs = make_envs(config.env, min(settings.num_envs, settings.episodes), settings.parallel)
        self.close = partial(self.envs.close, raise_if_closed=False)  # they start with the first evaluation

    @torch.no_grad()
    @set_exploration_type("DETERMINISTIC")
    def __call__(self, policy: TensorDictModuleBase) -> dict[str, Tensor]:
        """Return success and distance at the last step, and return and length of the episode, ``[episodes]`` each."""
        seed, found, count = self.seed, [], self.config.evaluation.episodes
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
