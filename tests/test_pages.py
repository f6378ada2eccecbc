"""README and documentation: examples run and print what they say, and links, pictures and notebooks are right."""

import contextlib
import importlib.util
import itertools
import re
import sys
from pathlib import Path

import pytest
import torch
from pytest_examples import find_examples
from torchrl.envs import GymEnv

from support.dispatch import NoWaits
from support.pages import DOCS, changed, python_blocks, run_block

TESTS = Path(__file__).parent
ROOT = TESTS.parent
README = (ROOT / "README.md").read_text()
SHORT, TRAIN, OWN = re.findall(r"```py\n(.*?)```", README, flags=re.DOTALL)

RUN = [example for example in find_examples(DOCS) if example.prefix == "python"]
PAGES = {path: list(examples) for path, examples in itertools.groupby(RUN, key=lambda example: example.path)}
COLUMNS = 88
TRAIN_LONG = {  # pages that train for more than 20 s, and changes with which they do not
    DOCS / "tutorials/your-own-environment.md": {"total_frames=3000": "total_frames=400", "range(50)]": "range(6)]"},
    DOCS / "tutorials/ten-minutes.md": {
        "total_frames=5000": "total_frames=550",
        "for _ in range(50)]": "for _ in range(8)]",
        "paths[:, step]), 50)": "paths[:, step]), 2)",
    },
    DOCS / "tutorials/offline.md": {
        "range(100)": "range(20)",
        "reshape(100, 50)": "reshape(20, 50)",
        "range(2000)": "range(10)",
        "episodes=50": "episodes=8",
        "range(0, 50, 2)": "range(2)",
    },
}


def module_of_docs(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def name_of(page):
    return str(page.relative_to(DOCS))


@pytest.mark.parametrize("page", TRAIN_LONG, ids=name_of)
def test_the_examples_of_a_page_run_with_a_short_training(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # tutorials write pictures
    source = "".join(example.source for example in PAGES[page])
    exec(changed(source, TRAIN_LONG[page]), {"__name__": "__main__"})


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow if page in TRAIN_LONG else ()) for page in PAGES], ids=name_of
)
def test_the_examples_of_a_page_print_what_it_says(page, eval_example, monkeypatch, recwarn, tmp_path):
    """The ``python`` blocks of a page share their names. ``pytest --update-examples`` formats and updates them."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # each block replaces it
    monkeypatch.chdir(tmp_path)
    eval_example.set_config(line_length=COLUMNS, target_version="py310")
    names = {}
    for example in PAGES[page]:
        update = eval_example.update_examples
        (eval_example.format_black if update else eval_example.lint_black)(example)
        run = eval_example.run_print_update if update else eval_example.run_print_check
        try:
            names |= run(example, module_globals=names)
        except Exception as error:  # pytest cannot show the traceback that pytest-examples makes
            pytest.fail(f"{example}: {error!r}")
    assert [warning.message for warning in recwarn if issubclass(warning.category, UserWarning)] == []


def test_the_short_example_of_the_readme_makes_a_buffer():
    names = {"env": GymEnv("torchrl_her.envs:torchrl_her/PointReach-v0")}
    exec("from torchrl.data import *; from torchrl_her import *", names)
    exec(SHORT, names)
    names["rb"].extend(names["env"].rollout(50))
    assert names["rb"].sample()["hindsight", "relabelled"].any()


@pytest.mark.parametrize("frames", [550, pytest.param(4_000, marks=pytest.mark.slow)])
def test_the_example_of_the_readme_relabels_and_learns(frames, capsys):
    names, shorter = {}, {"total_frames=4_000": f"total_frames={frames}", "range(100)": "range(5)"}
    exec(TRAIN if frames == 4_000 else changed(TRAIN, shorter), names)
    relabelled = names["batch"]["hindsight", "relabelled"].float().mean()
    assert 0.6 <= relabelled <= 0.95
    # Without hindsight, a random policy reaches its goal in well under 5% of its steps.
    assert (names["batch"]["next", "reward"] == 0).float().mean() > 0.05
    printed, bar = capsys.readouterr()
    report, success = printed.rsplit("success ", 1)
    assert "relabelled" in report
    assert f"{frames}/4000" in bar
    assert "success=" in bar
    assert frames < 4_000 or float(success) >= 0.9


@pytest.mark.filterwarnings("ignore:SACTrainer is an experimental", "ignore:The '.*' hook stage")
@pytest.mark.parametrize("frames", [600, pytest.param(5_000, marks=pytest.mark.slow)])
def test_the_script_with_a_trainer_relabels_and_learns(frames, capsys):
    shorter = {"total_frames=5_000": f"total_frames={frames}"} | ({"range(50)": "range(5)"} if frames < 5_000 else {})
    run_block("how-to/trainers", 0, names := {}, shorter)
    assert names["rb"].sample()["hindsight", "relabelled"].float().mean() > 0.6
    assert frames < 5_000 or float(capsys.readouterr().out.rsplit("success ", 1)[1]) >= 0.9


@pytest.mark.newest
def test_torchrl_refuses_transitions_of_the_policy_after_random_frames():
    with pytest.raises(KeyError, match='"loc" not found'):
        run_block("how-to/trainers", 1, {})


def test_the_transform_of_an_own_environment_computes_its_reward():
    names = {}
    exec(OWN, names)
    rewards = names["reward"](torch.tensor([[0.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.03, 0.03], [0.1, 0.0]]))
    assert rewards.tolist() == [0, -1]
    assert names["her"].keys.achieved_goal == "gripper"


@pytest.mark.parametrize("example", [TRAIN, OWN])
def test_an_example_can_be_pasted_into_a_prompt(example):
    """In a prompt, a block ends with an empty line, so no code may follow it directly."""
    for before, line in itertools.pairwise(example.splitlines()):
        ends_block = before.startswith("    ") and line and not line.startswith((" ", ")"))
        assert not ends_block, f"an empty line is missing before {line!r}"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_loops_of_the_gpu_page_train_on_the_device(device):
    changes = {'device = "cuda"': f'device = "{device}"', '"total_frames": 5000': '"total_frames": 550'}
    run_block("how-to/gpu", 0, names := {}, changes)
    inputs, parameters = names["inputs"], list(names["loss"].parameters())
    assert names["optimizer"].state
    mean, weights = inputs.mean.clone(), [each.detach().clone() for each in parameters]
    assert mean.any()
    rows, on_device = names["rb"].storage[:64], names["rb"].sample()
    with contextlib.nullcontext() if device == "cuda" else NoWaits():
        names["rb"].transform(rows)
    run_block("how-to/gpu", 1, names)
    assert (inputs.mean != mean).any()
    assert any((one != other).any() for one, other in zip(weights, parameters, strict=True))
    on_host = names["rb"].sample()
    assert (on_device.device.type, on_host.device.type) == (device, "cpu")
    assert on_device["hindsight", "relabelled"].any()
    assert on_host["hindsight", "relabelled"].any()


def test_no_page_has_a_block_that_no_test_runs():
    tests = "".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    pages = [str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md")]
    blocks = [(page, number) for page in pages for number in range(len(python_blocks(page)))]
    assert len(blocks) > 10
    for page, number in blocks:
        if not page.startswith("how-to/from-"):  # test_migration.py runs both blocks of these pages
            ways = (f'run_block("{page}", {number}, ', f'python_blocks("{page}")[{number}]')
            assert any(way in tests for way in ways), f"no test runs block {number} of {page}"


def test_links_of_the_description_become_absolute_and_all_of_their_files_exist():
    text = "![A picture](docs/a.png)\n\nSee [a page](docs/a.md#b), [paper](https://arxiv.org/1) and [below](#more)."
    tomllib = pytest.importorskip("tomllib", reason="new in Python 3.11")
    hook = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]
    for each in hook["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    files = "https://github.com/OWNER/torchrl_her"
    assert text == (
        f"![A picture]({files}/raw/main/docs/a.png)\n\n"
        f"See [a page]({files}/blob/main/docs/a.md#b), [paper](https://arxiv.org/1) and [below](#more)."
    )
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", README)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []


# Notebooks and pictures

notebooks, figures = module_of_docs("notebooks"), module_of_docs("figures")
TEXTS = [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "examples" / "README.md"]
NOT_OF_RESULTS = {"data_flow.svg", "goal_names.png", "running_episodes.png", "goal_distributions.png", "tutorials"}


@pytest.mark.parametrize("page", notebooks.TUTORIALS, ids=lambda page: page.stem)
def test_a_notebook_has_the_code_of_its_page_without_the_output(page):
    notebook = notebooks.convert(page)
    cells = [cell.source.strip() for cell in notebook.cells if cell.cell_type == "code"]
    cells = [cell for cell in cells if not cell.startswith("%%bash")]
    blocks = [example.source for example in find_examples(page) if example.prefix == "python"]
    assert len(cells) == len(blocks) > 5
    for cell, block in zip(cells, blocks, strict=True):
        assert "#>" not in cell
        assert cell == re.sub(r" *#>.*\n", "", block).strip()
    text = "".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert links
    assert all(link.startswith("https://") for link in links)
    for link in links:
        _, _, path = link.partition("/main/")
        assert (DOCS.parent / path.partition("#")[0]).exists()


@pytest.mark.parametrize("name", sorted(figures.FIGURES.keys() - NOT_OF_RESULTS))
def test_a_figure_of_results_is_drawn_from_their_files(name, tmp_path):
    figures.FIGURES[name](tmp_path / name)
    assert (tmp_path / name).stat().st_size > 10_000


@pytest.mark.parametrize("name", sorted(path.name for path in (DOCS / "images").iterdir()))
def test_a_picture_is_used_and_small(name):
    assert any(re.search(rf"images/{re.escape(name)}\b", path.read_text()) for path in TEXTS)
    assert (DOCS / "images" / name).stat().st_size <= 200_000
