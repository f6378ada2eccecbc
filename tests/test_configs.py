"""Hydra configs: what a YAML file composes, and what reaches the classes."""

import gc
import inspect
import os
import pickle
import re
import runpy
import subprocess
import sys

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException, InstantiationException
from hydra.utils import instantiate
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import MissingMandatoryValue

import torchrl_her
import torchrl_her.envs
from support.hydra_groups import torchrl_groups
from support.pages import DOCS, python_blocks
from torchrl_her import Current, Geometric, HERKeys, HERTransform, Mixture, Random, configs

NODES = [(group, name) for group, nodes in configs.CONFIGS.items() for name in nodes]
GET_METHOD = {"_target_": "hydra.utils.get_method", "path": "support.goals.reward_of"}
REQUIRED = {  # values of the arguments without a default
    "reward": None,
    "env": "torchrl_her/PointReach-v0",
    "reward_fn": GET_METHOD,
    "value_fn": GET_METHOD,
    "threshold": 0.05,
    "discount": 0.99,
    "steps": 25,
    "members": {"future": 0.5, "random": 0.5},
    "hindsight": {"_target_": "torchrl_her.HERTransform", "reward": GET_METHOD},
    "selector": {"_target_": "torchrl_her.Uniform"},
    "max_size": 1000,
    "far": 0.5,
    "gamma": 0.99,
    "episode_steps": 50,
}
TARGET = "torchrl_her.NormalizedInputs"
NO_CONFIG = {  # public classes that are not part of a buffer, or only base classes
    "Checkpoints", "Finding", "GoalEnvReport", "GoalSelector", "GoalStrategy", "Transitions",
}  # fmt: skip


torchrl_configs = pytest.fixture(scope="module", autouse=True)(torchrl_groups)


def node_of(group, name, **values):
    """The config of a node, as Hydra composes it, with a value for each required argument."""
    config = OmegaConf.structured(configs.CONFIGS[group][name])
    required = {key: REQUIRED[key] for key in config if OmegaConf.is_missing(config, key)}
    return OmegaConf.merge(config, required, values)


def class_of(group, name):
    return getattr(torchrl_her, configs.CONFIGS[group][name].__name__.removesuffix("Config"))


@pytest.fixture
def composed(tmp_path):
    """A function that composes a YAML text and overrides."""

    def compose_text(text, *overrides):
        (tmp_path / "config.yaml").write_text(text)
        with initialize_config_dir(str(tmp_path), version_base="1.3"):
            return compose("config", overrides=list(overrides))

    return compose_text


# Nodes


def test_every_public_class_that_is_part_of_a_buffer_has_a_config():
    classes = {name for name in torchrl_her.__all__ if inspect.isclass(getattr(torchrl_her, name))}
    assert {class_of(*node).__name__ for node in NODES} == classes - NO_CONFIG


def test_every_node_is_registered_and_makes_an_object_of_its_class(composed):
    entries = ", ".join(f"{group}@{group}.{name}: {name}" for group, name in NODES)
    config = composed(f"defaults: [{entries}, _self_]")
    assert pickle.loads(pickle.dumps(config)) == config  # Hydra's launchers send it to other processes
    for group, name in NODES:
        assert OmegaConf.get_type(config[group][name]) is configs.CONFIGS[group][name]
        assert type(instantiate(node_of(group, name))) is class_of(group, name)


@pytest.mark.parametrize(("group", "name"), NODES)
def test_every_argument_is_a_field_with_the_same_default(group, name, monkeypatch):
    cls, node, passed = class_of(group, name), node_of(group, name), {}
    signature = inspect.signature(cls)
    arguments = [
        each for each in signature.parameters.values() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    assert set(node) - {"_target_", "_partial_", "_convert_"} == {each.name for each in arguments}

    def record(self, *args, **kwargs):
        passed.update(signature.bind(*args, **kwargs).arguments)

    monkeypatch.setattr(cls, "__init__", record)
    instantiate(node)
    for each in arguments:
        value = passed[each.name]
        if each.default is each.empty:
            assert getattr(configs.CONFIGS[group][name](), each.name) == MISSING
        elif isinstance(each.default, tuple):
            assert tuple(value) == each.default
        else:
            assert (type(value), value) == (type(each.default), each.default)


def test_values_of_the_right_type_are_converted(composed):
    config = composed("defaults: [transform@her: her, _self_]", "her.her_ratio=1", "her.capacity=10")
    her = instantiate(config.her, reward=None)
    assert (her.her_ratio, type(her.her_ratio), her.capacity) == (1.0, float, 10)


@pytest.mark.parametrize(
    ("field", "value"),
    [("her_ratio", "often"), ("capacity", 0.5), ("max_episode_steps", "fifty"), ("info", "perhaps"), ("her_rate", 0.8)],
)
def test_wrong_values_and_unknown_fields_are_refused_when_composing(field, value, composed):
    text = "defaults: [transform@transform: her, _self_]"
    with pytest.raises(ConfigCompositionException, match=field):
        composed(text, f"transform.{field}={value}")
    with pytest.raises(ConfigCompositionException, match=field):
        composed(f"{text}\ntransform: {{{field}: {value}}}")


def test_unknown_keys_are_refused_and_required_arguments_are_asked_for(composed):
    text = "defaults: [transform@transform: her, _self_]"
    with pytest.raises(ConfigCompositionException, match="goal"):
        composed(text, "transform.keys.goal=target")
    with pytest.raises(InstantiationException, match="unexpected keyword argument 'goal'"):
        instantiate(composed(f"{text}\ntransform: {{reward: null, keys: {{goal: target}}}}").transform)
    with pytest.raises(MissingMandatoryValue, match="reward"):
        instantiate(composed(text).transform)


# What YAML cannot write


def test_lists_of_names_are_nested_keys():
    keys = node_of("her_keys", "base", achieved_goal=["robot", "tip"], desired_goal="target", trajectory=None)
    assert instantiate(keys) == HERKeys(("robot", "tip"), "target", trajectory=None)
    inputs = node_of("transform", "normalized_inputs", in_keys=["a", ["b", "c"]], out_key=["d", "e"])
    inputs = instantiate(inputs, keys={"desired_goal": ["b", "c"]})
    assert (inputs.in_keys, inputs.out_keys) == (["a", ("b", "c")], [("d", "e")])
    assert instantiate(node_of("reward", "env", info_keys=["a", ["b", "c"]])).info_keys == ("a", ("b", "c"))
    assert instantiate(node_of("strategy", "subgoal", limit=["agent", "goal"])).limit == ("agent", "goal")


def test_strategies_are_given_by_name_as_nodes_and_as_mixtures():
    current, geometric = node_of("strategy", "current"), node_of("strategy", "geometric")
    mixture = node_of("strategy", "mixture", members=None)
    mixture.members = [[current, 0.2], [geometric, 0.5], ["random", 0.3]]
    her = instantiate(node_of("transform", "her", strategy={"desired_goal": "final", "actor_goal": mixture}))
    expected = {
        "desired_goal": "Final()",
        "actor_goal": repr(Mixture({Current(): 0.2, Geometric(0.99): 0.5, Random(): 0.3})),
    }
    assert {key: repr(each) for key, each in her.strategies.items()} == expected


def test_functions_are_given_by_their_path():
    her = instantiate(node_of("transform", "her", reward=GET_METHOD, goal_fn=GET_METHOD | {"path": "torch.abs"}))
    assert her.goal_fn is torch.abs
    assert her.reward.functions[0].__name__ == "reward_of"


def test_a_node_can_be_a_partial_for_what_only_python_has():
    selection = instantiate(node_of("transform", "goal_selection", hindsight="???", _partial_=True))
    her = HERTransform(instantiate(node_of("reward", "sparse")))
    assert selection(hindsight=her).hindsight is her


# A run


def test_a_shared_object_is_the_same_at_each_reference_of_a_run():
    node = {"_target_": "torchrl_her.configs.shared", "name": "inputs", "value": {"_target_": TARGET, "clip": 3.0}}
    config = OmegaConf.create({"inputs": node, "places": ["${inputs}", "${inputs}"], "other": "${inputs}"})
    config["other"] = node | {"name": "other"}
    objects = instantiate(config)
    first, second = objects["places"]
    assert first is second is objects["inputs"]
    assert first is not objects["other"]
    assert first.clip == objects["other"].clip == 3
    del objects, first, second
    gc.collect()
    assert instantiate(node | {"value": {"_target_": TARGET, "clip": 4.0}}).clip == 4


def test_the_script_of_the_page_runs_with_its_yaml_file(tmp_path):
    text = re.findall(r"```yaml\n(.*?)```", (DOCS / "how-to/trainers.md").read_text(), re.S)[0]
    (tmp_path / "config.yaml").write_text(text)
    (tmp_path / "train.py").write_text(python_blocks("how-to/trainers")[2])
    command = [sys.executable, "train.py", "replay_buffer.transform.strategy.discount=0.9"]
    run = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert "Geometric(0.9)" in run.stdout


# Without Hydra


def test_without_hydra_the_error_says_what_to_install(monkeypatch):
    for module in ("hydra.core.config_store", "omegaconf"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match="pip install hydra-core"):
        runpy.run_path(configs.__file__)
