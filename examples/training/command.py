"""Read this if a command is refused, and to see which settings a resumed run can change.

Hydra and pydantic check the settings before anything slow is imported. Here is what they cannot do: resume a run.
"""

import contextlib
import importlib
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from pydantic import TypeAdapter, ValidationError

from training.settings import ALGORITHMS, DDPG

CONFIG = str(Path(__file__).parents[1] / "config")
# The settings that a resumed run can change. The others would change its results up to the checkpoint.
CHANGEABLE = [
    "total_steps", "batch_size", "threads", "matmul_precision", "speedup", "exploration", "evaluation", "logger",
    "checkpoint", "resume",
]  # fmt: skip


def run_command(script: str) -> None:
    """Train with the ``train`` of a script, which is imported only if the settings are accepted."""

    def run(config: DictConfig) -> None:
        folder = Path(HydraConfig.get().runtime.output_dir)
        with contextlib.suppress(OSError):  # Hydra creates it even if the command is refused or resumes another folder
            for path in (folder, *folder.parents):
                if path == folder or Path.cwd() in path.parents:
                    path.rmdir()
        try:
            settings = check(resume(config) if config.get("resume") else config)
            importlib.import_module(script).train(settings, Path(getattr(settings, "resume", None) or folder))
        except SystemExit as error:
            if HydraConfig.get().mode == RunMode.MULTIRUN:  # Hydra continues the sweep, and raises the error at its end
                raise RuntimeError(f"Run {HydraConfig.get().job.num} of the sweep is refused: {error}") from None
            raise

    hydra.main(version_base="1.3", config_path=CONFIG, config_name=script)(run)()
    raise SystemExit


def check(config: DictConfig) -> Any:
    """Return the settings as a dataclass, or exit if they cannot work."""
    kind = cast(type, OmegaConf.get_type(config))
    try:
        return TypeAdapter(kind).validate_python(OmegaConf.to_container(config, resolve=True))
    except ValidationError as error:
        refused = []
        for each in error.errors():
            place = f"{'.'.join(map(str, each['loc']))}={each['input']}: " if each["loc"] else ""
            refused.append(f"{place}{each['msg'].removeprefix('Value error, ')}.")
        raise SystemExit("\n".join(refused)) from None


def plain_ddpg(**changes: Any) -> DDPG:
    """Return the settings of ``+task=plain_ddpg`` with changes."""
    plain = OmegaConf.load(f"{CONFIG}/task/plain_ddpg.yaml")
    return check(cast(DictConfig, OmegaConf.merge(OmegaConf.structured(DDPG(hydra=None)), plain, changes)))


def read_settings(folder: Path) -> DictConfig:
    """Return the settings of a run, with the types of its script."""
    path = folder / "config.yaml"
    saved: Any = OmegaConf.load(path) if path.exists() else {}
    kind = ALGORITHMS.get(saved.get("algorithm"))
    if kind is None:
        raise SystemExit(f"There is no run of {', '.join(f'{name}.py' for name in ALGORITHMS)} in {folder}/.")
    return cast(DictConfig, OmegaConf.merge(OmegaConf.structured(kind(hydra=None)), saved))


def resume(config: DictConfig) -> DictConfig:
    """Return the saved settings of a run with the changes of a command, or exit if one of them is not allowed."""
    saved = read_settings(Path(config.resume))
    if saved.algorithm != config.algorithm:
        raise SystemExit(f"The run in {config.resume} was started with {saved.algorithm}.py: use that script.")
    for override in HydraConfig.get().overrides.task:
        key = override.partition("=")[0].lstrip("+~")
        value, before = OmegaConf.select(config, key), OmegaConf.select(saved, key)
        if key.partition(".")[0] in CHANGEABLE:
            OmegaConf.update(saved, key, value)
        elif value != before:
            raise SystemExit(f"A resumed run keeps {key}={before}. It can change {', '.join(CHANGEABLE[:-1])}.")
    return saved
