"""Read this if MuJoCo cannot render, or to change how `show.py` renders a goal."""

# ruff: noqa: E402 (the first import finds out whether MuJoCo can render)

from __future__ import annotations

import os
import sys
from typing import Any

BACKEND = os.environ.get("MUJOCO_GL")
GL = "Without a display, set MUJOCO_GL=egl (needs libegl1 of Debian and Ubuntu) or MUJOCO_GL=osmesa (libosmesa6)."
try:
    import mujoco  # noqa: F401 (before TorchRL, which imports it, too)
except ModuleNotFoundError:
    pass
except (ImportError, AttributeError):
    raise SystemExit(f"A library that MuJoCo needs for MUJOCO_GL={BACKEND} is missing. {GL}") from None

from torchrl.envs import EnvBase

from training.environments import make_env
from training.settings import Env

GOAL_COLOUR = (0.9, 0.1, 0.6, 0.45)  # red, green, blue and opacity
CAMERAS: dict[str, dict[str, Any]] = {  # by the prefix of the environment's name
    "Fetch": {"distance": 1.4, "elevation": -20.0, "lookat": [1.3, 0.75, 0.5]},
    "FetchSlide": {"distance": 1.9, "lookat": [1.45, 0.75, 0.4]},
    "PointMaze": {"elevation": -90.0},  # no wall hides the goal
}


def is_mujoco(env: EnvBase) -> bool:
    """Whether MuJoCo simulates the environment."""
    return type(getattr(env.unwrapped, "model", None)).__module__.startswith("mujoco")


def make_rendering_env(config: Env, env: EnvBase) -> EnvBase:
    """Replace an environment with one that adds rendered frames to its observations, or exit if it cannot render."""
    display = sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if is_mujoco(env) and not display and BACKEND not in ("egl", "osmesa"):
        raise SystemExit(f"MuJoCo has no display to render {config.name}. {GL}")
    env.close()
    try:
        env = make_env(config, from_pixels=True, pixels_only=False)
        env.reset()
    except Exception as error:  # each backend raises another one
        raise SystemExit(f"{config.name} cannot render with MUJOCO_GL={BACKEND}: {error}. {GL}") from None
    return env


def mark_goal(env: EnvBase, radius: float | None) -> str:
    """Draw the goal as a bright sphere, move the camera close to it, and return a legend.

    Args:
        env: a MuJoCo environment that has rendered a frame.
        radius: the success radius, which becomes the radius of the sphere. With None, the radius does not change.
    """
    gym_env = env.unwrapped
    model, name = gym_env.model, gym_env.spec.id
    camera = getattr(gym_env, "point_env", gym_env).mujoco_renderer.viewer.cam
    for start, settings in CAMERAS.items():
        for attribute, value in settings.items() if name.startswith(start) else ():
            setattr(camera, attribute, value)
    model.geom_rgba[model.body_mocapid[model.geom_bodyid] >= 0, 3] = 0  # the cross that moves Fetch's gripper
    goals = [site for site in range(model.nsite) if model.site(site).name.startswith("target")]
    for site in goals:
        model.site_size[site] = radius or model.site_size[site]
        model.site_rgba[site] = GOAL_COLOUR
    if not goals:
        return ""
    return "pink sphere: the desired goal" + (", as large as the success radius" if radius else "")
