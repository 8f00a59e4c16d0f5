"""Termination, scores and evaluation, against the simulator itself."""

import math
import random

import gymnasium as gym
import mujoco
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import micro

GYM_IDS = ["Hopper-v4", "Walker2d-v4", "HalfCheetah-v4"]


def done(gym_id, obs):
    return micro.termination_of(gym_id)(torch.as_tensor(np.asarray(obs), dtype=torch.float32))


# --- termination ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("gym_id", GYM_IDS)
def test_real_steps_end_where_the_simulator_says(gym_id):
    """Random actions, going on after a fall and from states put near every bound: the rule sees only the observation."""
    env, rng = gym.make(gym_id).unwrapped, np.random.default_rng(0)
    env.reset(seed=0)
    observations, answers = [], []
    for step in range(4000):
        if step % 20 == 0:
            env.reset(seed=step)
        if step % 20 == 10:  # often upright but displaced, and sometimes far away
            qpos, qvel = env.init_qpos.copy(), rng.uniform(-5, 5, env.model.nv)
            qpos[1] += rng.uniform(-0.9, 1.2)
            qpos[2] = rng.uniform(-1.4, 1.4) * rng.choice([0.2, 1])
            env.set_state(qpos, qvel)
        obs, _, terminated, _, _ = env.step(rng.uniform(-1, 1, env.action_space.shape))
        observations.append(obs)
        answers.append(terminated)
    answers = np.array(answers)
    np.testing.assert_array_equal(done(gym_id, observations).numpy(), answers)
    if gym_id == "HalfCheetah-v4":
        assert not answers.any()
    else:
        assert 400 < answers.sum() < 3600  # both kinds, many of each


@pytest.mark.parametrize("gym_id, height, angle", [("Hopper-v4", (0.7, math.inf), 0.2), ("Walker2d-v4", (0.8, 2.0), 1.0)])
def test_both_sides_of_every_bound(gym_id, height, angle):
    """States set a hair inside and outside each bound agree with the environment's own `is_healthy`."""
    env, hair = gym.make(gym_id).unwrapped, 1e-4
    env.reset(seed=0)
    low, high = height
    seen = []
    for z in (low - hair, low + hair, 1.3, min(high, 9) - hair, min(high, 9) + hair):
        for tilt in (-1.5 * angle, -angle - hair, -angle + hair, 0.0, angle - hair, angle + hair, 1.5 * angle):
            qpos = env.init_qpos.copy()
            qpos[1], qpos[2] = z, tilt
            env.set_state(qpos, env.init_qvel)
            assert bool(done(gym_id, env._get_obs())) == (not env.is_healthy), (z, tilt)
            assert env.is_healthy == (low < z < high and abs(tilt) < angle), (z, tilt)
            seen.append(env.is_healthy)
    assert True in seen and False in seen


@pytest.mark.parametrize("value", [99.9, 100.1, -99.9, -100.1])
@pytest.mark.parametrize("index", [3, 5])
def test_a_hopper_joint_out_of_range(index, value):
    env = gym.make("Hopper-v4").unwrapped
    env.reset(seed=0)
    qpos = env.init_qpos.copy()
    qpos[index] = value
    env.set_state(qpos, env.init_qvel)
    assert bool(done("Hopper-v4", env._get_obs())) == (not env.is_healthy) == (abs(value) > 100)


def test_hopper_falls_backwards_too():
    """The public code has a misplaced parenthesis that loses this bound."""
    obs = np.zeros((4, 11))
    obs[:, 0], obs[:, 1] = 1.25, [-0.3, -0.1, 0.1, 0.3]
    assert done("Hopper-v4", obs).tolist() == [True, False, False, True]


def rule(gym_id, obs):
    """SPEC 4 for one observation, in plain Python. A comparison with NaN is false."""
    z, angle = obs[0], obs[1]
    if gym_id == "Hopper-v4":
        alive = all(map(math.isfinite, obs)) and all(abs(x) < 100 for x in obs[1:]) and z > 0.7 and abs(angle) < 0.2
    elif gym_id == "Walker2d-v4":
        alive = all(abs(x) < 100 for x in obs) and 0.8 < z < 2 and abs(angle) < 1
    else:
        alive = all(abs(x) < 100 for x in obs)
    return not alive


WIDTH = {"Hopper-v4": 11, "Walker2d-v4": 17, "HalfCheetah-v4": 17}
values = st.one_of(st.floats(-2, 3, width=32), st.floats(width=32), st.sampled_from([99.0, 100.0, -100.0, 101.0]))


@settings(max_examples=300, deadline=None)
@given(gym_id=st.sampled_from(GYM_IDS), z=values, angle=values, index=st.integers(0, 10), value=values)
@example("Hopper-v4", 1.25, 0.0, 0, math.inf)
@example("Hopper-v4", 150.0, 0.0, 5, 0.0)  # hopper alone has no bound on its height
@example("Hopper-v4", 1.25, -0.3, 5, 0.0)
@example("Hopper-v4", 1.25, 0.0, 10, math.nan)
@example("Walker2d-v4", 1.25, 0.0, 10, -math.inf)
@example("Walker2d-v4", 1.25, 0.0, 10, 100.0)
@example("HalfCheetah-v4", 0.0, 0.0, 10, math.nan)
@example("HalfCheetah-v4", 0.0, 0.0, 10, -100.0)
def test_any_observation_by_the_rule(gym_id, z, angle, index, value):
    obs = np.zeros(WIDTH[gym_id], np.float32)
    obs[0], obs[1] = z, angle
    obs[index] = value
    assert bool(done(gym_id, obs)) == rule(gym_id, obs.tolist())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 100.0, -100.0])
@pytest.mark.parametrize("gym_id", GYM_IDS)
def test_every_dimension_can_end_the_episode(gym_id, bad):
    healthy = np.zeros(WIDTH[gym_id])
    healthy[0] = 1.25
    obs = np.tile(healthy, (WIDTH[gym_id], 1))
    np.fill_diagonal(obs, bad)
    expected = [True] * len(obs)
    if gym_id == "Hopper-v4" and bad == 100.0:
        expected[0] = False  # as high as you like
    assert not done(gym_id, healthy)
    assert done(gym_id, obs).tolist() == expected


def test_the_rule_keeps_the_leading_shape():
    assert done("Hopper-v4", np.zeros((5, 4, 11))).shape == (5, 4)
    assert done("Pendulum-v1", np.zeros((5, 4, 3))).shape == (5, 4)


def test_another_environment_never_terminates():
    obs = np.array([[1, 0, 0], [500, -500, 0], [math.nan, math.inf, 0]])
    assert done("Pendulum-v1", obs).tolist() == [False] * 3
    assert done("Pendulum-v1", obs).dtype == torch.bool


# --- the normalised score ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "gym_id, low, high",
    [("Hopper-v4", -20.272305, 3234.3), ("HalfCheetah-v4", -280.178953, 12135.0), ("Walker2d-v4", 1.629008, 4592.3)],
)
def test_normalised_score(gym_id, low, high):
    np.testing.assert_allclose(micro.normalised_score([low, (low + high) / 2, high], gym_id), [0, 50, 100], atol=1e-9)
    assert micro.normalised_score(2 * high - low, gym_id) == pytest.approx(200)
    returns = np.random.default_rng(0).normal(1500, 300, 10)
    scores = micro.normalised_score(returns, gym_id)
    assert scores.std() == pytest.approx(100 * returns.std() / (high - low))  # scaled, not shifted
    assert scores.mean() == pytest.approx(100 * (returns.mean() - low) / (high - low))


def test_published_returns():
    """SPEC 2: the behaviour policies' returns and their normalised scores."""
    assert micro.normalised_score(1326, "Hopper-v4") == pytest.approx(41.4, abs=0.05)
    assert micro.normalised_score(5704, "HalfCheetah-v4") == pytest.approx(48.2, abs=0.05)
    assert micro.normalised_score(2715, "Walker2d-v4") == pytest.approx(59.1, abs=0.05)


def test_without_reference_returns_the_score_is_the_return():
    np.testing.assert_allclose(micro.normalised_score([-1500.0, 3.0], "Pendulum-v1"), [-1500, 3])


# --- the simulator ----------------------------------------------------------------------------------------------------
def test_hopper_contact_margin():
    """mujoco 3.5 sums the margins of two geoms (0.002), which makes another Hopper than the one of D4RL's scores."""
    env = gym.make("Hopper-v4").unwrapped
    env.reset(seed=0)
    model, data = env.model, env.data
    foot, floor = (mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_GEOM, name) for name in ("foot_geom", "floor"))
    qpos = env.init_qpos.copy()
    qpos[1] -= data.geom_xpos[foot][2] - model.geom_size[foot][0] + 0.001  # the foot's capsule, 1 mm into the floor
    env.set_state(qpos, env.init_qvel)
    touching = [contact for contact in data.contact if {contact.geom1, contact.geom2} == {foot, floor}]
    assert len(touching) > 0
    assert all(contact.includemargin == pytest.approx(0.001, abs=1e-12) for contact in touching)


@pytest.mark.parametrize(
    "task, gym_id", [("hopper", "Hopper-v4"), ("walker2d", "Walker2d-v4"), ("halfcheetah", "HalfCheetah-v4")]
)
def test_tasks_are_evaluated_in_v4(task, gym_id):
    assert micro.GYM_IDS[task] == gym_id
    assert micro.make_env(gym_id).spec.id == gym_id


# --- evaluation -------------------------------------------------------------------------------------------------------
def returns_one_by_one(policy, gym_id, seeds, scale=1.0):
    env, returns = gym.make(gym_id), []
    for seed in seeds:
        obs, _ = env.reset(seed=int(seed))
        total, ended = 0.0, False
        while not ended:
            action = policy(torch.as_tensor(obs, dtype=torch.float32)[None])[0].numpy()
            obs, reward, terminated, truncated, _ = env.step(scale * action)
            total, ended = total + reward, terminated or truncated
        returns.append(total)
    return np.array(returns)


def actor_of(gym_id):
    torch.manual_seed(0)
    env = gym.make(gym_id)
    return micro.Actor(env.observation_space.shape[0], env.action_space.shape[0], 16).requires_grad_(False)


@pytest.mark.parametrize("gym_id, scale", [("Hopper-v4", 1.0), ("Walker2d-v4", 1.0), ("Pendulum-v1", 2.0)])
def test_evaluate_against_one_environment_at_a_time(gym_id, scale):
    """Episodes of different lengths; Pendulum's are cut off at 200 steps, and its actions are twice the policy's."""
    policy, seeds = actor_of(gym_id).mode, [3, 1, 4, 1, 5]
    returns = micro.evaluate(policy, [micro.make_env(gym_id) for _ in seeds], seeds, torch.device("cpu"))
    np.testing.assert_allclose(returns, returns_one_by_one(policy, gym_id, seeds, scale), rtol=1e-6, atol=1e-6)
    assert returns[1] == returns[3]  # the same seed
    assert len(set(returns.tolist())) == 4


def test_evaluate_again_in_the_same_environments():
    policy, seeds, envs = actor_of("Hopper-v4").mode, [1, 2, 3], [micro.make_env("Hopper-v4") for _ in range(3)]
    first = micro.evaluate(policy, envs, seeds, torch.device("cpu"))
    other = micro.evaluate(policy, envs, [7, 8, 9], torch.device("cpu"))
    np.testing.assert_array_equal(micro.evaluate(policy, envs, seeds, torch.device("cpu")), first)
    assert (first != other).all()


def test_evaluate_takes_no_global_randomness():
    policy, envs = actor_of("Hopper-v4").mode, [micro.make_env("Hopper-v4") for _ in range(2)]
    before = torch.get_rng_state(), np.random.get_state()[1].tobytes(), np.random.get_state()[2], random.getstate()
    micro.evaluate(policy, envs, [1, 2], torch.device("cpu"))
    after = torch.get_rng_state(), np.random.get_state()[1].tobytes(), np.random.get_state()[2], random.getstate()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


@pytest.mark.parametrize("gym_id", ["NoSuchThing-v0", "CartPole-v1", "Hopper-v99"])
def test_an_environment_that_cannot_be_used(gym_id):
    """Absent, with discrete actions, or of a version that is not there: one line."""
    with pytest.raises(SystemExit) as error:
        micro.make_env(gym_id)
    assert gym_id in error.value.code and "\n" not in error.value.code
