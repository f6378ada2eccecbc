"""The demo, and the scripts that show results: tables with the right numbers, and pictures that open."""

import sys

import compare
import demo
import imageio.v3 as iio
import numpy as np
import pytest
from matplotlib import pyplot as plt
from omegaconf import OmegaConf
from script_runs import BITS, SMALL, logged, train
from training import plots


def is_picture(path):
    return plt.imread(path).std() > 0.01


def test_the_demo_trains_with_and_without_hindsight(tmp_path, monkeypatch, capsys):
    short = {"total_steps": 1000, "collector": {"random_steps": 900}, "hidden": [8], "batch_size": 64}
    monkeypatch.setattr(demo, "SETTINGS", demo.SETTINGS | short | {"evaluation": {"interval": 500, "episodes": 4}})
    monkeypatch.setattr(sys, "argv", ["demo.py", "--output", str(tmp_path)])
    drawn, draw = [], demo.draw_relabelled
    monkeypatch.setattr(demo, "draw_relabelled", lambda episodes, path: drawn.append(episodes) or draw(episodes, path))
    demo.main()
    (folder,), (episodes,), printed = tmp_path.iterdir(), drawn, capsys.readouterr().out
    for group in ("with", "without"):
        success = logged(folder / f"{group}-hindsight-1", "evaluation/success")
        assert [step for step, _ in success] == [0, 500, 1000]
        assert f"| {group} hindsight | 1 | {success[-1][1]:.2f} |" in printed
    for episode in episodes:
        goals = {tuple(goal) for goal in episode["relabelled_goals"].tolist()}
        assert goals
        assert goals <= {tuple(place) for place in episode["path"].tolist()}
    assert all(is_picture(folder / f"{name}.png") for name in ("success", "hindsight"))


def test_the_table_and_the_picture_of_a_run_have_the_outcomes_of_its_policy(run_script, tmp_path, monkeypatch):
    train("ddpg hidden=[16,8] evaluation.episodes=3", tmp_path)
    printed = run_script("show", tmp_path, "--step", 100, "--evaluate", 3, "--episodes", 1, "--render")
    for name in ("success", "return", "distance"):
        mean = dict(map(tuple, logged(tmp_path, f"evaluation/{name}")))[100]
        assert any(line.split()[:2] == [name, f"{mean:.3f}"] for line in printed.splitlines())
    assert is_picture(tmp_path / "episodes.png")
    other = run_script("show", tmp_path, "--step", 100, "--evaluate", 3, "--episodes", 2, "--seed", 7, "--video")
    assert printed.splitlines()[1:4] != other.splitlines()[1:4]
    assert iio.imread(tmp_path / "episodes.gif").std((0, 3)).max() > 0  # something moves
    drawn, draw = [], plots.draw_episodes
    monkeypatch.setattr(plots, "draw_episodes", lambda episodes, *more: drawn.append(episodes) or draw(episodes, *more))
    printed = run_script("show", tmp_path, "--step", 200, 100, "--evaluate", 2, "--episodes", 1)
    assert [line for line in printed.splitlines() if "greedy" in line] == [
        f"2 greedy episodes of torchrl_her/PointReach-v0 after {step} steps, seed 1000000" for step in (200, 100)
    ]
    (episodes,) = drawn
    assert [episode["title"] for episode in episodes] == ["200 steps: failure", "100 steps: failure"]
    assert (episodes[0]["desired_goal"] == episodes[1]["desired_goal"]).all()
    assert (episodes[0]["achieved_goal"] != episodes[1]["achieved_goal"]).any()
    with pytest.raises(SystemExit, match=r"no checkpoint of step 150 in .*, only of 100, 200"):
        run_script("show", tmp_path, "--step", 150)


def test_the_picture_of_goals_shows_what_a_run_selected(run_script, tmp_path, monkeypatch):
    selecting = "goals.selection=uniform goals.start=50 goals.share=1"
    train(f"td3 {selecting} seed=3 buffer.size=200 collector.random_steps=150", tmp_path)
    drawn, draw = [], plots.draw_goals
    monkeypatch.setattr(plots, "draw_goals", lambda panels, *more: drawn.append(panels) or draw(panels, *more))
    run_script("show", tmp_path, "--goals", 100, 200)
    (panels,) = drawn
    assert list(panels) == ["0 to 100 steps", "100 to 200 steps"]
    achieved = {tuple(goal) for goals in panels.values() for goal in goals["achieved goals"].tolist()}
    selected = {tuple(goal) for goal in panels["100 to 200 steps"]["selected goals"].tolist()}
    assert selected
    assert selected <= achieved
    assert is_picture(tmp_path / "goals.png")
    with pytest.raises(SystemExit, match="--goals needs steps up to 200"):
        run_script("show", tmp_path, "--goals", 300)


def test_an_environment_that_cannot_render_is_refused_with_the_remedy(run_script, tmp_path):
    train("dqn total_steps=100", tmp_path)
    with pytest.raises(SystemExit, match=r"BitFlipping-v0 cannot render: .* MuJoCo needs MUJOCO_GL=egl"):
        run_script("show", tmp_path, "--evaluate", 2, "--video")


def test_runs_that_hydra_makes_are_compared(run_script, tmp_path):
    sweep = ["seed=1,2", "hindsight.strategy=future,final", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    run_script("dqn", "--multirun", *SMALL, *BITS, "total_steps=100", *sweep)
    (tmp_path / "sweep" / "stopped").mkdir()
    OmegaConf.save({"algorithm": "dqn"}, tmp_path / "sweep" / "stopped" / "config.yaml")
    compared = run_script("compare", "sweep", "--by", "hindsight.strategy")
    assert "Left out, without CSV logs of training and evaluation: sweep/stopped\n" in compared
    assert "At 100 environment steps" in compared
    runs = compare.find_runs([tmp_path])
    for strategy in ("final", "future"):
        values = [run.logs["success"][-1, 1] for run in runs if run.config.hindsight.strategy == strategy]
        assert f"| hindsight.strategy={strategy} | 2 | {sum(values) / 2:.2f} (" in compared
    assert is_picture(tmp_path / "sweep" / "comparison.png")
    with pytest.raises(SystemExit, match=r"No run has a setting 'hindsight\.stragety'"):
        run_script("compare", "sweep", "--by", "hindsight.stragety")
    with pytest.raises(SystemExit, match=r"No run has a setting 'her_ratio'. Did you mean hindsight\.her_ratio\?"):
        run_script("compare", "sweep", "--by", "her_ratio")


def test_the_table_has_medians_and_the_range_of_success_at_a_step_and_the_curves_common_steps():
    logs = [np.array([[0, 0.1], [step, value], [200, 1.0]]) for step, value in ((100, 0.25), (100, 0.5), (150, 1.0))]
    runs = [compare.Run(None, dict.fromkeys(compare.METRICS, log)) for log in logs]
    row = compare.table({"group": runs}, 150).splitlines()[-1]
    assert row == "| group | 3 | 0.50 (0.25 to 1.00) | 0.5 | 0.500 | 0 |"
    assert "| group | 1 | 0.25 | 0.2 |" in compare.table({"group": runs[:1]}, 149)
    steps, success = compare.curves(runs)
    assert (steps.tolist(), success.tolist()) == ([0, 200], [[0.1, 1.0]] * 3)
