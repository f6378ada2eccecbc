"""Checks that the training scripts can train on an environment, before anything is written."""

import gymnasium
import numpy as np
import torch
from common import check_end, load_goal_fn, make_env, make_reward
from settings import CHUNK, Env, Priority, Settings, When
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase

UNLIMITED = 10_000  # steps in which an environment without a time limit must end an episode


def check_env(config: Settings, discrete: bool = False) -> EnvBase:
    """Return the environment, or exit if it cannot be trained on with these settings."""
    env = make_env(config.env)
    check_goals(config, env)
    name, space = config.env.name, env.action_space
    is_box = isinstance(space, gymnasium.spaces.Box) and space.is_bounded() and len(space.shape) == 1
    is_discrete = isinstance(space, gymnasium.spaces.Discrete) and space.start == 0
    if not (is_discrete if discrete else is_box):
        raise SystemExit(f"Actions of {name} are {space}. dqn.py needs Discrete(n), the others a bounded, flat Box.")
    env.get_wrapper_attr("reset")(seed=config.seed)  # of the outermost wrapper: wrappers may add entries of info
    info = {"terminated": False} | env.get_wrapper_attr("step")(space.sample())[-1]
    read = {config.env.success, *config.env.info_keys}
    if missing := read - set(info):
        raise SystemExit(
            f"A step of {name} has no info entry {sorted(missing)}, only {sorted(set(info) - {'terminated'})}: set "
            "env.info_keys and env.success (terminated, if the episode ends at the goal). Every step must have them."
        )
    if wrong := [key for key in sorted(read) if np.ndim(info[key]) or np.asarray(info[key]).dtype.kind not in "biuf"]:
        raise SystemExit(f"The info entries {wrong} of {name} must be single numbers or bools.")
    check_reward(config, env)
    if env.spec.max_episode_steps is None:
        with torch.random.fork_rng([]):
            check_end(env.rollout(UNLIMITED)["next", "done"].any(), UNLIMITED)
    if config.hindsight.enabled and config.hindsight.when == When.writing:
        steps = (config.collector.random_steps + config.collector.steps_per_chunk) // config.env.num_envs
        if not env.rollout(steps)["next", "done"].any():
            raise SystemExit(
                f"hindsight.when=writing stores whole episodes, but none ends in the {steps} steps of each environment "
                "before the first update: increase collector.random_steps."
            )
    whole = (env.spec.max_episode_steps or 1) * config.env.num_envs
    if config.buffer.prioritized == Priority.movement and (chunk := config.collector.steps_per_chunk) % whole:
        raise SystemExit(
            f"buffer.prioritized=movement measures paths of whole episodes: {CHUNK}={chunk} must be a multiple of "
            f"{whole}."
        )
    return env


def check_goals(config: Settings, env: EnvBase) -> None:
    """Exit if observations lack entries that the settings name, or if networks or hindsight cannot use the goals."""
    name, spec = config.env.name, env.observation_spec
    goals, clipped = [config.env.achieved_goal_key, config.env.desired_goal_key], config.env.clip_observation
    keys = set(spec.keys()) - {config.env.success, *config.env.info_keys}
    if missing := {*config.inputs, *goals, *(["observation"] if clipped else [])} - keys:
        raise SystemExit(
            f"Observations of {name} have no {sorted(missing)}, only {sorted(keys)}: set inputs, "
            "env.achieved_goal_key, env.desired_goal_key and env.clip_observation."
        )
    if config.hindsight.enabled and goals[1] not in config.inputs:
        raise SystemExit(f"inputs={config.inputs} must contain the desired goal, {goals[1]!r}.")
    achieved, desired = load_goal_fn(config.env)(spec[goals[0]].zero((1,))), spec[goals[1]].shape
    if not isinstance(achieved, Tensor):
        raise SystemExit(f"env.goal_fn={config.env.goal_fn} must map tensors to tensors, not to {type(achieved)}.")
    if achieved.shape[1:] != desired:
        raise SystemExit(
            f"Achieved goals of {name} have the shape {[*achieved.shape[1:]]}, desired goals {[*desired]}: set "
            "env.goal_fn."
        )


def check_reward(config: Settings, env: EnvBase) -> None:
    """Exit if the reward of a relabelled transition cannot be computed."""
    try:
        rewards_at_goal(config.env, env.fake_tensordict().unsqueeze(0))
    except Exception as error:
        raise SystemExit(
            f"The reward of {config.env.name} for other goals cannot be computed: {type(error).__name__}: {error}. "
            "Set env.info_keys to the entries of info that compute_reward reads, and check env.terminated_fn."
        ) from error


def rewards_at_goal(config: Env, steps: TensorDictBase) -> Tensor:
    """Return the rewards ``[n, 1]`` that transitions ``[n]`` would have if they reached their goals."""
    goals = steps[config.desired_goal_key]
    reached = TensorDict({"desired_goal": goals, "next": steps["next"].copy().set("achieved_goal", goals)}, len(goals))
    return make_reward(config).forward(reached)["next", "reward"]
