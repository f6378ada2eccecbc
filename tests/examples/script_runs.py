"""Runs of the training scripts with settings that take about a second, and comparisons of two of them."""

import contextlib
import csv
import importlib
import shlex
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from torch.utils._pytree import keystr, tree_leaves_with_path

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = [
    "total_steps=200",
    "+env.kwargs.max_episode_steps=15",  # one is running at a checkpoint
    "collector.steps_per_chunk=50",
    "collector.random_steps=50",
    "buffer.size=150",  # it goes round
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


def configure(script, *overrides):
    with initialize_config_dir(str(EXAMPLES / "config"), version_base="1.3"):
        return compose(script, overrides=list(overrides))


def train(command, folder, *, picture=False):
    """Train with the small settings; the picture, which takes as long as the training, is drawn on request only.

    Args:
        command: a script and its overrides. That of dqn trains with five bits where it names no environment.
        folder: of the run.
        picture: draw it.
    """
    script, *overrides = shlex.split(command)
    bits = BITS if script == "dqn" and "env.name" not in command else []
    with contextlib.nullcontext() if picture else patch("training.draw_training"):
        return importlib.import_module(script).train(configure(script, *SMALL, *bits, *overrides), folder)


def logged(folder, name):
    """The rows ``[step, value]`` of a CSV log."""
    with (folder / "logs" / "csv" / "scalars" / f"{name}.csv").open() as file:
        return [[int(step), float(value)] for step, value in csv.reader(file)]


def state_of(training):
    """Everything that a run's checkpoint has, by its path."""
    state = dict(training.checkpoint.components)
    for name, component in state.items():
        if hasattr(component, "state_dict"):
            state[name] = component.state_dict()
    if hasattr(training.replay_buffer.sampler, "_sum_tree"):
        sampler = state["buffer"]["_sampler"]
        rows = np.arange(len(training.replay_buffer), dtype=np.int64)
        sampler["_sum_tree"], sampler["_min_tree"] = (sampler[tree][rows] for tree in ("_sum_tree", "_min_tree"))
    return {
        keystr(path): torch.as_tensor(value) if isinstance(value, (int, float, np.ndarray)) else value
        for path, value in tree_leaves_with_path(state)
    }


def differences(one, other):
    """The paths of the entries that differ in two states, except for times."""
    assert one.keys() == other.keys()
    return [path for path in one if "second" not in path and not equal(one[path], other[path])]


def equal(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
