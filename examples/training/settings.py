"""Read this to look up a setting of the training scripts: names, types, ranges and defaults."""

from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Annotated, Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from pydantic import AfterValidator, ConfigDict, Field, NonNegativeInt, PositiveInt

OmegaConf.register_new_resolver("file_name", lambda text: text.replace(":", "-").replace("/", "-"), replace=True)

STRATEGIES = "current", "future", "final", "episode", "random", "past_desired"
CHUNK = "collector.steps_per_chunk"
MULTIPLES = {  # so that intervals end with a chunk, and a checkpoint has all metrics
    CHUNK: "env.num_envs", "total_steps": CHUNK, "collector.random_steps": CHUNK, "evaluation.interval": CHUNK,
    "logger.interval": CHUNK, "checkpoint.interval": "logger.interval",
}  # fmt: skip
SUCCESS = "is_success"
Speedup = Enum("Speedup", "none record compile cudagraph")
Precision = Enum("Precision", "highest high medium")
Priority = Enum("Priority", "error movement")
LossFunction = Enum("LossFunction", "l1 l2 smooth_l1")
When = Enum("When", "sampling writing")
Selection = Enum("Selection", "lowest_density uniform")
LoggerKind = Enum("LoggerKind", "csv tensorboard wandb")
Loss = Enum("Loss", "sac tqc")
Seed = Annotated[int, Field(ge=0, lt=2**32)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Names = Annotated[list[str], Field(min_length=1)]


def check_strategy(strategy: str) -> str:
    """Return the names of strategies, or raise a ValueError."""
    for name in strategy.split("+"):
        if name not in STRATEGIES:
            raise ValueError(f"Unknown strategy {name!r}: use one of {', '.join(STRATEGIES)}, or several, joined by +")
    return strategy


Strategy = Annotated[str, AfterValidator(check_strategy)]


def hydra_settings(script: str, folder: str) -> dict[str, Any]:
    """Return Hydra's settings: a run is in ``outputs/script/folder/time``, and a sweep in ``script/multirun/time``."""
    now = "${now:%Y-%m-%d_%H-%M-%S}"
    return {
        "job": {"name": script},
        "run": {"dir": f"outputs/{script}/{folder}/{now}"},
        "sweep": {"dir": f"outputs/{script}/multirun/{now}"},
        "output_subdir": None,  # the settings of the run are in config.yaml
        "job_logging": {"handlers": {"file": {"delay": True}}, "root": {"handlers": ["console"]}},  # no log file
    }


@dataclass
class Env:
    name: str = "torchrl_her/PointReach-v0"  # a Gymnasium id, or module:id
    kwargs: dict[str, Any] = field(default_factory=dict)  # for gymnasium.make: +env.kwargs.max_episode_steps=100
    num_envs: PositiveInt = 1
    parallel: bool = False  # a process for each environment
    # The entry of info that is true at the goal, or terminated; null: is_success, success, or what a sparse reward says
    success: str | None = None
    clip_observation: Positive | None = None  # bound of the absolute values of the entry `observation`
    achieved_goal: str = "achieved_goal"
    desired_goal: str = "desired_goal"
    goal_fn: str | None = None  # module:function, maps the entry achieved_goal to a goal
    terminated_fn: str | None = None  # module:function of achieved and desired goals: whether the episode ends there
    info_keys: list[str] = field(default_factory=list)  # the entries of info that compute_reward reads


@dataclass
class Collection:
    steps_per_chunk: PositiveInt = 50  # steps that are collected before the updates for them
    random_steps: NonNegativeInt = 500  # first steps, with uniform actions and no updates


@dataclass
class Exploration:
    # Standard deviation of Gaussian noise, in units of the action (DDPG and TD3); null: 0.4 / sqrt(components)
    noise: NonNegative | None = 0.2
    random_actions: Share | None = 0.2  # share of uniformly random actions; null: 2 / components, at most 0.3
    repeat: PositiveInt = 1  # more: each component of an action is random on its own, for 1 to this number of steps
    at_goal: Share = 0.1  # added to this share for each step of the episode at a selected goal (goals.selection)
    final: Share = 1.0  # share of both that is left after anneal_steps; until then, both fall linearly
    anneal_steps: PositiveInt = "${total_steps}"  # type: ignore[assignment]  # from the start; a resumed run keeps it


@dataclass
class Buffer:
    size: PositiveInt = 1_000_000
    n_steps: PositiveInt = 1
    # error: TD error of the last update; movement: length of the achieved goal's path, in the episode's part of a chunk
    prioritized: Priority | None = None
    # Exponent of priorities; null: squared errors 0.3, absolute ones (SAC) 0.6, movement 1
    alpha: NonNegative | None = None
    beta: NonNegative | None = None  # exponent of importance weights; null: errors 0.4, movement 0
    # movement: module:function, maps the entry achieved_goal to the point whose path counts (default: env.goal_fn)
    moved: str | None = None
    # movement: the length of the path with the highest priority; null: a third of the range of the environment's goals
    far: Positive | None = None


@dataclass
class Hindsight:
    enabled: bool = True
    when: When = When.sampling  # writing: stores k relabelled copies of each transition
    strategy: Strategy = "future"  # one of STRATEGIES, or several with equal shares: future+past_desired
    her_ratio: Share = 0.8  # k / (k + 1) for the paper's k


@dataclass
class Goals:
    selection: Selection | None = None  # which achieved goals training episodes pursue: see GoalSelection
    share: Share = 0.5  # of the episodes with a selected goal
    start: PositiveInt = 500  # achieved goals before the first selection
    candidates: PositiveInt = 500  # achieved goals from which one is selected
    fitted: Annotated[int, Field(ge=1, le=10_000)] = 10_000  # achieved goals of the density estimate
    bounded: bool = False  # leaves out goals outside the bounding box around goals and starts of the environment


@dataclass
class Normalizing:
    enabled: bool = True
    clip: Positive = 5.0


@dataclass
class Evaluating:
    interval: PositiveInt = 2_500
    episodes: PositiveInt = 10  # show.py plays 100
    num_envs: PositiveInt = 20  # at most; the episodes are the same for each number
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

    __pydantic_config__ = ConfigDict(extra="forbid")

    algorithm: str = ""
    seed: Seed = 0
    total_steps: PositiveInt = 5_000
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    threads: PositiveInt = 1  # number of PyTorch's threads; one is fastest for small networks
    matmul_precision: Precision = Precision.highest  # medium: bfloat16 if supported, faster for large networks
    speedup: Speedup = Speedup.record  # see record.py; compile: for large networks; cudagraph: on a GPU
    resume: str | None = None  # the folder of a run to continue
    gamma: Share | None = None  # null: 1 - 2.5 / steps of an episode, at least 0.9
    tau: PositiveShare = 0.05  # target += tau * (network - target); the paper's polyak coefficient is 1 - tau
    batch_size: PositiveInt = 256
    updates_per_step: Positive = 1.0
    learning_rate: Positive = 1e-3
    loss_function: LossFunction = LossFunction.l2  # of TD errors; smooth_l1 limits the gradients of those above 1
    hidden: list[PositiveInt] = field(default_factory=lambda: [128, 128])  # units of each hidden layer
    layer_norm: bool = False  # LayerNorm after each hidden layer of actor and critic
    inputs: Names = field(default_factory=lambda: ["observation", "achieved_goal", "desired_goal"])  # of networks
    env: Env = field(default_factory=Env)
    collector: Collection = field(default_factory=Collection)
    exploration: Exploration = field(default_factory=Exploration)
    buffer: Buffer = field(default_factory=Buffer)
    hindsight: Hindsight = field(default_factory=Hindsight)
    goals: Goals = field(default_factory=Goals)
    normalization: Normalizing = field(default_factory=Normalizing)
    evaluation: Evaluating = field(default_factory=Evaluating)
    logger: Logging = field(default_factory=Logging)
    checkpoint: Saving = field(default_factory=Saving)
    hydra: Any = field(default_factory=lambda: hydra_settings("${algorithm}", "${file_name:${env.name}}"))

    def __post_init__(self) -> None:
        """Refuse settings that do not work together. Only a ValueError is reported without a traceback."""
        if self.algorithm != type(self).algorithm:
            raise ValueError(f"{type(self).algorithm}.py cannot train with algorithm={self.algorithm}")
        for name, unit in MULTIPLES.items():
            if (value := attrgetter(name)(self)) % (of := attrgetter(unit)(self)):
                raise ValueError(f"{name}={value} must be a multiple of {unit}={of}")
        if (random_steps := self.collector.random_steps) >= self.total_steps:
            raise ValueError(f"collector.random_steps={random_steps} must be less than total_steps={self.total_steps}")
        if self.buffer.size < (least := max(self.collector.steps_per_chunk, self.batch_size)):
            raise ValueError(f"buffer.size={self.buffer.size} must be at least {least}, the size of a chunk or batch")
        least = (self.buffer.n_steps + 2) * self.env.num_envs
        needs_table = self.goals.selection or self.buffer.prioritized == Priority.movement
        if self.hindsight.when == When.writing and needs_table:
            raise ValueError("hindsight.when=writing needs goals.selection=null and buffer.prioritized=null or error")
        if self.buffer.n_steps > 1 and self.collector.steps_per_chunk < least:
            raise ValueError(f"{CHUNK} must be at least (buffer.n_steps + 2) * env.num_envs = {least}")


# Algorithms


@dataclass
class DQN(Settings):
    algorithm: str = "dqn"
    double: bool = False
    gamma: Share = 0.98
    batch_size: PositiveInt = 128
    hidden: list[PositiveInt] = field(default_factory=lambda: [256])
    inputs: Names = field(default_factory=lambda: ["observation", "desired_goal"])  # observation = achieved goal
    env: Env = field(default_factory=lambda: Env(name="torchrl_her/BitFlipping-v0"))  # 30 bits: +env.kwargs.n_bits=30
    collector: Collection = field(default_factory=lambda: Collection(steps_per_chunk=25, random_steps=0))
    normalization: Normalizing = field(default_factory=lambda: Normalizing(enabled=False))


@dataclass
class DDPG(Settings):
    """One setting for every task with continuous actions."""

    algorithm: str = "ddpg"
    total_steps: PositiveInt = 10_000
    gamma: Decay | None = None
    matmul_precision: Precision = Precision.medium
    batch_size: PositiveInt = 512
    updates_per_step: Positive = 0.25
    hidden: list[PositiveInt] = field(default_factory=lambda: [256, 256, 256])
    layer_norm: bool = True  # values of goals that are rarely achieved stay in range
    # The lowest and the highest reward, to which targets are clipped; null: those of a sparse reward, and 0
    reward_range: tuple[float, float] | None = None
    reward_scale: Positive | None = None  # null: the range of returns becomes 20, if reward_range is not null
    action_penalty: NonNegative = 1.0  # weight of the mean square of the actor's actions in its loss
    average: Decay = 0.995  # of the moving average of the actor's weights, which is evaluated; 0: the actor itself
    env: Env = field(default_factory=lambda: Env(num_envs=5))
    collector: Collection = field(default_factory=lambda: Collection(steps_per_chunk=250, random_steps=1_000))
    # With random actions that last, objects are lifted more often. In the end, they disturb grasping and holding.
    exploration: Exploration = field(default_factory=lambda: Exploration(None, None, repeat=8, final=0.25))
    # At first, an object lies still in most episodes, so episodes with movement are sampled more often.
    buffer: Buffer = field(default_factory=lambda: Buffer(prioritized=Priority.movement))
    # Values of far goals are learned before they are achieved.
    hindsight: Hindsight = field(default_factory=lambda: Hindsight(strategy="future+past_desired"))
    # The rarest goals are the ones to learn next; the rarest of all are objects that fell off the table.
    goals: Goals = field(
        default_factory=lambda: Goals(Selection.lowest_density, share=0.8, candidates=2_000, fitted=1_000, bounded=True)
    )


@dataclass
class TD3(Settings):
    algorithm: str = "td3"
    loss_function: LossFunction = LossFunction.smooth_l1
    target_noise: NonNegative = 0.2  # smooths the target policy
    target_noise_clip: NonNegative = 0.5
    actor_interval: PositiveInt = 2  # updates of the critics per update of the actor


@dataclass
class SAC(Settings):
    algorithm: str = "sac"
    loss: Loss = Loss.sac
    loss_function: LossFunction = LossFunction.smooth_l1  # TQC has its own
    num_critics: PositiveInt = 2
    alpha_init: Positive = 0.1  # initial weight of the entropy, which is then learned
    quantiles: PositiveInt = 25  # of each critic (TQC)
    dropped_quantiles: NonNegativeInt = 2  # per critic; the highest quantiles of all critics together are dropped (TQC)
    exploration: Exploration = field(default_factory=lambda: Exploration(random_actions=0.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dropped_quantiles >= self.quantiles:
            raise ValueError(f"dropped_quantiles must be less than quantiles={self.quantiles}")


ALGORITHMS: dict[str, type[Settings]] = {"dqn": DQN, "ddpg": DDPG, "td3": TD3, "sac": SAC}
for name, kind in ALGORITHMS.items():
    ConfigStore.instance().store(name, kind)
