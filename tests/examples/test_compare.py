"""Runs are grouped, tabulated and compared at the steps where all of them were evaluated."""

import compare
import numpy as np
import pytest
from omegaconf import OmegaConf
from script_runs import BITS, SMALL, compose_settings


def test_runs_that_hydra_makes_are_compared(run_script, tmp_path):
    sweep = ["seed=1,2", "hindsight.strategy=future,final", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    run_script("dqn", "--multirun", *SMALL, *BITS, "total_steps=100", *sweep)
    by_strategy = ["--by", "hindsight.strategy", "--panels", "env.name", "--title", "Strategies"]
    compared = run_script("compare", "sweep", *by_strategy)
    success = {"final": {}, "future": {}}
    for run in compare.find_runs([tmp_path]):
        success[run.config.hindsight.strategy][run.config.seed] = float(run.logs["success"][-1, 1])
    for strategy, of_seed in success.items():
        assert of_seed.keys() == {1, 2}
        median = sum(of_seed.values()) / 2
        assert f"| hindsight.strategy={strategy}, env.name=torchrl_her/BitFlipping-v0 | 2 | {median:.2f} (" in compared
    assert "At 100 environment steps" in compared
    assert (tmp_path / "sweep" / "comparison.png").stat().st_size > 5_000


def test_the_table_has_medians_and_the_range_of_success_at_a_step():
    runs = [
        compare.Run(None, {name: np.array([[0, 0.1], [100, value], [200, 1.0]]) for name in compare.METRICS})
        for value in (0.25, 0.5, 1.0)
    ]
    header, _, row = compare.table({"group": runs}, 150).splitlines()
    assert header == "| | runs | success: median (range) | return | final distance | training, s |"
    assert row == "| group | 3 | 0.50 (0.25 to 1.00) | 0.5 | 0.500 | 0 |"
    assert "| group | 3 | 1.00 (1.00 to 1.00) | 1.0 | 1.000 | 1 |" in compare.table({"group": runs}, 200)
    assert "| group | 1 | 0.25 | 0.2 |" in compare.table({"group": runs[:1]}, 150)
    steps, success = compare.curves(runs)
    assert steps.tolist() == [0, 100, 200]
    assert success.tolist() == [[0.1, 0.25, 1.0], [0.1, 0.5, 1.0], [0.1, 1.0, 1.0]]


def test_runs_that_were_evaluated_at_other_steps_are_compared_where_they_agree():
    logs = [np.array([[0, 0.0], [50, 0.2], [100, 0.4]]), np.array([[0, 0.1], [100, 0.5], [150, 0.6]])]
    runs = [compare.Run(None, dict.fromkeys(compare.METRICS, log)) for log in logs]
    steps, success = compare.curves(runs)
    assert steps.tolist() == [0, 100]
    assert success.tolist() == [[0.0, 0.4], [0.1, 0.5]]
    assert np.isnan(compare.Run(None, {"seconds": np.array([[500, 3.0]])}).at("seconds", 100))


def test_a_setting_that_no_run_has_is_refused():
    saved = [OmegaConf.to_yaml(compose_settings(script)) for script in ("sac", "ddpg")]
    runs = [compare.Run(OmegaConf.create(settings), {}) for settings in saved]
    compare.check_entries(runs, ["resume", "loss"])
    groups = [run.group(["loss", "hindsight.strategy"]) for run in runs]
    assert groups == ["loss=sac, hindsight.strategy=future", "loss=None, hindsight.strategy=future"]
    with pytest.raises(SystemExit, match=r"No run has a setting 'hindsight\.stragety'"):
        compare.check_entries(runs, ["hindsight.stragety"])


def test_without_runs_a_comparison_says_so(run_script, tmp_path):
    with pytest.raises(SystemExit, match="There is no run with CSV logs below"):
        run_script("compare", tmp_path)


@pytest.fixture
def two_runs(tmp_path):
    """Folders of a run of 100 steps, and of a run that stopped before its first log."""
    for name in ("whole", "stopped"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        OmegaConf.save({"algorithm": "dqn"}, tmp_path / "runs" / name / "config.yaml")
    for path in compare.paths(tmp_path / "runs" / "whole").values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("0,0.0\n100,0.5\n")
    return tmp_path / "runs"


def test_runs_without_logs_are_named(run_script, two_runs):
    shown = run_script("compare", two_runs)
    assert f"Left out, without CSV logs of training and evaluation: {two_runs / 'stopped'}\n" in shown
    assert "| algorithm=dqn | 1 | 0.50 |" in shown
    with pytest.raises(SystemExit, match=r"no run with CSV logs below .*missing"):
        run_script("compare", two_runs, two_runs / "missing")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "101"], "--step=101 must be from 0 to 100, the last step that all runs reached"),
        (["--step", "-5"], "--step=-5 must be from 0 to 100"),
        (["--picture", "outputs/"], "--picture=outputs must be a file with an ending"),
    ],
)
def test_a_step_or_picture_that_cannot_be_is_refused(arguments, message, run_script, two_runs, capsys):
    with pytest.raises(SystemExit):
        run_script("compare", two_runs, *arguments)
    assert message in capsys.readouterr().err
