"""Read this if a command is refused, and to see which settings a resumed run can change. It imports nothing slow."""

import contextlib
import difflib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from yaml import YAMLError

from training.settings import ALGORITHMS, CHUNK, LoggerKind, Settings, Speedup

CONFIG = str(Path(__file__).parents[1] / "config")
SELECTED = "goals.selection=lowest_density,uniform"
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

# Command


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


def run_command(script: str, check: Callable[[DictConfig], Any] | None = None) -> NoReturn:
    """Train with the ``train`` of a script, which is imported only if the settings are accepted, and exit.

    A sweep continues after a run that is refused. Its exit status is then 1.

    Args:
        script: the name of the script.
        check: returns the settings of a run, or exits with a message. Default: `read_command`.
    """
    refused = []

    def run(config: DictConfig) -> None:
        folder = Path(HydraConfig.get().runtime.output_dir)
        with contextlib.suppress(OSError):  # Hydra creates it even if the command is refused or resumes another folder
            for path in (folder, *folder.parents):
                if path == folder or Path.cwd() in path.parents:
                    path.rmdir()
        try:
            settings = (check or read_command)(config)
            importlib.import_module(script).train(settings, Path(getattr(settings, "resume", None) or folder))
        except SystemExit as error:
            if HydraConfig.get().mode != RunMode.MULTIRUN:
                raise
            refused.append(str(HydraConfig.get().job.num))
            print(f"Run {refused[-1]} of the sweep is refused: {error}", file=sys.stderr)

    hydra.main(version_base="1.3", config_path=CONFIG, config_name=script)(run)()
    sys.exit(f"Refused runs of the sweep: {', '.join(refused)}." if refused else 0)


def read_command(config: DictConfig) -> Any:
    """Return the settings of a run. A resumed run reads its settings from its folder."""
    keys = [override.partition("=")[0].lstrip("+~") for override in HydraConfig.get().overrides.task]
    if config.algorithm != (script := kind_of(config).algorithm):
        raise SystemExit(f"{script}.py cannot train with algorithm={config.algorithm}: use {config.algorithm}.py.")
    refuse_unknown(kind_of(config), keys)
    if config.resume is not None:
        config = change(read_settings(Path(config.resume), kind_of(config)), config, keys)
    refuse_without_effect(config, keys)
    return check(config)


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
        if saved.algorithm not in ALGORITHMS:
            raise SystemExit(f"The run in {folder}/ is not one of {', '.join(f'{name}.py' for name in ALGORITHMS)}.")
        kind = kind or ALGORITHMS[saved.algorithm]
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


def suggest(key: str, known: Iterable[str]) -> str:
    """Return a question for the known settings with the same last part, or else with a similar name."""
    last = key.rpartition(".")[2]
    same = sorted({name for name in known if name.rpartition(".")[2] == last})
    closest = same or difflib.get_close_matches(key, set(known), n=1)
    return f" Did you mean {' or '.join(closest)}?" if closest else ""


def refuse_unknown(kind: type[Settings], keys: list[str]) -> None:
    """Exit if a command adds a setting that does not exist, as in ``+hiden=[64]``."""
    known = list(names_of(cast(dict, OmegaConf.to_container(OmegaConf.structured(kind)))))
    for key in keys:
        if key not in known and not key.startswith(("env.kwargs.", "hydra.", "hindsight.strategy.", "task")):
            raise SystemExit(f"There is no setting {key}.{suggest(key, known)}")


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
        refused = [
            f"{'.'.join(map(str, each['loc']))}={each['input']}: {each['msg'].removeprefix('Value error, ')}."
            for each in error.errors()
        ]
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
    return settings
