"""The dataset that ships: what the README says of it, and that the first command finds it."""

import h5py
import numpy as np

import micro

PATH = micro.SHIPPED / "hopper-medium-replay-lite.hdf5"


def test_default_task_is_the_shipped_one_and_needs_no_network():
    args = micro.parse_args([])
    assert args.env_id == PATH.stem and micro.find_dataset(args) == PATH and args.env_id in micro.known_tasks()


def test_size_and_loading():
    assert PATH.stat().st_size <= 15e6
    rows = micro.load_dataset(PATH, micro.make_env("Hopper-v4"))
    assert rows.shape[0] >= 100_000 and rows.shape[1] == 2 * 11 + 3 + 2
    assert np.abs(rows[:, 11:14]).max() <= 1


def test_attributes_agree_with_the_rows():
    with h5py.File(PATH, "r") as file:
        ends, rewards, attributes = file["terminals"][()] | file["timeouts"][()], file["rewards"][()], dict(file.attrs)
    returns, total = [], 0.0
    for reward, end in zip(rewards, ends):
        total += float(reward)
        if end:
            returns.append(total)
            total = 0.0
    assert attributes["env_id"] == "Hopper-v4" and attributes["quality"] == "medium-replay"
    assert attributes["episodes"] == len(returns)
    np.testing.assert_allclose(attributes["behaviour_return_mean"], np.mean(returns), rtol=1e-5)
    np.testing.assert_allclose(attributes["behaviour_return_std"], np.std(returns), rtol=1e-5)
    np.testing.assert_allclose(attributes["behaviour_score"], micro.normalised_score(np.mean(returns), "Hopper-v4"), rtol=1e-5)


def test_model_and_simulator_agree_where_an_episode_ends():
    """A row is terminal in the data exactly where the model would end a rollout."""
    rows = micro.load_dataset(PATH, micro.make_env("Hopper-v4"))
    _, _, _, next_obs, terminal = micro.unpack(micro.torch.as_tensor(rows), 11, 3)
    ended = micro.TERMINATION["Hopper"](next_obs)
    assert (ended != terminal.bool()).sum() <= 2  # float32 rounding at a bound
    assert terminal.sum() > 500
