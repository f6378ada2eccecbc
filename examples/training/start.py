"""Read this if an environment is refused."""

import traceback
from dataclasses import replace

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from torchrl import torchrl_logger
from torchrl.envs import EnvBase

from training.environments import SUCCESS, load_function, make_env, make_keys, make_reward
from training.parts import make_buffer, make_hindsight, make_inputs, make_selection
from training.settings import CHUNK, Priority, Settings, When

ENDLESS = 10_000  # steps in which an episode without a time limit must end
MEANINGS = (
    "Arguments such as goal_fn are settings: env.goal_fn=module:function, with the module on PYTHONPATH. HERKeys are "
    "env.achieved_goal and env.desired_goal, in_keys are inputs. HERTransform is hindsight.when=sampling, "
    "HindsightAugmentation is hindsight.when=writing, MultiStepTransform is buffer.n_steps."
)


def prepare(config: Settings, discrete: bool = False) -> EnvBase:
    """Set threads, precision and seeds, and return the environment, or exit if it cannot be trained on."""
    torchrl_logger.setLevel("WARNING")
    torch.set_num_threads(config.threads)
    torch.set_float32_matmul_precision(config.matmul_precision.name)
    set_seeds(config.seed)
    env, name = make_env(config.env), config.env.name
    read, space = {config.env.success, *config.env.info_keys}, env.action_space
    is_box = isinstance(space, spaces.Box) and space.is_bounded() and len(space.shape) == 1
    if not (isinstance(space, spaces.Discrete) and space.start == 0 if discrete else is_box):
        raise SystemExit(f"Actions of {name} are {space}. dqn.py needs Discrete(n), the others a bounded, flat Box.")
    env.get_wrapper_attr("reset")(seed=config.seed)  # of the outermost wrapper: wrappers may add entries of info
    info = {"terminated": False} | env.get_wrapper_attr("step")(space.sample())[-1]
    numbers = {key for key in read & set(info) if not np.ndim(info[key]) and np.asarray(info[key]).dtype.kind in "biuf"}
    is_left_out = config.env.success == SUCCESS and SUCCESS not in info
    if missing := read - numbers - ({SUCCESS} if is_left_out else set()):
        raise SystemExit(
            f"{sorted(missing)} must be numbers or bools in every info of {name}, which has {sorted(info)}: return "
            f'info["{min(missing)}"] in step, or set env.info_keys and env.success (terminated, if the episode ends at '
            "the goal)."
        )
    steps = play_on_trial(config, env)
    if is_left_out and not is_sparse(config, steps):
        raise SystemExit(
            f'{name} has no info["{SUCCESS}"], and its reward is not sparse, so that success is unknown: return '
            f"{SUCCESS} in info, or set env.success (another entry, or terminated, if the episode ends at the goal)."
        )
    set_seeds(config.seed)
    return env


def set_seeds(seed: int) -> None:
    """Seed the generators of torch and NumPy. Prioritized sampling draws from that of NumPy."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def play_on_trial(config: Settings, env: EnvBase) -> TensorDictBase:
    """Play, write, relabel and sample steps ``[time]``, and return them, or exit: nothing is written to disk yet."""
    chunk, whole = config.collector.steps_per_chunk, (env.spec.max_episode_steps or 1) * config.env.num_envs
    if config.buffer.prioritized == Priority.movement and chunk % whole:
        raise SystemExit(f"buffer.prioritized=movement: {CHUNK}={chunk} must be a multiple of whole episodes, {whole}.")
    if env.spec.max_episode_steps is None and not env.rollout(ENDLESS)["next", "done"].any():
        raise SystemExit(f"Episodes do not end in {ENDLESS:,} steps: set +env.kwargs.max_episode_steps=...")
    writing = config.hindsight.enabled and config.hindsight.when == When.writing  # stores whole episodes
    longest = config.checkpoint.interval if writing else (100 + config.buffer.n_steps) * config.env.num_envs
    steps = min(config.collector.random_steps + chunk, longest) // config.env.num_envs
    data = env.rollout(steps, break_when_any_done=writing)
    if writing and not data["next", "done"].any():
        raise SystemExit(
            f"hindsight.when=writing: no episode ends in the first {steps} steps of an environment. Increase "
            "collector.random_steps and checkpoint.interval."
        )
    trial = replace(config, buffer=replace(config.buffer, size=steps + 1))  # the last episode may go on
    try:
        buffer = make_buffer(trial, make_hindsight(trial), make_inputs(trial, env))
        buffer.extend(data.reshape((1, -1) if config.buffer.n_steps > 1 else -1))
        buffer.sample(config.batch_size)
        if config.goals.selection:
            make_selection(config, make_hindsight(config))
    except Exception as error:
        traceback.print_exception(error)
        raise SystemExit(f"{config.env.name} cannot be trained on: {error!r}. {MEANINGS}") from error
    if getattr(config, "clip_target", False):
        check_rewards(config, data)
    return data


def is_sparse(config: Settings, steps: TensorDictBase) -> bool:
    """Return whether all goals that are not reached lower the reward of a step ``[time]`` by the same number."""
    keys, goal_fn = make_keys(config.env), load_function(config.env.goal_fn)
    reward = make_reward(config.env).with_goal_fn(goal_fn)
    reward.set_keys(keys)
    own = steps[keys.next_achieved_goal] if goal_fn is None else goal_fn(steps[keys.next_achieved_goal])
    reached, *others = (
        reward(steps.copy().set(keys.desired_goal, goals))[keys.next_reward]
        for goals in (own, steps[keys.desired_goal], own.flip(0))
    )
    lowered = reached - torch.cat(others).view(2, *reached.shape)
    share = lowered / lowered.max()
    has_two_values = torch.isclose(share, (share > 0.5).to(share), atol=1e-3).all()
    return bool(lowered.max() > 0 and has_two_values)


def check_rewards(config: Settings, steps: TensorDictBase) -> None:
    """Exit if rewards, including the rewards of reached goals, can lead to returns outside the clipped range."""
    goals = steps[config.env.desired_goal]
    reached = TensorDict({"desired_goal": goals, "next": steps["next"].copy().set("achieved_goal", goals)}, len(goals))
    rewards = torch.cat([steps["next", "reward"], make_reward(config.env).forward(reached)["next", "reward"]])
    if config.gamma >= 1 or rewards.max() > 0 or rewards.min() < -1:
        raise SystemExit(
            f"clip_target=true needs gamma < 1 and rewards from -1 to 0, but {config.env.name} gives {rewards.min():g} "
            f"to {rewards.max():g} (gamma={config.gamma}): use clip_target=false."
        )
