"""Read this if a setting or an environment is refused, and to see which settings a resumed run can change."""

import contextlib
import difflib
import importlib
import importlib.util
import traceback
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from tensordict import TensorDict, TensorDictBase
from torchrl import torchrl_logger
from torchrl.envs import EnvBase
from yaml import YAMLError

from torchrl_her import Mixture
from training.environments import make_env, make_reward
from training.parts import make_buffer, make_hindsight, make_inputs, make_selection
from training.settings import LoggerKind, Priority, Settings, Speedup, When

SCRIPTS = "dqn", "ddpg", "td3", "sac"
ENDLESS = 10_000  # steps in which an episode without a time limit must end
CHUNK, SELECTED = "collector.steps_per_chunk", "goals.selection=lowest_density,uniform"
MEANINGS = (
    "Arguments such as goal_fn are settings: env.goal_fn=module:function, with the module on PYTHONPATH. HERKeys are "
    "env.achieved_goal and env.desired_goal, in_keys are inputs. HERTransform is hindsight.when=sampling, "
    "HindsightAugmentation is hindsight.when=writing, MultiStepTransform is buffer.n_steps."
)
MULTIPLES = {  # so that intervals end with a chunk, and a checkpoint has all metrics
    CHUNK: "env.num_envs", "total_steps": CHUNK, "collector.random_steps": CHUNK, "evaluation.interval": CHUNK,
    "logger.interval": CHUNK, "checkpoint.interval": "logger.interval",
}  # fmt: skip
NEEDS = {  # settings that have an effect only with these values of another setting
    "hindsight.strategy": "hindsight.enabled=True", "hindsight.her_ratio": "hindsight.enabled=True",
    "hindsight.when": "hindsight.enabled=True", "goals.share": SELECTED, "goals.start": SELECTED,
    "goals.within_desired": SELECTED, "goals.candidates": SELECTED, "goals.fitted": "goals.selection=lowest_density",
    "exploration.at_goal": SELECTED, "exploration.noise": "algorithm=ddpg,td3",
    "exploration.repeat": "algorithm=ddpg,td3,sac",  # continuous actions
    "buffer.alpha": "buffer.prioritized=error,movement", "buffer.beta": "buffer.prioritized=error,movement",
    "buffer.far": "buffer.prioritized=movement", "buffer.moved": "buffer.prioritized=movement",
    "normalization.clip": "normalization.enabled=True", "quantiles": "loss=tqc",
    "dropped_quantiles": "loss=tqc", "loss_function": "loss=sac",
}  # fmt: skip
# The settings that a resumed run can change.
CHANGEABLE = [
    "total_steps", "batch_size", "threads", "matmul_precision", "speedup", "exploration", "evaluation", "logger",
    "checkpoint", "resume",
]  # fmt: skip

# Settings


class FolderOfRun(Callback):
    """Creates the folder of a run or of a sweep, or exits with a message. Hydra would show a traceback."""

    def on_run_start(self, config: DictConfig, setting: str = "hydra.run.dir", **kwargs: Any) -> None:  # noqa: D102
        folder = OmegaConf.select(config, setting)
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"The folder {folder} cannot be created: {error.strerror}. Set another one: {setting}=..."
            raise SystemExit(message) from None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: D102
        self.on_run_start(config, "hydra.sweep.dir")


def start(config: DictConfig) -> tuple[Any, Path]:
    """Return the settings and the folder of a run. A resumed run reads its settings from its folder."""
    folder, overrides = Path(HydraConfig.get().runtime.output_dir), HydraConfig.get().overrides.task
    with contextlib.suppress(OSError):  # Hydra creates it even if the command is refused or resumes another folder
        for path in (folder, *folder.parents):
            if path == folder or Path.cwd() in path.parents:
                path.rmdir()
    keys = [override.partition("=")[0].lstrip("+~") for override in overrides]
    if config.algorithm != (script := kind_of(config).algorithm):
        raise SystemExit(f"{script}.py cannot train with algorithm={config.algorithm}: use {config.algorithm}.py.")
    refuse_unknown(kind_of(config), keys)
    if config.resume is None:
        refuse_without_effect(config, keys)
        return check(config), folder
    saved = read_settings(Path(config.resume), kind_of(config))
    changed = change(saved, config, keys)
    refuse_without_effect(changed, keys)
    return check(changed), Path(config.resume)


def kind_of(config: DictConfig) -> type[Settings]:
    """Return the dataclass of settings."""
    return cast(type, OmegaConf.get_type(config))


def name_of(value: Any) -> str:
    """Return a value as on the command line."""
    return str(getattr(value, "name", value))


def read_settings(folder: Path, kind: type[Settings] | None = None) -> DictConfig:
    """Return the settings of a run, with the types of its script."""
    path = folder / "config.yaml"
    try:
        saved: Any = OmegaConf.load(path) if path.exists() else {}
        if "algorithm" not in saved:
            raise SystemExit(f"There is no run in {folder}/: it has no config.yaml with the settings of a run.")
        if saved.algorithm not in SCRIPTS:
            raise SystemExit(f"The run in {folder}/ is not one of {', '.join(f'{name}.py' for name in SCRIPTS)}.")
        kind = kind or cast(type[Settings], importlib.import_module(saved.algorithm).Config)
        if saved.algorithm != kind.algorithm:
            raise SystemExit(f"The run in {folder} was started with {saved.algorithm}.py: use that script.")
        if missing := [field.name for field in fields(kind) if field.name not in saved]:
            raise ValueError(f"{len(missing)} settings are missing, such as {missing[0]}")
        return cast(DictConfig, OmegaConf.merge(OmegaConf.structured(kind(hydra=None)), saved))
    except (YAMLError, ValueError, OmegaConfBaseException) as error:
        cause = str(error).splitlines()[0]
        raise SystemExit(f"{path} is incomplete or damaged: {cause}. Repair it, or start a new run.") from None


def change(saved: DictConfig, config: DictConfig, keys: list[str]) -> DictConfig:
    """Return the saved settings with the changes of a resumed run, or exit if one of them is not allowed."""
    changed, defaults = saved.copy(), OmegaConf.structured(kind_of(config))
    if "task" in keys:  # it sets several settings: compare all that cannot change
        keys = keys + [str(key) for key in config if key not in CHANGEABLE and config[key] != defaults[key]]
    for key in keys:
        value = OmegaConf.select(config, key)
        if key in CHANGEABLE and isinstance(value, DictConfig):
            raise SystemExit(f"Change single settings of a resumed run, such as {key}.{next(iter(value))!s}=...")
        if key.partition(".")[0] in CHANGEABLE:
            OmegaConf.update(changed, key, value)
        elif value != (before := OmegaConf.select(saved, key)):
            raise SystemExit(
                f"A resumed run keeps {key}={name_of(before)}. It can change {', '.join(CHANGEABLE[:-1])}."
            )
    return changed


def names_of(settings: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the names of all settings, with those of groups."""
    for key, value in settings.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from names_of(value, f"{prefix}{key}.")


def refuse_unknown(kind: type[Settings], keys: list[str]) -> None:
    """Exit if a command adds a setting that does not exist, as in ``+hiden=[64]``."""
    known = list(names_of(cast(dict, OmegaConf.to_container(OmegaConf.structured(kind)))))
    for key in keys:
        if key not in known and not key.startswith(("env.kwargs.", "hydra.", "hindsight.strategy.", "task")):
            closest = difflib.get_close_matches(key, known, n=1)
            raise SystemExit(f"There is no setting {key}." + (f" Did you mean {closest[0]}?" if closest else ""))


def refuse_without_effect(config: DictConfig, keys: list[str]) -> None:
    """Exit if one of the settings of a command has no effect."""
    for key in set(keys) & set(NEEDS):
        other, _, values = NEEDS[key].partition("=")
        if other.partition(".")[0] not in config:  # a setting of other scripts
            continue
        if (value := name_of(OmegaConf.select(config, other))) not in values.split(","):
            raise SystemExit(
                f"{key} has no effect with {other}={value}: leave it out, or set {NEEDS[key].replace(',', ' or ')}."
            )


def check(config: DictConfig) -> Any:
    """Return the settings as a dataclass, or exit if they cannot work."""
    try:
        settings: Any = TypeAdapter(kind_of(config)).validate_python(OmegaConf.to_container(config, resolve=True))
    except ValidationError as error:
        refused = [f"{'.'.join(map(str, each['loc']))}={each['input']}: {each['msg']}." for each in error.errors()]
        raise SystemExit("\n".join(refused)) from None
    strategy = settings.hindsight.strategy
    try:
        Mixture(strategy if isinstance(strategy, dict) else {strategy: 1.0})
    except (TypeError, ValueError) as error:
        raise SystemExit(f"hindsight.strategy={strategy}: {error}") from None
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
    return settings


# Environment


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
    if missing := read - numbers:
        raise SystemExit(
            f"{sorted(missing)} must be numbers or bools in every info of {name}, which has {sorted(info)}: return "
            f'info["{min(missing)}"] in step, or set env.info_keys and env.success (terminated, if the episode ends at '
            "the goal)."
        )
    play_on_trial(config, env)
    set_seeds(config.seed)
    return env


def set_seeds(seed: int) -> None:
    """Seed the generators of torch and NumPy. Prioritized sampling draws from that of NumPy."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002


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
        check_rewards(config, data.reshape(-1))


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
