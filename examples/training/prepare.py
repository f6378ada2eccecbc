"""Read this to see what is checked before a run, and which settings follow from the environment."""

import math

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torchrl import torchrl_logger
from torchrl.envs import EnvBase

from training.environments import load_function, make_env, make_keys, make_reward
from training.settings import DDPG, SAC, SUCCESS, Priority, Settings

TRIAL = 100  # steps, and episodes
GOALS_AHEAD = 2.5  # horizons of the discount in an episode
RETURNS = 20.0  # the range of returns that a critic of DDPG learns


def prepare(config: Settings, discrete: bool = False) -> EnvBase:
    """Set threads, precision, seeds and what is null in the settings; return the environment.

    It exits if the environment would be trained on without an error, but wrongly.
    """
    torchrl_logger.setLevel("WARNING")
    torch.set_num_threads(config.threads)
    torch.set_float32_matmul_precision(config.matmul_precision.name)
    set_seeds(config.seed)
    env, name = make_env(config.env), config.env.name
    space = env.action_space
    is_box = isinstance(space, spaces.Box) and space.is_bounded() and len(space.shape) == 1
    if not (isinstance(space, spaces.Discrete) and space.start == 0 if discrete else is_box):
        raise SystemExit(f"Actions of {name} are {space}. dqn.py needs Discrete(n), the others a bounded, flat Box.")
    env.get_wrapper_attr("reset")()  # of the outermost wrapper: wrappers may add entries of info
    found = {"terminated", *env.get_wrapper_attr("step")(space.sample())[-1]}
    if config.env.success is None:
        config.env.success = "success" if "success" in found and SUCCESS not in found else SUCCESS
        env = make_env(config.env)
    env.set_seed(config.seed)
    missing = {config.env.success, *config.env.info_keys} - found
    rewards = rewards_on_trial(config, env)  # [3, time, 1]
    lowered = rewards[0] - rewards[1:]
    if SUCCESS in missing and lowered.max() > 0 and len(lowered.round(decimals=3).unique()) <= 2:
        missing.remove(SUCCESS)  # the reward is sparse, so `InfoReader` can read the success from it
    if missing:
        raise SystemExit(
            f"{sorted(missing)} must be in every info of {name}, which has {sorted(found)}: return them in step, or "
            "set env.info_keys and env.success (terminated, if the episode ends at the goal). Only a sparse reward can "
            f"replace {SUCCESS}."
        )
    adapt(config, env, rewards)
    set_seeds(config.seed)
    return env


def set_seeds(seed: int) -> None:
    """Seed the generators of torch and NumPy. Prioritized sampling draws from that of NumPy."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def rewards_on_trial(config: Settings, env: EnvBase) -> Tensor:
    """Return the rewards of random steps for reached goals, the environment's goals, and others: ``[3, time, 1]``."""
    keys, goal_fn = make_keys(config.env), load_function(config.env.goal_fn)
    steps = env.rollout(TRIAL, break_when_any_done=False)
    reward = make_reward(config.env).with_goal_fn(goal_fn)
    reward.set_keys(keys)
    achieved = steps[keys.next_achieved_goal] if goal_fn is None else goal_fn(steps[keys.next_achieved_goal])
    goals = achieved, steps[keys.desired_goal], achieved.flip(0)
    rewards = [reward(steps.copy().set(keys.desired_goal, each))[keys.next_reward] for each in goals]
    return torch.stack(rewards).float()


def adapt(config: Settings, env: EnvBase, rewards: Tensor) -> None:
    """Set what is null in the settings."""
    limit = env.spec.max_episode_steps
    if config.gamma is None and limit is None:
        raise SystemExit(f"Set gamma: it follows from the steps of an episode, which {config.env.name} does not limit.")
    if config.gamma is None:
        config.gamma = max(0.9, round(1 - GOALS_AHEAD / limit, 5))
    exploration, components = config.exploration, math.prod(env.action_space.shape)
    if exploration.noise is None:
        exploration.noise = 0.4 / math.sqrt(components)
    if exploration.random_actions is None:
        exploration.random_actions = min(0.3, 2 / components)
    moves = config.buffer.prioritized == Priority.movement
    if config.buffer.alpha is None:
        config.buffer.alpha = 1.0 if moves else 0.6 if isinstance(config, SAC) else 0.3
    if config.buffer.beta is None:
        config.buffer.beta = 0.0 if moves else 0.4
    if config.buffer.far is None and moves:
        goals = torch.stack([env.reset()[config.env.desired_goal] for _ in range(TRIAL)]).float()
        config.buffer.far = max((goals.amax(0) - goals.amin(0)).max().item() / 3, 1e-6)
    if not isinstance(config, DDPG):
        return
    values = [0.0, *rewards.unique().tolist()]
    if config.reward_range is None and len(values) <= 3:  # the reward is sparse
        config.reward_range = min(values), max(values)
    if config.reward_range and config.reward_scale is None:
        config.reward_scale = RETURNS * (1 - config.gamma) / (config.reward_range[1] - config.reward_range[0])
