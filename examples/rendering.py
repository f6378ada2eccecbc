"""Rendering with MuJoCo for `show.py`: checks that it is possible, and makes the goal visible."""

from __future__ import annotations

import os
import sys
from typing import Any

from torchrl.envs import EnvBase

GOAL_COLOUR = (0.9, 0.1, 0.6, 0.45)  # red, green, blue and opacity
CAMERAS: dict[str, dict[str, Any]] = {  # by the prefix of the environment's name
    "Fetch": {"distance": 1.4, "elevation": -20.0, "lookat": [1.3, 0.75, 0.5]},
    "FetchSlide": {"distance": 1.9, "lookat": [1.45, 0.75, 0.4]},
    "PointMaze": {"elevation": -90.0},  # no wall hides the goal
}


def is_mujoco(env: EnvBase) -> bool:
    """Whether MuJoCo simulates the environment."""
    return type(getattr(env.unwrapped, "model", None)).__module__.startswith("mujoco")


def check_display(env: EnvBase) -> None:
    """Refuse to render with MuJoCo if there is no display and no other backend is set."""
    display = sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if is_mujoco(env) and not display and os.environ.get("MUJOCO_GL") not in ("egl", "osmesa"):
        raise SystemExit("MuJoCo cannot render without a display: set MUJOCO_GL=egl, or MUJOCO_GL=osmesa.")


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
