"""What a run is given: its configuration, checked, and that of a run that is resumed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from common import INPUTS
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

AT_LEAST_ONE = [
    "batch_size", "actor_interval", "env.num_envs", "collector.steps_per_chunk", "buffer.size", "buffer.n_steps",
    "evaluation.interval", "evaluation.episodes", "evaluation.num_envs", "logger.interval", "checkpoint.interval",
]  # fmt: skip
GIVEN_ANEW = [  # to a run that is resumed; with another of the rest it would be another run
    "resume", "total_steps", "batch_size", "threads", "matmul_precision", "capture", "compile", "exploration",
    "evaluation", "logger", "checkpoint",
]  # fmt: skip


def start(config: DictConfig) -> tuple[DictConfig, Path]:
    """Return the configuration and the folder of the run; a resumed run has its own, but for what is given anew."""
    if config.resume is None:
        return config, Path(HydraConfig.get().runtime.output_dir)
    folder = Path(config.resume)
    resumed = read_config(folder)
    if resumed.algorithm != config.algorithm:
        raise SystemExit(f"The run in {folder} is one of {resumed.algorithm}.py.")
    give_anew(resumed, config, HydraConfig.get().overrides.task)
    return resumed, folder


def give_anew(resumed: DictConfig, config: DictConfig, overrides: list[str]) -> None:
    """Take what was given of a configuration into that of a run, and refuse what would make it another run."""
    given = [override.partition("=")[0].lstrip("+~") for override in overrides]
    for key in given:
        if key.partition(".")[0] in GIVEN_ANEW:
            OmegaConf.update(resumed, key, OmegaConf.select(config, key))
    for key in map(str, config) if "task" in given else given:
        value, kept = OmegaConf.select(config, key), OmegaConf.select(resumed, key)
        if key.partition(".")[0] not in GIVEN_ANEW and value != kept:
            raise SystemExit(
                f"A run that is resumed keeps its {key}: {kept}, not {value}. It may be given {', '.join(GIVEN_ANEW)}."
            )


def read_config(folder: Path) -> DictConfig:
    """Return the configuration of a run."""
    if not (folder / "config.yaml").exists():
        raise SystemExit(f"There is no run in {folder}/: it has no config.yaml.")
    config = OmegaConf.load(folder / "config.yaml")
    assert isinstance(config, DictConfig)
    return config


def check_settings(config: DictConfig) -> None:
    """Check what would else be noticed after some work was done, or not at all."""
    for name in AT_LEAST_ONE:
        value = OmegaConf.select(config, name, default=1)
        if not isinstance(value, int) or value < 1:
            raise SystemExit(f"{name}={value} has to be 1 or more.")
    if not OmegaConf.is_list(config.inputs):
        raise SystemExit("inputs is a list: inputs=[observation,desired_goal], say.")
    if not config.inputs or set(config.inputs) - set(INPUTS):
        raise SystemExit(f"inputs are some of {', '.join(INPUTS)}, not {list(config.inputs)}.")
    check_intervals(config)
    check_loggers(config.logger.kinds)


def check_intervals(config: DictConfig) -> None:
    """Check that all that happens at a step happens between two chunks."""
    chunk = config.collector.steps_per_chunk
    if chunk % config.env.num_envs:
        raise SystemExit(
            f"collector.steps_per_chunk={chunk} has to be a multiple of env.num_envs={config.env.num_envs}."
        )
    names = "total_steps", "evaluation.interval", "checkpoint.interval", "logger.interval", "collector.random_steps"
    for name in names:
        if OmegaConf.select(config, name) % chunk:
            raise SystemExit(
                f"{name}={OmegaConf.select(config, name)} has to be a multiple of collector.steps_per_chunk={chunk}."
            )


def check_loggers(kinds: list[str]) -> None:
    """Check that what is to be logged can be."""
    if not OmegaConf.is_list(kinds):
        raise SystemExit("logger.kinds is a list: [csv], say, or [].")
    for kind in kinds:
        if kind not in ("csv", "tensorboard", "wandb"):
            raise SystemExit(f"logger.kinds are csv, tensorboard and wandb, not {kind}.")
        if kind == "wandb" and importlib.util.find_spec("wandb") is None:
            raise SystemExit("logger.kinds has wandb, which is not installed: pip install wandb")
