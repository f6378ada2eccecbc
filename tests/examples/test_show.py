"""`show.py` plays the policy that was trained, and draws its episodes with one scale."""

import importlib.util

import ddpg
import matplotlib.pyplot as plt
import numpy as np
import pytest
import rendering
import show
import torch
from episode_plots import draw_episodes, draw_frames
from mpl_toolkits.mplot3d import Axes3D
from omegaconf import OmegaConf
from script_runs import logged, train
from settings import Env

MUJOCO = pytest.mark.skipif(not importlib.util.find_spec("gymnasium_robotics"), reason="needs Gymnasium-Robotics")


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with checkpoints of 100 and 200 steps."""
    folder = tmp_path_factory.mktemp("run")
    train("ddpg hidden=[16,8] evaluation.episodes=3", folder)
    return folder


def test_the_table_has_the_outcomes_of_the_trained_policy(folder, run_script):
    for step in (100, 200):
        printed = run_script("show", folder, "--step", step, "--episodes", 1)
        assert f"checkpoint-{step:012}: 3 greedy episodes of torchrl_her/PointReach-v0" in printed
        for name in ("success", "return", "distance"):
            mean = dict(map(tuple, logged(folder, f"evaluation/{name}")))[step]
            assert any(line.split()[:2] == [name, f"{mean:.3f}"] for line in printed.splitlines())
    with pytest.raises(SystemExit, match=r"no checkpoint of step 150 in .*, only of 100, 200"):
        run_script("show", folder, "--step", 150)


def test_the_episodes_in_the_picture_are_the_first_of_the_table(folder):
    config = show.load_settings(folder)
    policy = show.load_policy(config, show.find_checkpoint(folder, None))
    evaluation = show.Evaluation(config)
    distances = evaluation(policy)["distance"]
    evaluation.close()
    env, seed = show.make_env(config.env), show.EVALUATION_SEED
    for distance in distances:
        episode, seed = show.play(env, policy, seed, config.env)
        assert len(episode["achieved_goal"]) == 16  # the start, and one for each step
        last = np.linalg.norm(episode["achieved_goal"][-1] - episode["desired_goal"])
        assert last == pytest.approx(float(distance), abs=1e-6)


def test_frames_are_those_of_the_environment(folder, run_script):
    printed = run_script("show", folder, "--episodes", 1, "--render")
    assert (folder / "episodes.png").stat().st_size > 5_000
    assert "renders nothing" not in printed
    config = show.load_settings(folder)
    env = show.make_env(config.env, **show.PIXELS)
    episode, _ = show.play(env, show.load_policy(config, show.find_checkpoint(folder, 200)), 0, config.env)
    assert episode["frame_steps"].tolist() == [0, 3, 6, 9, 12, 15]
    env.set_seed(0)
    torch.testing.assert_close(torch.tensor(episode["frames"][0]), env.reset()["pixels"])
    assert [panel.get_title() for panel in draw_frames([episode]).axes] == [f"step {step}" for step in range(0, 16, 3)]


@MUJOCO
def test_without_a_display_mujoco_is_refused_before_anything_is_loaded_or_played(tmp_path, run_script, monkeypatch):
    config = ddpg.Config(env=Env(name="FetchReach-v4"), hydra=None)
    OmegaConf.save(OmegaConf.structured(config), tmp_path / "config.yaml")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    checkpoint = tmp_path / "checkpoint-1"  # it has no policy to load
    monkeypatch.setattr("torchrl.checkpoint.CheckpointRotation.checkpoints", lambda self: [checkpoint])
    with pytest.raises(SystemExit, match="MuJoCo cannot render without a display: set MUJOCO_GL=egl"):
        run_script("show", tmp_path, "--render")
    env = show.make_env(Env(name="FetchReach-v4"))
    for name, value in (("MUJOCO_GL", "egl"), ("MUJOCO_GL", "osmesa"), ("DISPLAY", ":0")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            rendering.check_display(env)
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    with pytest.raises(SystemExit):
        rendering.check_display(env)
    rendering.check_display(show.make_env(Env()))  # PointReach draws without a display


@pytest.mark.parametrize(
    ("name", "radius"),
    [
        ("torchrl_her/PointReach-v0", 0.05),
        ("torchrl_her/BitFlipping-v0", None),
        pytest.param("FetchPush-v4", 0.05, marks=MUJOCO),
        pytest.param("PointMaze_UMaze-v3", 0.45, marks=MUJOCO),
    ],
)
def test_the_success_radius_is_that_of_the_environment(name, radius):
    assert show.success_radius(show.make_env(Env(name=name))) == radius


@MUJOCO
def test_another_success_radius_is_taken_from_the_environment():
    env = show.make_env(Env(name="FetchReach-v4"))
    env.base_env.unwrapped.distance_threshold = 0.2
    assert show.success_radius(env) == 0.2


def episodes_of(dimensions, lengths=(4, 9)):
    generator = np.random.default_rng(0)
    return [
        {
            "achieved_goal": 10 * number + generator.normal(size=(length, dimensions)),
            "desired_goal": 10 * number + generator.normal(size=dimensions),
            "success": bool(number),
        }
        for number, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("dimensions", [2, 3])
def test_positions_are_drawn_with_one_scale_and_the_radius_around_the_goal(dimensions, monkeypatch):
    spheres = []

    def record(panel, *surface, **style):
        spheres.append(np.reshape(surface, (3, -1)).T)

    monkeypatch.setattr(Axes3D, "plot_surface", record)
    episodes = episodes_of(dimensions)
    figure = draw_episodes(episodes, radius=0.5, unit="m")
    assert {panel.name for panel in figure.axes} == {"3d" if dimensions == 3 else "rectilinear"}
    axes = "xyz"[:dimensions]
    limits = [[getattr(panel, f"get_{axis}lim")() for axis in axes] for panel in figure.axes]
    np.testing.assert_allclose(limits[0], limits[1])
    np.testing.assert_allclose(np.ptp(limits[0], axis=1), np.ptp(limits[0][0]))  # the same on all axes
    for number, (panel, episode) in enumerate(zip(figure.axes, episodes, strict=True)):
        for axis, (low, high), values in zip(axes, limits[0], episode["achieved_goal"].T, strict=True):
            assert (low < values).all()
            assert (values < high).all()
            assert getattr(panel, f"get_{axis}label")() in (f"{axis} [m]", "" if number else None)
        around = panel.patches[0].get_xy() if dimensions == 2 else spheres[number]
        distances = np.linalg.norm(around - episode["desired_goal"], axis=1)
        np.testing.assert_allclose(distances, 0.5)
    titles = [panel.get_title() for panel in figure.axes]
    assert titles == ["episode 1: failure", "episode 2: success"]
    assert len(figure.legends) == 1


def test_without_a_success_radius_none_is_drawn():
    assert all(not panel.patches for panel in draw_episodes(episodes_of(2)).axes)


def test_bits_are_rows_below_the_goal_with_one_scale():
    goal = np.array([1, 0, 1, 1])
    paths = [np.array([[0, 0, 1, 1], [1, 0, 1, 1]]), np.array([[0, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]])]
    episodes = [{"achieved_goal": path, "desired_goal": goal, "success": False} for path in paths]
    figure = draw_episodes(episodes, radius=None)
    assert {panel.get_xlim() for panel in figure.axes} == {(-0.5, 3.5)}
    assert {panel.get_ylim() for panel in figure.axes} == {(2.5, -2.5)}  # downwards, as far as the longest
    for panel, path in zip(figure.axes, paths, strict=True):
        rows = panel.images[0].get_array()
        assert rows[0].tolist() == goal.tolist()
        assert rows[2:].tolist() == path.tolist()
        wrong = panel.lines[-1].get_xydata().astype(int)  # bit, step
        assert {(step, bit) for bit, step in wrong.tolist()} == set(zip(*np.nonzero(path != goal), strict=True))
