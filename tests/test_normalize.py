"""NormalizedInputs: statistics are compared with NumPy, in float64."""

import contextlib
import copy
import math
import pickle
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from tensordict import TensorDict, unravel_key
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import multiprocessing
from torch._dynamo.testing import CompileCounter
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer, TensorStorage
from torchrl.envs import Compose, MultiStepTransform, ParallelEnv, TransformedEnv
from torchrl.envs.utils import check_env_specs
from torchrl.modules import MLP

import torchrl_her.envs  # noqa: F401  # registers the environments
from support import factories
from support.factories import WAYS_TO_COPY, check_refused, make_augmentation, make_transform, run_processes
from support.tape import collected, make_serial, make_tape
from torchrl_her import HERKeys, NormalizedInputs, PackedStorage

processes_from_a_server = pytest.fixture(scope="module")(factories.start_processes_from_a_server)
PLAIN, NESTED = HERKeys(), HERKeys(("robot", "tip"), ("task", "target"), mask="kept")
IN_KEYS = {PLAIN: ["observation", "desired_goal"], NESTED: [("robot", "state"), ("task", "target")]}


def transitions(batch, seed=0, dtype=torch.float32, goal=(2,), keys=PLAIN, state=None):
    """Return random transitions; ``state`` is the shape of the achieved entry, by default that of the goal."""
    random = torch.Generator().manual_seed(seed)
    data = TensorDict(batch_size=batch)
    shapes = {IN_KEYS[keys][0]: (3,), keys.desired_goal: goal, keys.achieved_goal: state or goal}
    for place in (data, data.setdefault("next", TensorDict(batch_size=batch))):
        for number, (key, shape) in enumerate(shapes.items(), 1):
            values = torch.randn((*batch, *shape), generator=random, dtype=torch.float64)
            place[key] = (values * 10 * number + 100 * number).to(dtype)
    if keys.mask == "kept":
        data["kept"] = torch.rand(batch, generator=random) < 0.5
    return data


def statistics(writes, keys=PLAIN, goal_fn=lambda states: states):
    """Return mean and standard deviation of each feature, at least 0.01, from all steps one by one, in NumPy."""
    features = []
    for key in IN_KEYS[keys]:
        rows = []
        for data in writes:
            for step in data.reshape(-1) if data.batch_size.numel() else ():
                if keys.mask != "kept" or step["kept"]:
                    rows.append(step["next", key])
                    rows += [goal_fn(step["next", keys.achieved_goal][None])[0]] if key == keys.desired_goal else []
        values = np.stack([row.double().numpy().reshape(-1) for row in rows])
        features.append((values.mean(0), values.std(0).clip(0.01)))
    return [np.concatenate(parts) for parts in zip(*features, strict=True)]


def check(inputs, writes, keys=PLAIN, **options):
    for found, expected in zip((inputs.mean, inputs.scale), statistics(writes, keys, **options), strict=True):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


def make_buffer(*after, before=(), goal_spec=None, **options):
    hindsight = make_transform(capacity=1000, goal_spec=goal_spec)
    return factories.make_buffer(Compose(*before, hindsight, *after), batch_size=200, **options)


def make_policy(inputs, features=6, actions=2):
    return TensorDictSequential(inputs, TensorDictModule(MLP(features, actions, num_cells=[]), ["inputs"], ["action"]))


# Statistics


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.int64, torch.float16, torch.bfloat16, torch.uint8]
)
@pytest.mark.parametrize("goal", [(2,), (2, 3)])
@pytest.mark.parametrize("keys", [PLAIN, NESTED], ids=["default keys", "nested keys and a mask"])
def test_the_statistics_are_those_of_all_steps_and_goals_also_count_the_achieved_ones(dtype, goal, keys):
    inputs = NormalizedInputs(IN_KEYS[keys], keys=keys)
    batches = [(40,), (3, 7), (2, 1, 5), (), (0,)]
    writes = [transitions(batch, seed, dtype, goal, keys) for seed, batch in enumerate(batches)]
    for number, data in enumerate(writes):
        inputs.update(data)
        check(inputs, writes[: number + 1], keys)


def test_padding_of_a_collector_does_not_count():
    inputs, data = NormalizedInputs(), transitions((2, 10))
    data["collector", "mask"] = torch.arange(10).expand(2, 10) < torch.tensor([[10], [4]])
    data[1, 4:] = torch.nan * data[1, 4:].exclude("collector")
    inputs.update(data)
    check(inputs, [data[0], data[1, :4]])
    data["collector", "mask"].zero_()
    inputs.update(data)
    check(inputs, [data[0], data[1, :4]])


def test_achieved_goals_are_mapped_by_goal_fn():
    inputs, data = NormalizedInputs(goal_fn=lambda states: states[:, :2] * 2), transitions((30,), state=(5,))
    inputs.update(data)
    check(inputs, [data], goal_fn=inputs.goal_fn)


def test_sums_stay_in_double_precision_after_casts_of_the_policy():
    inputs, data = NormalizedInputs(), transitions((1000,))
    data["next"].apply_(lambda value: value + 1000)
    policy = make_policy(inputs, 5)
    policy(data)
    for cast in (policy.half, policy.double, policy.float):
        cast()
        inputs.update(data)
        assert inputs.scale.dtype == policy(data)["inputs"].dtype == next(policy.parameters()).dtype
    check(inputs, [data])


@pytest.mark.parametrize(
    ("mean", "scale", "dtype"),
    [(1e8, 1, torch.float64), (-1e10, 1, torch.float64), (1e9, 10, torch.int64), (1e9, 10, torch.int32),
     (1e6, 10, torch.float32)],
)  # fmt: skip
def test_inputs_far_from_zero_are_normalized(mean, scale, dtype):
    inputs, writes = NormalizedInputs(clip=math.inf), [transitions((500,), seed, torch.float64) for seed in range(3)]
    for number, data in enumerate(writes):
        data["next"].apply_(lambda value: (value - value.mean(0)) / value.std(0) * scale + mean)
        writes[number] = data.apply(lambda value: value.to(dtype))
        inputs.update(writes[number])
    check(inputs, writes)
    means, scales = statistics(writes)
    data = inputs(writes[0])["next"]
    raw = torch.cat([data[key].double() for key in IN_KEYS[PLAIN]], -1).numpy()
    assert data["inputs"].dtype == torch.float32
    np.testing.assert_allclose(data["inputs"], (raw - means) / scales, atol=1e-3)


def test_the_scale_of_a_constant_feature_is_a_hundredth():
    inputs, data = NormalizedInputs(), transitions((30,))
    data["next", "observation"][:, 0] = 7.0
    inputs.update(data)
    assert inputs.scale[0] == pytest.approx(0.01)
    assert inputs(data)["next", "inputs"][:, 0].abs().max() < 1e-3


# Inputs


def check_inputs(inputs, batch, writes):
    """Check the inputs of a batch at the root and under "next", from the raw entries."""
    mean, scale = statistics(writes)
    for place in (batch, batch["next"]):
        raw = np.concatenate([place[key].double().numpy() for key in IN_KEYS[PLAIN]], -1)
        expected = (raw - mean) / scale
        assert (np.abs(expected) > inputs.clip).any()
        np.testing.assert_allclose(place["inputs"], expected.clip(-inputs.clip, inputs.clip), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("storage", [LazyTensorStorage, PackedStorage])
@pytest.mark.parametrize("n_steps", [1, 3])
def test_samples_have_normalized_and_clipped_inputs_of_relabelled_goals_as_the_policy_has(storage, n_steps):
    inputs = NormalizedInputs(clip=1.5)
    before = [MultiStepTransform(n_steps, 0.9)] if n_steps > 1 else []
    rb = make_buffer(inputs, before=before, storage=storage)
    data = collected(300)
    for write in (data[:100], data[100:]):
        rb.extend(write)
    check(inputs, [data])
    batch = rb.sample()
    assert 0.5 < batch["hindsight", "relabelled"].float().mean() < 1
    check_inputs(inputs, batch, [data])
    for place in (batch, batch["next"]):
        acting = inputs(place.select("observation", "desired_goal"))
        assert torch.equal(acting["inputs"], place["inputs"])
        assert "next" not in acting


def test_before_the_first_update_inputs_are_concatenated_and_clipped():
    data = transitions((4,))
    expected = torch.cat([data["desired_goal"], data["observation"]], -1)
    assert torch.equal(NormalizedInputs(["desired_goal", "observation"], clip=math.inf)(data)["inputs"], expected)
    inputs = NormalizedInputs(["desired_goal", "observation"], ("agent", "inputs"), clip=110)
    assert torch.equal(inputs(data)["agent", "inputs"], expected.clamp(-110, 110))
    assert inputs.out_keys == [("agent", "inputs")]
    assert ("next", "agent", "inputs") in data.keys(True)


UNCHANGED = "without an update, so its inputs are not normalized"


def sample_often(inputs, adopts=False):
    her = make_transform(capacity=1000)
    storage = TensorStorage(her.adopt(collected())) if adopts else LazyTensorStorage(1000)
    rb = TensorDictReplayBuffer(storage=storage, transform=Compose(her, inputs), batch_size=200)
    if not adopts:
        rb.extend(collected())
    return [rb.sample() for _ in range(100)]


def test_samples_without_any_update_warn_once():
    with pytest.warns(UserWarning, match=f"10,000 transitions were sampled.*{UNCHANGED}") as caught:
        sample_often(NormalizedInputs(), adopts=True)
    assert len([each for each in caught if UNCHANGED in str(each.message)]) == 1


def test_without_normalization_updates_have_no_effect_and_statistics_are_refused():
    inputs, other, data = NormalizedInputs(clip=math.inf, normalize=False), NormalizedInputs(), collected().clone()
    inputs.update(data)
    raw = torch.cat([data["observation"], data["desired_goal"]], -1)
    assert torch.equal(inputs(data)["inputs"], raw)
    inputs.load_state_dict(inputs.state_dict())
    other.update(data)
    with pytest.raises(ValueError, match="created with normalize=False"):
        inputs.load_state_dict(other.state_dict())
    assert torch.equal(inputs(data)["inputs"], raw)


def test_an_evaluation_may_come_before_the_first_update():
    inputs = NormalizedInputs()
    with torch.inference_mode():
        inputs(collected().clone())
    inputs.update(collected())
    check(inputs, [collected()])


@pytest.mark.parametrize("kind", ["serial", pytest.param("parallel", marks=pytest.mark.slow)])
def test_a_collector_of_several_environments_acts_with_it(kind, recwarn):
    env = make_serial(0, 1) if kind == "serial" else ParallelEnv(2, make_tape)
    inputs = NormalizedInputs(clip=1.5)
    rb = make_buffer(inputs)
    writes = []
    for data in Collector(env, make_policy(inputs), frames_per_batch=100, total_frames=600):
        acting = torch.cat([data["observation"], data["desired_goal"]], -1)
        scale = 1 if inputs.scale is None else inputs.scale
        torch.testing.assert_close(data["inputs"], ((acting - inputs.mean) / scale).clamp(-1.5, 1.5))
        rb.extend(data.reshape(-1))
        writes.append(data)
    check(inputs, writes)
    check_inputs(inputs, rb.sample(), writes)
    assert not [each for each in recwarn if "copy of the desired goal" in str(each.message)]


def check_acting(inputs, data):
    """Check that the environment's data ``[*batch, T]`` have the inputs of the present statistics.

    The first state of the data was observed before the last update.
    """
    for place in (data[..., 1:], data["next"]):
        raw = torch.cat([place["observation"], place["desired_goal"]], -1)
        torch.testing.assert_close(
            place["inputs"], ((raw - inputs.mean) / inputs.scale).clamp(-inputs.clip, inputs.clip)
        )


@pytest.mark.parametrize("out_key", ["inputs", ("agent", "inputs")])
@pytest.mark.parametrize("batched", [False, True])
def test_environments_give_normalized_inputs_and_the_buffer_updates_the_statistics(batched, out_key):
    inputs = NormalizedInputs(out_key=out_key, clip=1.5)
    env = TransformedEnv(make_serial(0, 1) if batched else make_tape(), inputs)
    check_env_specs(env)
    assert env.observation_spec[out_key].shape == (*env.batch_size, 6)
    rb, writes = make_buffer(inputs), []
    for data in Collector(env, None, frames_per_batch=100, total_frames=400):
        if isinstance(out_key, str):
            check_acting(inputs, data)
        rb.extend(data.reshape(-1))
        writes.append(data)
        check(inputs, writes)
    assert not {out_key, unravel_key(("next", out_key))} & {*rb.storage[:].keys(True, True)}, "samples compute it"
    batch = rb.sample()
    if out_key == "inputs":
        check_inputs(inputs, batch, writes)
    assert out_key in batch.keys(True, True)


def test_single_transitions_count_as_they_are_added():
    inputs = NormalizedInputs()
    rb = make_buffer(inputs)
    for step in collected():
        rb.add(step)
    check(inputs, [collected()])


def test_samples_of_stored_copies_have_inputs():
    inputs = NormalizedInputs(clip=1.5)
    rb = factories.make_buffer(Compose(make_augmentation(), inputs), collected(), batch_size=200)
    check_inputs(inputs, rb.sample(), [collected()])


@pytest.mark.filterwarnings("error")
def test_an_ensemble_of_policies_is_evaluated_by_vmap():
    inputs = NormalizedInputs()
    inputs.update(collected())
    policies = [make_policy(inputs) for _ in range(3)]
    parameters, data = TensorDict.from_modules(*policies, as_module=True), collected().exclude("next", "action")
    policy = copy.deepcopy(policies[0])

    def act(parameters, data):
        with parameters.to_module(policy):
            return policy(data)["action"]

    actions = torch.vmap(act, (0, None))(parameters, data)
    assert torch.allclose(actions, torch.stack([each(data.copy())["action"] for each in policies]), atol=1e-6)


def test_it_compiles_into_one_graph_with_the_hindsight_transform():
    inputs = NormalizedInputs()
    rb = make_buffer(inputs)
    rb.extend(collected())
    counter, rows = CompileCounter(), rb.storage[:]
    compiled = torch.compile(rb.transform, backend=counter, fullgraph=True)
    for update in range(3):  # statistics are not constants of the graph
        batch = compiled(rows.clone())
        torch.testing.assert_close(
            inputs(batch.clone())["next", "inputs"], batch["next", "inputs"], rtol=1e-5, atol=1e-5
        )
        inputs.update(collected()[update * 9 :])
    assert counter.frame_count == 1


# Copies and processes


@pytest.mark.parametrize("way", WAYS_TO_COPY)
@pytest.mark.parametrize("called", [False, True], ids=["new twin", "called twin"])
def test_copies_of_a_buffer_continue_its_statistics(way, called, tmp_path):
    inputs, twin_inputs = NormalizedInputs(), NormalizedInputs()
    rb, twin = make_buffer(inputs), make_buffer(twin_inputs)
    rb.extend(collected()[:20])
    if called:
        twin_inputs.update(collected()[:7])
    twin = WAYS_TO_COPY[way](rb, twin, tmp_path)
    copied = twin.transform[1]
    assert torch.equal(copied.mean, inputs.mean)
    assert torch.equal(copied.scale, inputs.scale)
    copied.update(collected()[20:])
    check(copied, [collected()])
    check(inputs, [collected()[:20]])


def test_a_policy_is_saved_with_its_statistics_and_keeps_its_memory_when_it_is_loaded():
    inputs, twin_inputs = NormalizedInputs(), NormalizedInputs()
    policy, twin = make_policy(inputs), make_policy(twin_inputs)
    empty = copy.deepcopy(policy.state_dict())
    inputs.update(collected())
    twin_inputs(collected().clone())
    mean = twin_inputs.mean
    twin.load_state_dict(policy.state_dict())
    assert twin_inputs.mean is mean
    assert torch.equal(twin(collected().clone())["action"], policy(collected().clone())["action"])
    twin.load_state_dict(empty)
    assert not mean.any()
    assert (twin_inputs.scale == 1).all()


def test_copies_of_a_policy_do_not_contain_the_buffer():
    inputs = NormalizedInputs()
    policy, rb = make_policy(inputs), make_buffer(inputs, size=100_000)
    rb.extend(collected())
    assert len(pickle.dumps(policy)) < 10_000
    twin = copy.deepcopy(policy)
    twin[0].update(collected()[:20])
    check(inputs, [collected()])
    check(twin[0], [collected(), collected()[:20]])


def test_a_buffer_and_a_policy_are_pickled_after_processes_got_their_statistics():
    inputs = NormalizedInputs()
    rb, policy = make_buffer(inputs), make_policy(inputs)
    rb.extend(collected())
    inputs.share_memory_()  # as when processes start
    twin = pickle.loads(pickle.dumps(policy))
    check(twin[0], [collected()])
    pickle.loads(pickle.dumps(rb)).extend(collected()[:20])
    check(inputs, [collected()])


def update_often(inputs, data, times):
    for _ in range(times):
        inputs.update(data)


def test_processes_share_the_statistics_of_a_shared_buffer(processes_from_a_server):
    inputs = NormalizedInputs()
    with pytest.raises(RuntimeError, match=r"only after its first use.*fake_tensordict"):
        make_buffer(inputs, shared=True, goal_spec=make_tape().observation_spec["achieved_goal"])
    inputs(make_tape().fake_tensordict())
    rb = make_buffer(inputs, shared=True, goal_spec=make_tape().observation_spec["achieved_goal"])
    rb.share()
    writes = [transitions((50,), seed, goal=(3,)) for seed in range(2)]
    run_processes("forkserver", update_often, *((rb.transform[1], data, 200) for data in writes))
    check(inputs, writes)
    assert inputs.get_extra_state()["moments"][0].tolist() == 3 * [20_000] + 3 * [40_000]


def test_processes_cannot_get_it_before_its_first_use(processes_from_a_server):
    policy = make_policy(NormalizedInputs())
    with pytest.raises(RuntimeError, match=r"after its first use.*fake_tensordict\(\)\) before you create the coll"):
        MultiSyncCollector([make_tape] * 2, policy, frames_per_batch=40, total_frames=120)
    run_processes("forkserver", update_often, (NormalizedInputs(normalize=False), collected(), 1))


@pytest.mark.slow
def test_collectors_in_other_processes_get_the_statistics_with_the_weights():
    inputs = NormalizedInputs(clip=math.inf)
    inputs(make_tape().fake_tensordict())
    collector = MultiSyncCollector(
        [make_tape] * 2, make_policy(inputs), frames_per_batch=40, total_frames=120, update_at_each_batch=False
    )
    for number, data in enumerate(collector):
        raw = torch.cat([data["observation"], data["desired_goal"]], -1)
        torch.testing.assert_close(data["inputs"], (raw - inputs.mean) / inputs.scale)
        assert torch.equal(data["inputs"], raw) == (number == 0)
        inputs.update(data)
        collector.update_policy_weights_()
    assert number == 2
    collector.shutdown()


def make_env_in_a_worker(inputs):
    return TransformedEnv(make_tape(), inputs)


@pytest.mark.slow
def test_environments_in_other_processes_have_the_statistics_of_the_buffer():
    inputs = NormalizedInputs(clip=math.inf)
    rb, writes = make_buffer(inputs), []
    inputs(make_tape().fake_tensordict())
    collector = MultiSyncCollector([partial(make_env_in_a_worker, inputs)] * 2, frames_per_batch=40, total_frames=120)
    for data in collector:
        for of_worker in data.split(20):
            check_acting(inputs, of_worker)
        rb.extend(data)
        writes.append(data)
        check(inputs, writes)
    assert len(writes) == 3
    collector.shutdown()


def collect_in_a_copy(env, results):
    with warnings.catch_warnings(record=True) as caught:
        for _ in range(2):
            env.rollout(5)
    results.put([str(each.message) for each in caught])


def test_a_process_without_the_statistics_says_so():
    inputs = NormalizedInputs()
    env = TransformedEnv(make_tape(), inputs)
    env.rollout(5)
    results = multiprocessing.get_context("fork").SimpleQueue()
    run_processes("fork", collect_in_a_copy, (env, results))
    (message,) = results.get()
    assert "a copy of NormalizedInputs that receives no updates" in message


def write_often(inputs, *in_environment, pad=False):
    """Write 40 chunks, whose inputs are those of other objects. The last row can be padding."""
    rb, env = make_buffer(inputs), TransformedEnv(make_tape(), Compose(*in_environment))
    for data in Collector(env, frames_per_batch=20, total_frames=800, auto_register_policy_transforms=False):
        data["collector", "mask"] = torch.ones(20, dtype=torch.bool)
        if pad:
            data[-1] = data[-1].apply(torch.zeros_like)  # the mask, too
        rb.extend(data)


def test_another_object_in_the_environments_warns_once():
    with pytest.warns(UserWarning, match="policy reads raw inputs, and the loss normalized ones") as caught:
        write_often(NormalizedInputs(), NormalizedInputs())
    assert len(caught) == 1
    assert caught[0].filename == __file__


def load_and_sample(inputs):
    source = NormalizedInputs()
    source.update(collected())
    inputs.load_state_dict(source.state_dict())
    sample_often(inputs, adopts=True)


def update_and_sample(inputs):
    TransformedEnv(make_tape(), inputs).rollout(5)
    inputs.update(collected())
    sample_often(inputs, adopts=True)
    update_often(inputs, collected(), 20)


CORRECT = {  # uses of new inputs
    "updated by writes": sample_often,
    "updated with a data set": update_and_sample,
    "loaded": load_and_sample,
    "acting alone": lambda inputs: [inputs(collected().exclude("next")) for _ in range(200)],
    "in the environments": lambda inputs: write_often(inputs, inputs),
    "padding": lambda inputs: write_often(inputs, inputs, pad=True),
    "only in the buffer": write_often,
    "not normalized": lambda _: sample_often(NormalizedInputs(normalize=False)),
    "two that do not normalize": lambda _: write_often(*(NormalizedInputs(normalize=False) for _ in range(2))),
}


@pytest.mark.parametrize("use", CORRECT.values(), ids=CORRECT)
def test_correct_uses_do_not_warn(use, recwarn):
    use(NormalizedInputs())
    assert not [each for each in recwarn if "NormalizedInputs" in str(each.message)]


def test_updates_in_place_of_a_buffer_warn_once():
    inputs, other = NormalizedInputs(), NormalizedInputs()
    env = TransformedEnv(make_tape(), inputs)
    for number in range(40):
        other.update(env.rollout(5))  # the first layer of a policy
        with (
            pytest.warns(UserWarning, match="no buffer writes through it") if number == 9 else contextlib.nullcontext()
        ):
            inputs.update(env.rollout(5))


# Refusals


def test_the_default_entries_follow_the_keys():
    assert NormalizedInputs(keys=HERKeys(desired_goal="target")).in_keys == ["observation", "target"]


# By name: entries under "next" of the second write, or None without the entry, and the error of the update.
FULL = partial(torch.full, (60, 3))
WRONG = {
    "a missing entry": ({"observation": None}, KeyError, r"no entry \('next', 'observation'\).*only at the root"),
    "a missing goal": ({"achieved_goal": None}, KeyError, r"no entry \('next', 'achieved_goal'\).*only at the root"),
    "other sizes": ({"observation": torch.ones(60, 4)}, ValueError,
        r"\['observation', 'desired_goal'\] have \[4, 3\] features, but \[3, 3\] in the first"),
    "sizes with the same sum": ({"observation": torch.ones(60, 4), "desired_goal": torch.ones(60, 2)}, ValueError,
        r"have \[4, 2\] features, but \[3, 3\] in the first"),
    "achieved goals of another size": ({"achieved_goal": torch.ones(60, 4)}, ValueError,
        "achieved goals have 4 features and the desired goals 3: pass goal_fn"),
    "NaN": ({"observation": FULL(torch.nan)}, ValueError, r"'observation'\) has NaN or infinite.*left unchanged"),
    "finite values beyond float32": ({"observation": torch.full((60, 3), 1e200, dtype=torch.float64)}, ValueError,
        r"'observation'\) has values beyond the range of float32.*left unchanged"),
    "values beyond float32 with a mean of 0": (
        {"observation": torch.tensor([1e39, -1e39], dtype=torch.float64).repeat(30)[:, None].expand(60, 3)},
        ValueError, r"'observation'\) has values beyond the range of float32.*left unchanged"),
    "infinite goals": ({"achieved_goal": FULL(torch.inf)}, ValueError, r"'achieved_goal'\) has NaN or infinite"),
}  # fmt: skip


def with_entries(changed):
    """Return transitions with other entries under "next", or without them where they are None."""
    data = collected().exclude(*(("next", key) for key in changed))
    for key, values in changed.items():
        if values is not None:
            data["next", key] = values
    return data


@pytest.mark.filterwarnings("ignore:The reward module gives inf")
@pytest.mark.parametrize("name", WRONG)
def test_a_refused_update_or_write_changes_neither_statistics_nor_buffer(name):
    changed, error, message = WRONG[name]
    inputs, data = NormalizedInputs(), with_entries(changed)
    rb = make_buffer(inputs)
    rb.extend(collected())
    check_refused(rb, lambda: inputs.update(data), error, message)
    check_refused(rb, lambda: rb.extend(data), error)  # with another message if HERTransform refuses it first
    check(inputs, [collected()])


def test_extreme_achieved_goals_are_refused_when_they_are_also_inputs():
    inputs, data = NormalizedInputs(["achieved_goal", "desired_goal"], goal_fn=torch.zeros_like), collected().clone()
    data["next", "achieved_goal"] = torch.full((60, 3), torch.inf)
    with pytest.raises(ValueError, match=r"'achieved_goal'\) has NaN or infinite"):
        inputs.update(data)


def test_inputs_of_missing_or_other_entries_are_refused():
    inputs = NormalizedInputs()
    inputs(collected().clone())
    with pytest.raises(KeyError, match=r"no entry 'observation'. Set in_keys=\[...\] to the correct key"):
        inputs(collected().select("desired_goal"))
    with pytest.raises(KeyError, match=r"no entry \('next', 'desired_goal'\)"):
        inputs(collected().exclude(("next", "desired_goal")))
    with pytest.raises(ValueError, match=r"have \[2, 3\] features, but \[3, 3\] in the first"):
        inputs(collected().select("desired_goal").set("observation", torch.ones(60, 2)))


def test_statistics_of_other_entries_cannot_be_loaded():
    one, other = NormalizedInputs(), NormalizedInputs()
    one.update(collected())
    other.update(transitions((5,)))
    with pytest.raises(ValueError, match=r"have \[3, 2\] features, but \[3, 3\]"):
        one.load_state_dict(other.state_dict())
    swapped = NormalizedInputs(["desired_goal", "observation"])
    with pytest.raises(
        ValueError, match=r"belong to the entries \['observation', 'desired_goal'\], but in_keys are \['de"
    ):
        swapped.load_state_dict(one.state_dict())
    check(one, [collected()])
