"""A training script resumes from its checkpoints as if it had never stopped, in its own folder."""

import os
import shutil
import subprocess
import sys

import pytest
import show
from omegaconf import OmegaConf
from script_runs import BITS, EXAMPLES, SMALL, differences, logged, state_of, train

from support.data_sets import bytes_of

RUNS = [
    "dqn env.num_envs=5 buffer.prioritized=error buffer.n_steps=3 double=true",
    "dqn env.num_envs=5 buffer.prioritized=error hindsight.when=writing",
    "ddpg buffer.prioritized=movement ++env.kwargs.max_episode_steps=25 average=0.9 exploration.final=0",
    "td3 updates_per_step=0.02 logger.interval=50",  # updates at 100, 150 and 200, the second without the actor
    "sac loss=tqc env.num_envs=5 layer_norm=true buffer.n_steps=3 hindsight.strategy=future+past_desired",
    "td3 goals.selection=lowest_density goals.share=1 goals.start=30 exploration.at_goal=0.5",
    pytest.param("sac env.num_envs=2 env.parallel=true env.clip_observation=200", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("command", RUNS)
def test_a_resumed_run_is_bit_for_bit_the_run_that_never_stopped(command, tmp_path):
    whole = train(command, tmp_path / "whole")
    expected = state_of(whole)  # before another run draws
    checkpoint = "checkpoints/checkpoint-000000000100"
    shutil.copytree(tmp_path / "whole" / checkpoint, tmp_path / "resumed" / checkpoint)
    resumed = train(f"{command} resume={tmp_path / 'resumed'}", tmp_path / "resumed")
    assert differences(expected, state_of(resumed)) == []
    assert whole.components["buffer"].sample(100)["hindsight", "relabelled"].float().mean() > 0.5
    if "logger.interval=50" in command:
        for name, steps in (("loss_qvalue", [100, 150, 200]), ("loss_actor", [100, 200])):
            assert [step for step, _ in resumed.components["log"][f"train/{name}"]] == steps


@pytest.mark.parametrize("script", ["dqn", "ddpg action_penalty=1", "td3", "sac"])
def test_the_curve_goes_on_where_it_stopped(script, tmp_path):
    command = f"{script} speedup=none logger.kinds=[csv,tensorboard] loss_function=l1"
    before = train(f"{command} total_steps=150", tmp_path).components["log"]
    resumed = train(f"{command} resume={tmp_path}", tmp_path, picture=True).components
    history, loss = resumed["log"], resumed["loss"]
    assert loss.loss_function == "l1"
    for name, steps in (("evaluation/success", [0, 100, 150, 200]), ("train/seconds", [100, 150, 200])):
        assert [step for step, _ in history[name]] == steps
    for name, values in history.items():
        assert values[: len(before[name])] == before[name]
        assert logged(tmp_path, name) == values
    assert {"dqn": "train/loss", "sac": "train/entropy"}.get(script, "train/q_value") in history
    assert list((tmp_path / "logs" / "tensorboard").glob("events*"))
    assert (tmp_path / "training.png").stat().st_size > 10_000


def test_the_command_line_trains_resumes_and_shows(run_script, tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, EXAMPLES / "dqn.py", *SMALL, *BITS, "total_steps=100", f"hydra.run.dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert "100 steps: success" in done.stdout.splitlines()[-1], done.stderr
    assert "transitions     100," in (folder / "report.txt").read_text()
    assert "200 steps" in run_script("dqn", f"resume={folder}", "total_steps=200", "hydra.run.dir=other")
    assert "200 steps" in run_script("dqn", *SMALL, *BITS, f"resume={folder}")
    for script, given, message in (
        ("td3", f"resume={folder}", "was started with dqn.py"),
        ("dqn", f"resume={folder} learning_rate=0.5", r"keeps learning_rate=0\.001\. It can change total_steps"),
        ("dqn", f"resume={folder} total_steps=100", "already has 200 steps: set a larger total_steps"),
        ("dqn", "resume=nowhere", r"There is no run of dqn\.py, .* in nowhere/"),
        ("sac", "algorithm=td3", "sac.py cannot train with algorithm=td3"),
        ("sac", "+hiden=[64,64]", "hiden=.*: Unexpected keyword argument"),
        ("sac", "+buffer.siz=600", "buffer.siz=600: Unexpected keyword argument"),
        ("sac", "hindsight.strategy=futur", "hindsight.strategy=futur: Unknown strategy 'futur': use one of current"),
    ):
        with pytest.raises(SystemExit, match=message):
            run_script(script, *given.split())
    # Commands that are refused or that resume a run leave no other folder. New settings are kept.
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    kept = OmegaConf.load(folder / "config.yaml")
    assert (kept.total_steps, kept.batch_size, kept.env.kwargs.n_bits, kept.resume) == (200, 32, 5, None)
    shown = run_script("show", folder, "--evaluate", 2)
    assert "2 greedy episodes of torchrl_her/BitFlipping-v0 after 200 steps" in shown


@pytest.mark.parametrize("script", ["dqn", "ddpg", "td3", "sac", "offline"])
def test_settings_are_refused_before_the_slow_imports(script, tmp_path):
    for module in ("torch", "gymnasium", "mujoco", "matplotlib"):
        (tmp_path / f"{module}.py").write_text(f"raise AssertionError('imports {module}')")
    command = [sys.executable, EXAMPLES / f"{script}.py", "batch_size=-1"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300, check=False
    )
    assert (done.returncode, done.stderr.partition("=-1")[0]) == (1, "batch_size"), done.stderr
    assert not (tmp_path / "outputs").exists()


def test_a_sweep_says_which_run_is_refused_and_continues(run_script, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "gettrace", lambda: None)  # Hydra raises errors in a debugger, and takes coverage for one
    sweep = ["total_steps=100", "batch_size=32,200,16", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    with pytest.raises(SystemExit, match="1"):
        run_script("dqn", "--multirun", *SMALL, *BITS, *sweep)
    assert sorted(path.parent.name for path in (tmp_path / "sweep").rglob("config.yaml")) == ["0", "2"]
    assert "Run 1 of the sweep is refused: buffer.size=150 must be at least 200" in capsys.readouterr().err


def test_a_damaged_or_interrupted_run_goes_on_from_the_previous_checkpoint_and_logs_no_step_twice(tmp_path):
    def refuse(command, message):
        before = bytes_of(tmp_path)
        with pytest.raises((SystemExit, OSError, ModuleNotFoundError), match=message):
            train(command, tmp_path)
        assert bytes_of(tmp_path) == before

    config = train("dqn", tmp_path).config
    newest = tmp_path / "checkpoints" / "checkpoint-000000000200"
    refuse("dqn seed=1", r"is not empty: continue a run in it .*, delete it, or name another folder")
    damages = {"manifest.json": os.unlink, "components/0000-buffer/transform.t": lambda path: os.truncate(path, 3)}
    for name, damage in damages.items():
        shutil.rmtree(newest.with_name(f"damaged-{newest.name}"), ignore_errors=True)
        damage(newest / name)
        with pytest.raises(SystemExit, match=rf"0200 is damaged \({name}\): name other ones with --step"):
            show.load_policy(config, newest)
        message = f"200 is damaged: {name} missing or of another size. The run continues from checkpoint-000000000100"
        with pytest.warns(UserWarning, match=message):
            train(f"dqn resume={tmp_path}", tmp_path)
    newest.rename(newest.with_name(f".{newest.name}.stage-0"))  # as if killed while it was being written
    history = train(f"dqn resume={tmp_path}", tmp_path).components["log"]
    assert logged(tmp_path, "train/loss") == history["train/loss"]
    assert [step for step, _ in history["train/loss"]] == [100, 200]
    names = [path.name.replace("-000000000", " ") for path in (tmp_path / "checkpoints").iterdir()]
    assert sorted(names) == ["checkpoint 100", "checkpoint 200", "damaged-checkpoint 200"]
    for checkpoint in (tmp_path / "checkpoints").glob("checkpoint-*"):
        os.truncate(checkpoint / "sizes.json", 0)
    refuse(f"dqn resume={tmp_path}", r"checkpoint-0*200 is damaged \(sizes.json\)\. checkpoint-0*100")
