"""Read this to look up a setting of `offline.py`."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from pydantic import ConfigDict, PositiveInt

from training.settings import Precision, hydra_settings

OmegaConf.register_new_resolver("name", lambda member: member.name, replace=True)
Algorithm = Enum("Algorithm", "gcbc gciql hiql crl")


@dataclass
class GCIQL:
    expectile: float = 0.9
    alpha: float = 0.003  # weight of behavioural cloning in the loss of the actor


@dataclass
class HIQL:
    expectile: float = 0.7
    alpha: float = 3.0  # inverse temperature of both policies: 0 is behavioural cloning
    subgoal_steps: int = 25
    representation: int = 10  # features of a subgoal


@dataclass
class CRL:
    alpha: float = 0.03  # weight of behavioural cloning in the loss of the actor


@dataclass
class Evaluating:
    interval: PositiveInt = 10_000  # updates
    episodes: PositiveInt = 20  # of each of the five tasks


@dataclass
class Config:
    __pydantic_config__ = ConfigDict(extra="forbid")

    algorithm: Algorithm = Algorithm.gciql
    seed: int = 0
    env: str = "pointmaze-medium-v0"  # another one with states may need other data, alphas and gamma
    data: str = "outputs/data/${env}.npz"  # written by: python examples/pointmaze_data.py ENV
    # OGBench makes a million updates, with batches of 1,024 and hidden layers of 512 units. One core makes 4 (HIQL) to
    # 60 (GCBC) of them per second. With these settings, 100,000 updates take an hour at most.
    updates: PositiveInt = 100_000
    batch_size: PositiveInt = 256
    hidden: list[int] = field(default_factory=lambda: [256, 256, 256])  # units of each hidden layer
    learning_rate: float = 3e-4
    gamma: float = 0.99  # also for the geometric goals
    tau: float = 0.005  # step of the target networks' soft update
    gciql: GCIQL = field(default_factory=GCIQL)
    hiql: HIQL = field(default_factory=HIQL)
    crl: CRL = field(default_factory=CRL)
    evaluation: Evaluating = field(default_factory=Evaluating)
    matmul_precision: Precision = Precision.medium  # may multiply matrices in bfloat16
    record: bool = True  # whether to replay the tensor operations of an update, see training/record.py
    hydra: Any = field(default_factory=lambda: hydra_settings("offline", "${name:${algorithm}}/${file_name:${env}}"))

    def __post_init__(self) -> None:
        if not Path(self.data).is_file():
            raise ValueError(
                f"There is no file {self.data}: python examples/pointmaze_data.py writes data of PointMaze"
            )


ConfigStore.instance().store("offline", Config)
