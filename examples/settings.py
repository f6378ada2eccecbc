"""The settings of the training scripts: types, defaults and checks, and the settings of a resumed run."""

import contextlib
import importlib.util
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

Speedup = Enum("Speedup", "none record compile cudagraph")
Precision = Enum("Precision", "highest high medium")
Priority = Enum("Priority", "error movement")
LossFunction = Enum("LossFunction", "l1 l2 smooth_l1")
When = Enum("When", "sampling writing")
Strategy = Enum("Strategy", "future final episode random")
LoggerKind = Enum("LoggerKind", "csv tensorboard wandb")
Seed = Annotated[int, Field(ge=0, lt=2**32)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Names = Annotated[list[str], Field(min_length=1)]


@dataclass
class Env:
    name: str = "torchrl_her/PointReach-v0"  # a Gymnasium id, or module:id
    kwargs: dict[str, Any] = field(default_factory=dict)  # for gymnasium.make: +env.kwargs.max_episode_steps=100
    num_envs: PositiveInt = 1
    parallel: bool = False  # a process for each environment
    success: str = "is_success"  # the entry of info that is true at the goal, or terminated
    clip_observation: Positive | None = None  # bound of the absolute values of the entry `observation`
    achieved_goal_key: str = "achieved_goal"
    desired_goal_key: str = "desired_goal"
    goal_fn: str | None = None  # module:function, maps the entry under achieved_goal_key to a goal
    terminated_fn: str | None = None  # module:function of achieved and desired goals: whether the episode ends there
    info_keys: list[str] = field(default_factory=list)  # the entries of info that compute_reward reads


@dataclass
class Collection:
    steps_per_chunk: PositiveInt = 50  # steps that are collected before the updates for them
    random_steps: NonNegativeInt = 500  # first steps, with uniform actions and no updates


@dataclass
class Exploration:
    noise: NonNegative = 0.2  # standard deviation of Gaussian noise, in units of the action; DDPG and TD3
    random_actions: Share = 0.2  # share of uniformly random actions
    final: Share = 1.0  # share of both that is left after anneal_steps; until then, both fall linearly
    anneal_steps: PositiveInt = "${total_steps}"  # type: ignore[assignment]  # from the start; a resumed run keeps it


@dataclass
class Buffer:
    size: PositiveInt = 1_000_000
    n_steps: PositiveInt = 1
    # error: TD error of the last update; movement: length of the achieved goal's path (needs chunks of whole episodes)
    prioritized: Priority | None = None
    alpha: NonNegative = 0.3  # exponent of priorities: squared errors 0.3, absolute ones (SAC) 0.6, movement 1
    beta: NonNegative = 0.4  # exponent of importance weights; movement: 0
    far: Positive = 0.1  # the length of the path at which the priority reaches its maximum, in units of the goal


@dataclass
class Hindsight:
    enabled: bool = True
    when: When = When.sampling  # writing: stores k relabelled copies of each transition
    strategy: Strategy = Strategy.future
    her_ratio: Share = 0.8  # k / (k + 1) for the paper's k

    @property
    def copies(self) -> int:
        """The paper's k, or 0 if there is none for this ratio."""
        k = round(self.her_ratio / (1 - self.her_ratio)) if self.her_ratio < 1 else 0
        return k if abs(k / (k + 1) - self.her_ratio) <= 0.005 else 0


@dataclass
class Normalizing:
    enabled: bool = True
    clip: Positive = 5.0


@dataclass
class Evaluating:
    interval: PositiveInt = 500
    episodes: PositiveInt = 100
    num_envs: PositiveInt = 20
    parallel: bool = "${env.parallel}"  # type: ignore[assignment]


@dataclass
class Logging:
    interval: PositiveInt = 500
    kinds: list[LoggerKind] = field(default_factory=lambda: [LoggerKind.csv, LoggerKind.tensorboard])


@dataclass
class Saving:
    interval: PositiveInt = 5_000  # steps; running episodes are cut at a checkpoint
    keep: PositiveInt = 2


@dataclass
class Settings:
    """The settings of all scripts. Steps are environment steps, over all environments together."""

    algorithm: str = ""
    seed: Seed = 0
    total_steps: PositiveInt = 5_000
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    threads: PositiveInt = 1  # number of PyTorch's threads; one is fastest for small networks
    matmul_precision: Precision = Precision.highest  # medium: bfloat16 if supported, faster for large networks
    speedup: Speedup = Speedup.record  # record: see record.py; compile: for large networks; cudagraph: with device=cuda
    resume: str | None = None  # the folder of a run to continue
    gamma: Share = 0.95
    tau: PositiveShare = 0.05  # target += tau * (network - target); the paper's polyak coefficient is 1 - tau
    batch_size: PositiveInt = 256
    updates_per_step: Positive = 1.0
    learning_rate: Positive = 1e-3
    loss_function: LossFunction = LossFunction.l2  # of TD errors; smooth_l1 limits the gradients of those above 1
    hidden: list[PositiveInt] = field(default_factory=lambda: [128, 128])  # units of each hidden layer
    inputs: Names = field(default_factory=lambda: ["observation", "achieved_goal", "desired_goal"])  # of networks
    env: Env = field(default_factory=Env)
    collector: Collection = field(default_factory=Collection)
    exploration: Exploration = field(default_factory=Exploration)
    buffer: Buffer = field(default_factory=Buffer)
    hindsight: Hindsight = field(default_factory=Hindsight)
    normalization: Normalizing = field(default_factory=Normalizing)
    evaluation: Evaluating = field(default_factory=Evaluating)
    logger: Logging = field(default_factory=Logging)
    checkpoint: Saving = field(default_factory=Saving)
    hydra: Any = field(
        default_factory=lambda: {
            "run": {"dir": "outputs/${hydra.job.name}/${env.name}/${now:%Y-%m-%d_%H-%M-%S}"},
            "sweep": {"dir": "outputs/${hydra.job.name}/multirun/${now:%Y-%m-%d_%H-%M-%S}"},
            "output_subdir": None,  # the settings of the run are in config.yaml
            "job_logging": {"handlers": {"file": {"delay": True}}, "root": {"handlers": ["console"]}},  # no log file
        }
    )


CHUNK = "collector.steps_per_chunk"
MULTIPLES = {  # so that intervals end with a chunk, and a checkpoint has all metrics
    CHUNK: "env.num_envs", "total_steps": CHUNK, "collector.random_steps": CHUNK, "evaluation.interval": CHUNK,
    "logger.interval": CHUNK, "checkpoint.interval": "logger.interval",
}  # fmt: skip
# The settings that a resumed run can change.
CHANGEABLE = [
    "total_steps", "batch_size", "threads", "matmul_precision", "speedup", "exploration", "evaluation", "logger",
    "checkpoint", "resume",
]  # fmt: skip


def start(config: DictConfig) -> tuple[Any, Path]:
    """Return the settings and the folder of a run. A resumed run reads its settings from its folder."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    with contextlib.suppress(OSError):  # Hydra creates it even if the command is refused or resumes another folder
        for path in (folder, *folder.parents):
            if path == folder or Path.cwd() in path.parents:
                path.rmdir()
    if config.algorithm != (script := cast(type, OmegaConf.get_type(config))().algorithm):
        raise SystemExit(f"{script}.py cannot train with algorithm={config.algorithm}: use {config.algorithm}.py.")
    if config.resume is None:
        return check(config), folder
    saved = read_settings(Path(config.resume))
    if saved.algorithm != config.algorithm:
        raise SystemExit(f"The run in {config.resume} was started with {saved.algorithm}.py: use that script.")
    return check(change(saved, config, HydraConfig.get().overrides.task)), Path(config.resume)


def read_settings(folder: Path) -> DictConfig:
    """Return the saved settings of a run, without types."""
    path = folder / "config.yaml"
    saved: Any = OmegaConf.load(path) if path.exists() else {}
    if "algorithm" not in saved:
        raise SystemExit(f"There is no run in {folder}/: it has no config.yaml with the settings of a run.")
    return saved


def with_types(config: DictConfig, kind: type) -> Any:
    """Return settings with the types of a dataclass, or exit if it has no such settings."""
    try:
        return OmegaConf.merge(OmegaConf.structured(kind(hydra=None)), OmegaConf.to_container(config))
    except OmegaConfBaseException as error:
        raise SystemExit(f"{error.full_key}: {error.msg}") from None


def change(saved: DictConfig, config: DictConfig, overrides: list[str]) -> DictConfig:
    """Return the saved settings with the changes of a resumed run, or exit if one of them is not allowed."""
    kind = cast(type, OmegaConf.get_type(config))
    kept, changed, defaults = with_types(saved, kind), saved.copy(), OmegaConf.structured(kind)
    keys = [override.partition("=")[0].lstrip("+~") for override in overrides]
    # A task sets several settings, so those that cannot change are compared.
    tasks = [str(key) for key in config if "task" in keys and key not in CHANGEABLE and config[key] != defaults[key]]
    for key in [*tasks, *keys]:
        value = OmegaConf.select(config, key)
        if key in CHANGEABLE and isinstance(value, DictConfig):
            raise SystemExit(
                f"To change {key} of a resumed run, set {', '.join(f'{key}.{name}' for name in map(str, value))}."
            )
        if key.partition(".")[0] in CHANGEABLE:
            OmegaConf.update(changed, key, value)
        elif value != (before := OmegaConf.select(kept, key)):
            raise SystemExit(f"A resumed run keeps {key}={before}. It can change {', '.join(CHANGEABLE[:-1])}.")
    return with_types(changed, kind)


def check(config: DictConfig) -> Any:
    """Return the settings as a dataclass, or exit if they cannot work."""
    kind = cast(type, OmegaConf.get_type(config))
    values = OmegaConf.to_container(with_types(config, kind), resolve=True)
    try:
        settings: Any = TypeAdapter(kind).validate_python(values)
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
    if n_steps > 1 and settings.env.info_keys:
        raise SystemExit(f"buffer.n_steps={n_steps} needs rewards that depend only on goals: set env.info_keys=[].")
    if n_steps > 1 and (chunk := settings.collector.steps_per_chunk) <= (least := n_steps * settings.env.num_envs):
        raise SystemExit(f"{CHUNK}={chunk} must be more than buffer.n_steps * env.num_envs = {least}.")
    if (size := settings.buffer.size) < (least := max(settings.collector.steps_per_chunk, settings.batch_size)):
        raise SystemExit(f"buffer.size={size} must be at least {least}, the size of a chunk or of a batch.")
    if LoggerKind.wandb in settings.logger.kinds and importlib.util.find_spec("wandb") is None:
        raise SystemExit("logger.kinds contains wandb, which is not installed: pip install wandb")
    if settings.device != "cpu" and int(settings.device[5:] or 0) >= (count := torch.cuda.device_count()):
        raise SystemExit(f"device={settings.device}: PyTorch finds {count} CUDA devices. Use device=cpu in a new run.")
    if settings.speedup == Speedup.cudagraph and settings.device == "cpu":
        raise SystemExit("speedup=cudagraph needs device=cuda, not cpu.")
    if settings.hindsight.when == When.writing and settings.hindsight.enabled:
        if n_steps > 1 or settings.buffer.prioritized == Priority.movement:
            raise SystemExit("buffer.n_steps and buffer.prioritized=movement need hindsight.when=sampling.")
        if not settings.hindsight.copies:
            raise SystemExit("hindsight.when=writing stores k copies: hindsight.her_ratio must be k / (k + 1).")
    return settings
