"""The scripts on the command line: they train, resume with new settings, refuse others, and show what was trained."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from omegaconf import OmegaConf
from script_runs import BITS, EXAMPLES, SMALL, compose_settings, configure
from start import change, check


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
    for given, message in (
        (["algorithm=ddpg"], r"dqn\.py cannot train with algorithm=ddpg: use ddpg\.py"),
        (["resume=nowhere"], "There is no run in nowhere/"),
    ):
        with pytest.raises(SystemExit, match=message):
            run_script("dqn", *given)
    # Commands that are refused or that resume a run leave no other folder.
    assert not (tmp_path / "outputs").exists()
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


@pytest.mark.parametrize("script", ["dqn", "gciql"])
def test_a_folder_that_cannot_be_created_is_named_with_the_setting_to_change(script, run_script, tmp_path):
    (tmp_path / "file").touch()
    for setting, *mode in (["hydra.run.dir"], ["hydra.sweep.dir", "--multirun"]):
        with pytest.raises(SystemExit, match=rf"^The folder file/run cannot be created: .*\. Set .*{setting}="):
            run_script(script, *mode, f"{setting}=file/run")


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
    assert resumed(started[0], "resume=folder").seed == 3  # the task sets no seed
    for overrides, message in (
        (["seed=4"], r"keeps seed=3\. It can change total_steps, "),
        (["+task=bit_flipping_50", "env.num_envs=4"], r"keeps env\.num_envs=16"),
        (["exploration={final:0.5}"], r"To change exploration of a resumed run, set exploration\.noise, "),
        (["~logger"], "logger: "),
        (["+evaluation.episode=3"], r"evaluation\.episode: Key 'episode' not in 'Evaluating'"),
        (["gamma=0.5"], r"keeps gamma=0\.98"),
        (["env.num_envs=4"], r"keeps env\.num_envs=16"),
        (["+env.kwargs.n_bits=4"], r"keeps env\.kwargs\.n_bits=50"),
        (["hindsight.strategy=final"], r"keeps hindsight\.strategy=future\. "),
    ):
        with pytest.raises(SystemExit, match=message):
            resumed(*overrides)


def test_several_runs_have_a_folder_of_their_own(tmp_path):
    command = [sys.executable, EXAMPLES / "dqn.py", "--multirun", *SMALL, *BITS, "total_steps=100", "seed=0,1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert not done.returncode, done.stderr
    assert done.stdout.count("100 steps: success") == 2
    (sweep,) = (tmp_path / "outputs" / "dqn" / "multirun").iterdir()
    assert sorted(path.name for path in sweep.iterdir()) == ["0", "1", "multirun.yaml"]


NOISY = """
import logging

import gymnasium
from torchrl_her.envs import PointReach


def make():
    logging.getLogger(__name__).warning("made")
    return PointReach()


gymnasium.register("Noisy-v0", make, max_episode_steps=15)
"""


def test_an_environment_may_log_messages(tmp_path):
    (tmp_path / "noisy.py").write_text(NOISY)
    run = [sys.executable, EXAMPLES / "ddpg.py", *SMALL[:1], *SMALL[2:], "env.name=noisy:Noisy-v0", "total_steps=100"]

    def call(*overrides):
        environment = os.environ | {"PYTHONPATH": "."}
        command = [*run, "hydra.run.dir=run", *overrides]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300, check=False
        )

    done = call()
    assert not done.returncode, done.stderr
    assert "[WARNING] - made" in done.stdout + done.stderr
    assert not list(tmp_path.rglob("*.log"))
    refused = call("env.goal_fn=noisy:no_such", "hydra.run.dir=other")
    assert "noisy:Noisy-v0 cannot be trained on: AttributeError(\"module 'noisy' has no attr" in refused.stderr
    assert "FileNotFoundError" not in refused.stderr  # of a log file
    assert not (tmp_path / "other").exists()
