"""The scripts on the command line: they train, resume with new settings, refuse others, and show what was trained."""

import subprocess
import sys

import pytest
from omegaconf import OmegaConf
from script_runs import BITS, EXAMPLES, SMALL, configure
from settings import give_anew


def test_the_command_line_trains_resumes_and_shows(run_script, tmp_path):
    folder = tmp_path / "run"
    began = [*SMALL, *BITS, "total_steps=100"]
    command = [sys.executable, EXAMPLES / "dqn.py", *began, f"hydra.run.dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert not done.returncode, done.stderr
    assert "100 steps: success" in done.stdout.splitlines()[-1]
    # The other settings are those of the run.
    assert "200 steps" in run_script("dqn", f"resume={folder}", "total_steps=200", "hydra.run.dir=other")
    # The command that it began with may be repeated.
    assert "200 steps" in run_script("dqn", *SMALL, *BITS, f"resume={folder}")
    for script, given, message in (
        ("td3", [], "is one of dqn.py"),
        ("dqn", ["total_steps=500", "learning_rate=0.5"], "keeps its learning_rate: 0.001, not 0.5. It may be"),
    ):
        with pytest.raises(SystemExit, match=message):
            run_script(script, f"resume={folder}", *given)
    # New settings are kept, too.
    kept = OmegaConf.load(folder / "config.yaml")
    assert (kept.total_steps, kept.batch_size, kept.env.kwargs.n_bits, kept.resume) == (200, 32, 5, None)
    OmegaConf.save(OmegaConf.merge(kept, {"device": "cuda"}), folder / "config.yaml")  # it is shown on any machine
    shown = run_script("show", folder, "--episodes", 2, "--render")
    assert "checkpoint-000000000200: 2 greedy episodes" in shown
    assert "renders nothing: the picture shows goals" in shown
    assert "success" in shown
    assert (folder / "episodes.png").stat().st_size > 5_000


def test_a_resumed_run_takes_the_given_settings_and_no_more():
    def given(*overrides):
        return configure("dqn", *overrides), list(overrides)

    began = ["+task=bit_flipping_50", "seed=3"]
    run, _ = given(*began, "batch_size=512", "exploration.random_actions=0.5")
    give_anew(run, *given(*began, "total_steps=600_000", "evaluation.episodes=7", "resume=folder"))
    assert (run.total_steps, run.evaluation.episodes, run.resume) == (600_000, 7, "folder")
    assert (run.batch_size, run.exploration.random_actions, run.evaluation.interval) == (512, 0.5, 50_000)
    for overrides, message in (
        (began[:1], "keeps its seed: 3, not 0. It may be given resume, total_steps, "),
        (["gamma=0.5"], "keeps its gamma: 0.98, not 0.5"),
        (["env.num_envs=4"], "keeps its env.num_envs: 16, not 4"),
    ):
        with pytest.raises(SystemExit, match=message):
            give_anew(run, *given(*overrides))
