"""The start of a training script: checks of its settings and environment, and the settings of a resumed run."""

import contextlib
import importlib.util
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from common import make_env, make_hindsight, make_inputs, make_replay_buffer
from gymnasium import spaces
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from settings import LoggerKind, Priority, Settings, Speedup, When
from torchrl.envs import EnvBase
from yaml import YAMLError

ENDLESS = 10_000  # steps in which an episode without a time limit must end
CHUNK = "collector.steps_per_chunk"
MEANINGS = (
    "Arguments such as goal_fn are settings: env.goal_fn=module:function, with the module on PYTHONPATH. HERTransform "
    "is hindsight.when=sampling, HindsightAugmentation is hindsight.when=writing, MultiStepTransform is buffer.n_steps."
)
MULTIPLES = {  # so that intervals end with a chunk, and a checkpoint has all metrics
    CHUNK: "env.num_envs", "total_steps": CHUNK, "collector.random_steps": CHUNK, "evaluation.interval": CHUNK,
    "logger.interval": CHUNK, "checkpoint.interval": "logger.interval",
}  # fmt: skip
# The settings that a resumed run can change.
CHANGEABLE = [
    "total_steps", "batch_size", "threads", "matmul_precision", "speedup", "exploration", "evaluation", "logger",
    "checkpoint", "resume",
]  # fmt: skip


class FolderOfRun(Callback):
    """Creates the folder of a run or of a sweep, or exits with a message. Hydra would show a traceback."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: D102
        self.create(config, "hydra.run.dir")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: D102
        self.create(config, "hydra.sweep.dir")

    def create(self, config: DictConfig, setting: str) -> None:
        """Create the folder in a setting."""
        folder = OmegaConf.select(config, setting)
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"The folder {folder} cannot be created: {error.strerror}. Set another one: {setting}=..."
            raise SystemExit(message) from None


def start(config: DictConfig) -> tuple[Any, Path]:
    """Return the settings and the folder of a run. A resumed run reads its settings from its folder."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    with contextlib.suppress(OSError):  # Hydra creates it even if the command is refused or resumes another folder
        for path in (folder, *folder.parents):
            if path == folder or Path.cwd() in path.parents:
                path.rmdir()
    if config.algorithm != (script := kind_of(config)().algorithm):
        raise SystemExit(f"{script}.py cannot train with algorithm={config.algorithm}: use {config.algorithm}.py.")
    if config.resume is None:
        return check(config), folder
    saved = read_settings(Path(config.resume))
    if saved.algorithm != config.algorithm:
        raise SystemExit(f"The run in {config.resume} was started with {saved.algorithm}.py: use that script.")
    with_types(saved, kind_of(config), Path(config.resume))  # exits if the file is incomplete
    return check(change(saved, config, HydraConfig.get().overrides.task)), Path(config.resume)


def kind_of(config: DictConfig) -> type[Settings]:
    """Return the dataclass of settings."""
    return cast(type, OmegaConf.get_type(config))


def read_settings(folder: Path) -> DictConfig:
    """Return the saved settings of a run, without types."""
    path = folder / "config.yaml"
    try:
        saved: Any = OmegaConf.load(path) if path.exists() else {}
    except (YAMLError, UnicodeDecodeError) as error:
        raise SystemExit(damaged(folder, " ".join(str(error).split()))) from None
    if "algorithm" not in saved:
        raise SystemExit(f"There is no run in {folder}/: it has no config.yaml with the settings of a run.")
    return saved


def damaged(folder: Path, cause: str) -> str:
    """Return the message about a file with settings that was, for example, not written completely."""
    return f"{folder / 'config.yaml'} is incomplete or damaged: {cause}. Repair it, or start a new run."


def with_types(config: DictConfig, kind: type, folder: Path | None = None) -> Any:
    """Return settings with the types of a dataclass, or exit if it has no such settings.

    The settings of a run, in a folder, must be complete.
    """
    defaults = OmegaConf.structured(kind(hydra=None))
    if folder and (missing := sorted(names(defaults) - names(config))):
        raise SystemExit(damaged(folder, f"{len(missing)} settings are missing, such as {missing[0]}"))
    try:
        return OmegaConf.merge(defaults, OmegaConf.to_container(config))
    except OmegaConfBaseException as error:
        message = f"{error.full_key}: {str(error.msg).splitlines()[0]}"
        raise SystemExit(damaged(folder, message) if folder else message) from None


def names(config: DictConfig) -> set[str]:
    """Return the names of all settings."""
    settings = cast(dict[str, Any], OmegaConf.to_container(config))
    groups = {key: value for key, value in settings.items() if isinstance(value, dict)}
    return {f"{group}.{name}" for group, values in groups.items() for name in values} | set(settings) - set(groups)


def change(saved: DictConfig, config: DictConfig, overrides: list[str]) -> DictConfig:
    """Return the saved settings with the changes of a resumed run, or exit if one of them is not allowed."""
    kept, changed, defaults = with_types(saved, kind_of(config)), saved.copy(), OmegaConf.structured(kind_of(config))
    keys = [override.partition("=")[0].lstrip("+~") for override in overrides]
    if "task" in keys:  # it sets several settings: compare all that cannot change
        keys += [str(key) for key in config if key not in CHANGEABLE and config[key] != defaults[key]]
    for key in keys:
        value = OmegaConf.select(config, key)
        if key in CHANGEABLE and isinstance(value, DictConfig):
            raise SystemExit(
                f"To change {key} of a resumed run, set {', '.join(f'{key}.{name}' for name in map(str, value))}."
            )
        if key.partition(".")[0] in CHANGEABLE:
            OmegaConf.update(changed, key, value)
        elif value != (before := OmegaConf.select(kept, key)):
            before = getattr(before, "name", before)  # of an enum
            raise SystemExit(f"A resumed run keeps {key}={before}. It can change {', '.join(CHANGEABLE[:-1])}.")
    return with_types(changed, kind_of(config))


def check(config: DictConfig) -> Any:
    """Return the settings as a dataclass, or exit if they cannot work."""
    values = OmegaConf.to_container(with_types(config, kind_of(config)), resolve=True)
    try:
        settings: Any = TypeAdapter(kind_of(config)).validate_python(values)
    except ValidationError as error:
        refused = [f"{'.'.join(map(str, each['loc']))}={each['input']}: {each['msg']}." for each in error.errors()]
        raise SystemExit("\n".join(refused)) from None
    for name, unit in MULTIPLES.items():
        if (value := OmegaConf.select(config, name)) % (of := OmegaConf.select(config, unit)):
            raise SystemExit(f"{name}={value} must be a multiple of {unit}={of}.")
    random_steps, n_steps, exploration = settings.collector.random_steps, settings.buffer.n_steps, settings.exploration
    if random_steps >= settings.total_steps:
        raise SystemExit(f"collector.random_steps={random_steps} must be less than total_steps={settings.total_steps}.")
    if exploration.final < 1 and (steps := exploration.anneal_steps) <= random_steps:
        raise SystemExit(f"exploration.anneal_steps={steps} must be more than collector.random_steps={random_steps}.")
    if n_steps > 1 and (chunk := settings.collector.steps_per_chunk) < (least := (n_steps + 2) * settings.env.num_envs):
        raise SystemExit(f"{CHUNK}={chunk} must be at least (buffer.n_steps + 2) * env.num_envs = {least}.")
    if (size := settings.buffer.size) < (least := max(settings.collector.steps_per_chunk, settings.batch_size)):
        raise SystemExit(f"buffer.size={size} must be at least {least}, the size of a chunk or of a batch.")
    if LoggerKind.wandb in settings.logger.kinds and importlib.util.find_spec("wandb") is None:
        raise SystemExit("logger.kinds contains wandb, which is not installed: pip install wandb")
    if settings.speedup == Speedup.cudagraph and settings.device == "cpu":
        raise SystemExit("speedup=cudagraph needs device=cuda, not cpu.")
    if settings.hindsight.when == When.writing and settings.hindsight.enabled and not settings.hindsight.copies:
        raise SystemExit("hindsight.when=writing stores k copies: hindsight.her_ratio must be k / (k + 1).")
    return settings


def check_env(config: Settings, discrete: bool = False) -> EnvBase:
    """Return the environment, or exit if it cannot be trained on."""
    torch.manual_seed(config.seed)
    env, name, goal = make_env(config.env), config.env.name, config.env.desired_goal
    read = {config.env.success, *config.env.info_keys}
    entries = set(env.observation_spec.keys()) - read
    clipped = ["observation"] if config.env.clip_observation else []
    if missing := {*config.inputs, *clipped, config.env.achieved_goal, goal} - entries:
        raise SystemExit(
            f"Observations of {name} have no {sorted(missing)}, only {sorted(entries)}: set inputs, "
            "env.achieved_goal, env.desired_goal and env.clip_observation."
        )
    if goal not in config.inputs:
        raise SystemExit(f"inputs={config.inputs} must contain the desired goal, {goal!r}.")
    space = env.action_space
    is_box = isinstance(space, spaces.Box) and space.is_bounded() and len(space.shape) == 1
    is_discrete = isinstance(space, spaces.Discrete) and space.start == 0
    if not (is_discrete if discrete else is_box):
        raise SystemExit(f"Actions of {name} are {space}. dqn.py needs Discrete(n), the others a bounded, flat Box.")
    env.get_wrapper_attr("reset")(seed=config.seed)  # of the outermost wrapper: wrappers may add entries of info
    info = {"terminated": False} | env.get_wrapper_attr("step")(space.sample())[-1]
    numbers = {key for key in read & set(info) if not np.ndim(info[key]) and np.asarray(info[key]).dtype.kind in "biuf"}
    if missing := read - numbers:
        raise SystemExit(
            f"{sorted(missing)} must be numbers or bools in every info of {name}, which has {sorted(info)}: return "
            f'info["{min(missing)}"] in step, or set env.info_keys and env.success (terminated, if the episode ends at '
            "the goal)."
        )
    play_on_trial(config, env)
    return env


def play_on_trial(config: Settings, env: EnvBase) -> None:
    """Play, write, relabel and sample some steps, or exit if this fails: nothing is written to disk yet."""
    chunk, whole = config.collector.steps_per_chunk, (env.spec.max_episode_steps or 1) * config.env.num_envs
    if config.buffer.prioritized == Priority.movement and chunk % whole:
        raise SystemExit(f"buffer.prioritized=movement: {CHUNK}={chunk} must be a multiple of whole episodes, {whole}.")
    if env.spec.max_episode_steps is None and not env.rollout(ENDLESS)["next", "done"].any():
        raise SystemExit(f"Episodes do not end in {ENDLESS:,} steps: set +env.kwargs.max_episode_steps=...")
    writing = config.hindsight.enabled and config.hindsight.when == When.writing  # stores whole episodes
    longest = config.checkpoint.interval if writing else (100 + config.buffer.n_steps) * config.env.num_envs
    steps = min(config.collector.random_steps + chunk, longest) // config.env.num_envs
    data = env.rollout(steps, break_when_any_done=writing).reshape((1, -1) if config.buffer.n_steps > 1 else -1)
    if writing and not data["next", "done"].any():
        raise SystemExit(
            f"hindsight.when=writing: no episode ends in the first {steps} steps of an environment. Increase "
            "collector.random_steps and checkpoint.interval."
        )
    trial = replace(config, buffer=replace(config.buffer, size=steps + 1))  # the last episode may go on
    try:
        buffer = make_replay_buffer(trial, make_hindsight(trial), make_inputs(trial, env))
        buffer.extend(data)
        buffer.sample(config.batch_size)
    except Exception as error:
        traceback.print_exception(error)
        raise SystemExit(f"{config.env.name} cannot be trained on: {error!r}. {MEANINGS}") from error
