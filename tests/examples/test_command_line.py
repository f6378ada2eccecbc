"""The scripts on the command line: they train, resume with new settings, refuse others, and show what was trained."""

import subprocess
import sys
from dataclasses import replace

import pytest
from omegaconf import OmegaConf
from script_runs import BITS, EXAMPLES, SMALL, compose_settings, configure
from settings import change, check


def test_the_command_line_trains_resumes_and_shows(run_script, tmp_path):
    folder = tmp_path / "run"
    overrides = [*SMALL, *BITS, "total_steps=100"]
    command = [sys.executable, EXAMPLES / "dqn.py", *overrides, f"hydra.run.dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert not done.returncode, done.stderr
    assert "100 steps: success" in done.stdout.splitlines()[-1]
    # The other settings are those of the run.
    assert "200 steps" in run_script("dqn", f"resume={folder}", "total_steps=200", "hydra.run.dir=other")
    # The first command can be repeated.
    assert "200 steps" in run_script("dqn", *SMALL, *BITS, f"resume={folder}")
    for script, given, message in (
        ("td3", [], "was started with dqn.py"),
        ("dqn", ["total_steps=500", "learning_rate=0.5"], r"keeps learning_rate=0\.001\. It can change total_steps"),
    ):
        with pytest.raises(SystemExit, match=message):
            run_script(script, f"resume={folder}", *given)
    # Commands that are refused or that resume a run leave no other folder.
    assert not list(tmp_path.rglob("*-*-*_*-*-*"))
    assert not (folder / ".hydra").exists()
    # New settings are kept, too.
    kept = OmegaConf.load(folder / "config.yaml")
    assert (kept.total_steps, kept.batch_size, kept.env.kwargs.n_bits, kept.resume) == (200, 32, 5, None)
    OmegaConf.save(OmegaConf.merge(kept, {"device": "cuda"}), folder / "config.yaml")  # it is shown on any machine
    shown = run_script("show", folder, "--episodes", 2, "--render")
    assert "checkpoint-000000000200: 2 greedy episodes" in shown
    assert "renders nothing: the picture shows goals" in shown
    assert "success" in shown
    assert (folder / "episodes.png").stat().st_size > 5_000


def test_a_resumed_run_takes_the_given_settings_and_no_others():
    started = ["+task=bit_flipping_50", "seed=3"]
    settings = configure("dqn", *started, "batch_size=512", "exploration.random_actions=0.5")
    saved = OmegaConf.create(
        OmegaConf.to_yaml(OmegaConf.structured(replace(settings, hydra=None)))
    )  # a file has no types

    def resumed(*overrides):
        return check(change(saved, compose_settings("dqn", *overrides), list(overrides)))

    run = resumed(*started, "total_steps=600_000", "evaluation.episodes=7", "resume=folder")
    assert (run.total_steps, run.evaluation.episodes, run.resume) == (600_000, 7, "folder")
    assert (run.batch_size, run.exploration.random_actions, run.evaluation.interval) == (512, 0.5, 50_000)
    assert resumed("exploration.random_actions=0.1", "resume=folder").exploration.random_actions == 0.1
    for overrides, message in (
        (started[:1], r"keeps seed=3\. It can change total_steps, "),
        (["gamma=0.5"], r"keeps gamma=0\.98"),
        (["env.num_envs=4"], r"keeps env\.num_envs=16"),
        (["+env.kwargs.n_bits=4"], r"keeps env\.kwargs\.n_bits=50"),
    ):
        with pytest.raises(SystemExit, match=message):
            resumed(*overrides)
