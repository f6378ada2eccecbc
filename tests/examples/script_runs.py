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
from torch.utils._pytree import keystr, tree_leaves_with_path
from training.command import check

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = [
    "total_steps=200", "+env.kwargs.max_episode_steps=15", "collector.steps_per_chunk=50", "collector.random_steps=50",
    "buffer.size=150", "batch_size=32", "hidden=[16]", "evaluation.interval=100", "evaluation.episodes=2",
    "evaluation.num_envs=2", "goals.start=30", "logger.interval=100", "logger.kinds=[csv]", "checkpoint.interval=100",
]  # fmt: skip  # an episode is running at a checkpoint, and the oldest transitions are overwritten
BITS = ["+env.kwargs.n_bits=5", "collector.steps_per_chunk=25"]
NOT_COMPARED = ("second", "hindsight_stamp", "traj_ids")  # times, and numbers of episodes, which a resumed run changes


def configure(script, *overrides):
    """The checked settings of a script."""
    with initialize_config_dir(str(EXAMPLES / "config"), version_base="1.3"):
        return check(compose(script, overrides=list(overrides)))


def train(command, folder, *, picture=False):
    """Train with small settings; without the picture, which takes as long to draw as the training."""
    script, *overrides = shlex.split(command)
    settings = configure(script, *SMALL, *(BITS if script == "dqn" and "env.name" not in command else []), *overrides)
    with contextlib.nullcontext() if picture else patch("training.run.draw_training"):
        return importlib.import_module(script).train(settings, folder)


def logged(folder, name):
    """The rows ``[step, value]`` of a CSV log."""
    with (folder / "logs" / "csv" / "scalars" / f"{name}.csv").open() as file:
        return [[int(step), float(value)] for step, value in csv.reader(file)]


def state_of(run):
    """Everything in the checkpoint of a run that can be compared, by its path."""
    state = {name: part.state_dict() if hasattr(part, "state_dict") else part for name, part in run.components.items()}
    assert {"policy", "loss", "buffer", "log", "progress", "rng"} <= state.keys()
    buffer = run.components["buffer"]
    if hasattr(buffer.sampler, "_sum_tree"):
        sampler, rows = state["buffer"]["_sampler"], np.arange(len(buffer), dtype=np.int64)
        sampler["_sum_tree"], sampler["_min_tree"] = (sampler[tree][rows] for tree in ("_sum_tree", "_min_tree"))
    leaves = {keystr(path): value for path, value in tree_leaves_with_path(state)}
    return {path: value for path, value in leaves.items() if not any(name in path for name in NOT_COMPARED)}


def differences(one, other):
    """The paths of the entries that differ in two states."""
    numbers, found = (torch.Tensor, np.ndarray, int, float), []
    assert one.keys() == other.keys()
    for path, value in one.items():
        pair = (value, other[path])
        if not (torch.equal(*map(torch.as_tensor, pair)) if isinstance(value, numbers) else pair[0] == pair[1]):
            found.append(path)
    return found
