"""Read this to change how `show.py` renders a goal."""

from typing import Any

from torchrl.envs import EnvBase

from training.environments import make_env
from training.settings import Env

GOAL_COLOUR = (0.9, 0.1, 0.6, 0.45)  # red, green, blue and opacity
CAMERAS: dict[str, dict[str, Any]] = {  # by the prefix of the environment's name
    "Fetch": {"distance": 1.4, "elevation": -20.0, "lookat": [1.3, 0.75, 0.5]},
    "FetchSlide": {"distance": 1.9, "lookat": [1.45, 0.75, 0.4]},
    "PointMaze": {"elevation": -90.0},  # no wall hides the goal
}


def make_rendering_env(config: Env) -> EnvBase:
    """Make an environment that adds rendered frames to its observations, or exit if it cannot render."""
    try:
        env = make_env(config, from_pixels=True, pixels_only=False)
        env.reset()
    except Exception as error:  # each backend raises another one
        raise SystemExit(
            f"{config.name} cannot render: {error}. MuJoCo needs MUJOCO_GL=egl (libegl1 of Debian and Ubuntu) or "
            "MUJOCO_GL=osmesa (libosmesa6) to render without a display."
        ) from None
    return env


def mark_goal(env: EnvBase, radius: float | None) -> str:
    """Draw the goal as a bright sphere, move the camera close to it, and return a legend.

    Args:
        env: an environment that has rendered a frame. Only those of MuJoCo are changed.
        radius: the success radius, which becomes the radius of the sphere. With None, the radius does not change.
    """
    gym_env: Any = env.unwrapped
    model: Any = getattr(gym_env, "model", None)
    if not type(model).__module__.startswith("mujoco"):
        return ""
    camera = getattr(gym_env, "point_env", gym_env).mujoco_renderer.viewer.cam
    for start, settings in CAMERAS.items():
        for attribute, value in settings.items() if gym_env.spec.id.startswith(start) else ():
            setattr(camera, attribute, value)
    model.geom_rgba[model.body_mocapid[model.geom_bodyid] >= 0, 3] = 0  # the cross that moves Fetch's gripper
    goals = [site for site in range(model.nsite) if model.site(site).name.startswith("target")]
    for site in goals:
        model.site_size[site] = radius or model.site_size[site]
        model.site_rgba[site] = GOAL_COLOUR
    if not goals:
        return ""
    return "pink sphere: the desired goal" + (", as large as the success radius" if radius else "")
