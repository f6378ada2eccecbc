"""Runs of the training scripts with settings that take about a second, and comparisons of two runs."""

import contextlib
import csv
import importlib
import shlex
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from start import check
from torch.utils._pytree import keystr, tree_leaves_with_path

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = [
    "total_steps=200",
    "+env.kwargs.max_episode_steps=15",  # an episode is running at a checkpoint
    "collector.steps_per_chunk=50",
    "collector.random_steps=50",
    "buffer.size=150",  # the oldest transitions are overwritten
    "batch_size=32",
    "hidden=[16]",
    "evaluation.interval=100",
    "evaluation.episodes=2",
    "evaluation.num_envs=2",
    "logger.interval=100",
    "logger.kinds=[csv]",
    "checkpoint.interval=100",
]
BITS = ["+env.kwargs.n_bits=5", "collector.steps_per_chunk=25"]
# Times, and numbers of episodes, which a resumed run counts differently.
NOT_COMPARED = ("second", "hindsight_stamp", "traj_ids")


def compose_settings(script, *overrides):
    """The settings of a script, with the types of its dataclass, before they are checked."""
    # Again, because a script that a test ran has registered a class of a module that is gone.
    ConfigStore.instance().store(script, importlib.import_module(script).Config)
    with initialize_config_dir(str(EXAMPLES / "config"), version_base="1.3"):
        return compose(script, overrides=list(overrides))


def configure(script, *overrides):
    """The checked settings of a script."""
    return check(compose_settings(script, *overrides))


def small_settings(command):
    """The checked settings of a small run; dqn has five bits if the command names no environment."""
    script, *overrides = shlex.split(command)
    bits = BITS if script == "dqn" and "env.name" not in command else []
    return configure(script, *SMALL, *bits, *overrides)


def train(command, folder, *, picture=False):
    """Train with the small settings. Drawing the picture takes as long as the training.

    Args:
        command: a script and its overrides.
        folder: of the run.
        picture: whether to draw the picture.
    """
    settings = small_settings(command)
    with contextlib.nullcontext() if picture else patch("run.draw_training"):
        return importlib.import_module(shlex.split(command)[0]).train(settings, folder)


def logged(folder, name):
    """The rows ``[step, value]`` of a CSV log."""
    with (folder / "logs" / "csv" / "scalars" / f"{name}.csv").open() as file:
        return [[int(step), float(value)] for step, value in csv.reader(file)]


def state_of(run):
    """Everything in the checkpoint of a run, by its path."""
    state = dict(run.components)
    for name, component in state.items():
        if hasattr(component, "state_dict"):
            state[name] = component.state_dict()
    buffer = run.components["buffer"]
    if hasattr(buffer.sampler, "_sum_tree"):
        sampler, rows = state["buffer"]["_sampler"], np.arange(len(buffer), dtype=np.int64)
        sampler["_sum_tree"], sampler["_min_tree"] = (sampler[tree][rows] for tree in ("_sum_tree", "_min_tree"))
    return {
        keystr(path): torch.as_tensor(value) if isinstance(value, (int, float, np.ndarray)) else value
        for path, value in tree_leaves_with_path(state)
    }


def differences(one, other):
    """The paths of the entries that differ in two states."""
    assert one.keys() == other.keys()
    compared = [path for path in one if not any(name in path for name in NOT_COMPARED)]
    return [path for path in compared if not equal(one[path], other[path])]


def equal(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def drawn(run, count):
    """A sample of a run's buffer, of a fixed seed."""
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002 (prioritized sampling draws from it)
    return run.components["buffer"].sample(count)
