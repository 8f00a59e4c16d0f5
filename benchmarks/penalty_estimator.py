"""How accurate is the penalty f(s, a), for how much work? Each way to estimate it, at checkpoints along training.

python benchmarks/penalty_estimator.py train -- --env-id hopper-medium-v2 --total-updates 20000 --checkpoint-every 4000
python benchmarks/penalty_estimator.py measure --run-dirs runs/<folder> --output results/penalty_estimator/hopper.json
python benchmarks/penalty_estimator.py plot results/penalty_estimator/*.json --output docs/penalty_estimator.png

`train` is micro.py with any of its flags, keeping actor and target critics of every checkpoint; any other run can be
measured at its last two. `measure` compares estimators on rows of the model's own rollouts, with the functions of
micro.py: what is measured is what trains.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import micro  # noqa: E402

PENALTIES = ("micro", "mobile")
# name -> family, --penalty-draws, --common-noise, and how often such draws are made and averaged
ESTIMATORS = {
    "independent 1": ("independent", 1, False, 1),
    "independent 2": ("independent", 2, False, 1),
    "independent 5": ("independent", 5, False, 1),
    "independent 10": ("independent", 10, False, 1),
    "common 1": ("common", 1, True, 1),
    "common 2": ("common", 1, True, 2),  # two shared draws that are no pair
    "antithetic 2": ("antithetic", 2, True, 1),
    "antithetic 4": ("antithetic", 4, True, 1),
    "means": ("means", 0, True, 1),
}
RELEASED = "independent 10"
METRICS = {"bias_percent": "|bias| of f, %", "rmse_percent": "RMSE of f, %", "rank_correlation": "1 − rank correlation"}


def train(flags: list[str]) -> None:
    """A run of micro.py that leaves an estimator-<update>.pt for each of its checkpoints."""
    write = micro.write_file

    def write_and_keep(path: Path, content: bytes | dict, **options) -> None:
        write(path, content, **options)
        if path.name == "checkpoint.pt" and "agent" in content and content["update"] > 0:
            kept = {part: content["agent"][part] for part in ("actor", "target_critics")}
            write(path.with_name(f"estimator-{content['update']}.pt"), kept | dict(update=content["update"]))

    micro.write_file = write_and_keep
    micro.main(micro.parse_args(flags))


def elite_values(args: micro.Args, networks, obs, act, times: int, rng: torch.Generator) -> torch.Tensor:
    """q of each elite as an update with these args computes it, averaged over `times` of them: (1, elites, batch)."""
    ensemble, actor, target_critics = networks
    total = 0.0
    for _ in range(times):
        noise = micro.draw_noise(args, len(obs), obs.shape[1], act.shape[1], rng)
        values = micro.uncertainty_set_values(
            ensemble, args.num_elites, actor, target_critics, obs, act, noise.set_state, noise.set_action
        )
        total = total + values.double().mean(0, keepdim=True)
    return total / times


def both_penalties(values: torch.Tensor) -> dict[str, np.ndarray]:
    return {kind: micro.penalty(kind, values, values[0, 0]).numpy() for kind in PENALTIES}


def accuracy(estimates: np.ndarray, reference: np.ndarray) -> dict:
    """Repeated estimates (repeats, rows) against the reference (rows,): the mean over repeats, and their std."""
    scale, columns = reference.mean(), {}
    columns["bias_percent"] = 100 * (estimates.mean(1) / scale - 1)
    columns["rmse"] = np.sqrt(np.square(estimates - reference).mean(1))
    columns["rmse_percent"] = 100 * columns["rmse"] / scale
    columns["rank_correlation"] = np.array([spearmanr(estimate, reference).statistic for estimate in estimates])
    means = {name: float(column.mean()) for name, column in columns.items()}
    return means | {f"{name}_std": float(column.std()) for name, column in columns.items()}


def measure_networks(args: micro.Args, networks, obs, act, reference_draws: int, repeats: int, rng) -> list[dict]:
    """One record for each penalty and estimator.

    The reference is made of antithetic draws that the elites share. Sharing changes no elite's own expectation, so both
    kinds of reference have the same limit; but mean - min of 1000 independent draws still has some of the very bias
    that is to be measured. The estimator "independent <reference_draws>" says how far the two are apart.
    """
    at_a_time = min(50, reference_draws)

    def f_of(draws: int, common: bool, times: int) -> dict[str, np.ndarray]:
        changed = dataclasses.replace(args, penalty_draws=draws, common_noise=common)
        return both_penalties(elite_values(changed, networks, obs, act, times, rng))

    many = (at_a_time, reference_draws // at_a_time)
    reference = f_of(many[0], True, many[1])
    estimates = {f"independent {reference_draws}": ("independent", reference_draws, [f_of(many[0], False, many[1])])}
    for name, (family, draws, common, times) in ESTIMATORS.items():
        again = range(repeats if draws > 0 else 1)  # the means have no noise
        estimates[name] = (family, max(1, draws * times), [f_of(draws, common, times) for _ in again])
    return [
        dict(penalty=kind, estimator=name, family=family, evaluations=draws * args.num_elites)
        | dict(reference_mean=float(reference[kind].mean()))
        | accuracy(np.stack([f[kind] for f in repeated]), reference[kind])
        for kind in PENALTIES
        for name, (family, draws, repeated) in estimates.items()
    ]


def measure_run(run_dir: Path, rows: int, reference_draws: int, repeats: int) -> list[dict]:
    """The records of every checkpoint that `train` kept in a run folder, or of the two that micro.py itself keeps."""
    args, device = micro.saved_args(run_dir), torch.device("cpu")
    gym_id = json.loads((run_dir / "args.json").read_text())["gym_id"]
    env = micro.make_env(gym_id)
    obs_dim, act_dim = env.observation_space.shape[0], env.action_space.shape[0]
    path = micro.find_dataset(args)
    data = torch.as_tensor(micro.load_dataset(path, env))
    ensemble = micro.load_dynamics(micro.read_tensors(run_dir / "dynamics.pt", device), obs_dim, act_dim, args, device)
    actor = micro.Actor(obs_dim, act_dim, args.hidden_size).requires_grad_(False)
    critics = micro.Critics(args.num_critics, obs_dim, act_dim, args.hidden_size).requires_grad_(False)
    kept = [*run_dir.glob("estimator-*.pt")] or [*run_dir.glob("checkpoint*.pt")]
    checkpoints = [saved for file in kept if (saved := micro.read_tensors(file, device)).get("update")]
    if not checkpoints:
        micro.fail(f"{run_dir} has no checkpoint of a trained policy")
    records = []
    for saved in sorted(checkpoints, key=lambda checkpoint: checkpoint["update"]):
        networks = saved.get("agent", saved)
        actor.load_state_dict(networks["actor"])
        critics.load_state_dict(networks["target_critics"])
        rng = micro.generator(device, args.seed, saved["update"])
        buffer = micro.RingBuffer(rows * args.rollout_length, data.shape[1], device)
        starts = data[torch.randint(len(data), (rows,), generator=rng), :obs_dim]
        micro.rollout(
            actor, ensemble, args.num_elites, micro.termination_of(gym_id), starts, args.rollout_length, buffer, rng
        )
        picks = torch.randperm(buffer.size, generator=rng)[:rows]
        obs, act = micro.unpack(buffer.rows[picks], obs_dim, act_dim)[:2]
        found = measure_networks(args, (ensemble, actor, critics), obs, act, reference_draws, repeats, rng)
        records += [dict(task=args.env_id, data=path.name, update=saved["update"]) | record for record in found]
        micro.say(f"{run_dir.name}, update {saved['update']}: f is {found[0]['reference_mean']:.4g}")
    return records


def at_least_as_accurate(records: list[dict], name: str) -> bool:
    """As the released code's setting: in bias, RMSE and rank correlation, at every checkpoint, for both penalties."""
    by_place = {(r["task"], r["update"], r["penalty"], r["estimator"]): r for r in records}
    pairs = [(r, by_place[(*place[:3], RELEASED)]) for place, r in by_place.items() if place[3] == name]
    return all(
        abs(ours["bias_percent"]) <= abs(theirs["bias_percent"])
        and ours["rmse"] <= theirs["rmse"]
        and ours["rank_correlation"] >= theirs["rank_correlation"]
        for ours, theirs in pairs
    )


def table(records: list[dict], kind: str) -> str:
    """Markdown: for each estimator and task the mean over checkpoints, and in brackets the smallest and largest."""
    tasks = list(dict.fromkeys(record["task"] for record in records))
    columns = [f"{task}: {metric}" for task in tasks for metric in ("bias %", "RMSE %", "rank correlation")]
    heads = ["draws per elite", "cost", *columns]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name in dict.fromkeys(record["estimator"] for record in records):
        cells = []
        for task in tasks:
            here = [r for r in records if (r["task"], r["penalty"], r["estimator"]) == (task, kind, name)]
            for metric, form in (("bias_percent", "+.1f"), ("rmse_percent", ".1f"), ("rank_correlation", ".3f")):
                values = [record[metric] for record in here]
                cells.append(f"{np.mean(values):{form}} ({min(values):{form}} … {max(values):{form}})")
        lines.append(f"| {name} | {here[0]['evaluations']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(records: list[dict], kind: str, output: Path) -> None:
    """A row of panels for each task: accuracy against work. A dot is a checkpoint, the larger the later."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [record for record in records if record["penalty"] == kind and record["estimator"] in ESTIMATORS]
    tasks = list(dict.fromkeys(record["task"] for record in records))
    figure, axes = plt.subplots(
        len(tasks), 3, figsize=(12, 3.6 * len(tasks)), layout="constrained", sharex=True, squeeze=False
    )
    for row, task in zip(axes, tasks):
        last = max(record["update"] for record in records if record["task"] == task)
        for axis, (metric, title) in zip(row, METRICS.items()):
            for number, family in enumerate(dict.fromkeys(record["family"] for record in records)):
                here = [record for record in records if (record["task"], record["family"]) == (task, family)]
                work = np.array([record["evaluations"] for record in here])
                error = np.array([record[metric] for record in here])
                error = 1 - error if metric == "rank_correlation" else abs(error)
                sizes = [60 * record["update"] / last for record in here]
                axis.scatter(work * 1.04 ** (number - 1.5), error, s=sizes, color=f"C{number}", alpha=0.5, linewidths=0)
                steps = np.unique(work)
                means = [error[work == step].mean() for step in steps]
                axis.plot(steps * 1.04 ** (number - 1.5), means, "-_", color=f"C{number}", markersize=12, label=family)
            axis.set(title=title, xscale="log", yscale="log", xlabel="next states valued per row")
            ticks = sorted({record["evaluations"] for record in records})
            axis.set_xticks(ticks, ticks, minor=False)
            axis.set_xticks([], minor=True)
            axis.grid(alpha=0.3)
        row[0].set_ylabel(next(record["data"] for record in records if record["task"] == task))
    axes[0, 2].legend(fontsize=8)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train([flag for flag in sys.argv[2:] if flag != "--"])
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("train", help="micro.py with the flags that follow, keeping what `measure` needs")
    command = commands.add_parser("measure")
    command.add_argument("--run-dirs", type=Path, nargs="+", required=True, help="run folders of `train` or micro.py")
    command.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    command.add_argument("--rows", type=int, default=2000, help="model rows per checkpoint")
    command.add_argument("--reference-draws", type=int, default=1000, help="draws per elite behind the reference")
    command.add_argument("--repeats", type=int, default=10, help="times that each noisy estimator is repeated")
    command.add_argument("--torch-threads", type=int, default=1)
    command = commands.add_parser("plot")
    command.add_argument("measured", type=Path, nargs="+", help="JSON files of `measure`")
    command.add_argument("--output", type=Path, required=True, help="the figure to write")
    command.add_argument("--penalty", choices=PENALTIES, default="micro")
    options = parser.parse_args()
    if options.command == "measure":
        torch.set_num_threads(options.torch_threads)
        sizes = dict(rows=options.rows, reference_draws=options.reference_draws, repeats=options.repeats)
        records = [record for run_dir in options.run_dirs for record in measure_run(run_dir, **sizes)]
        options.output.parent.mkdir(parents=True, exist_ok=True)
        content = sizes | dict(machine=micro.machine(torch.device("cpu")), records=records)
        micro.write_file(options.output, json.dumps(content, indent=1).encode())
    else:
        records = [record for path in options.measured for record in json.loads(path.read_text())["records"]]
        plot(records, options.penalty, options.output)
    for kind in PENALTIES:
        print(f"\n`--penalty {kind}`, mean over the checkpoints (smallest … largest)\n\n{table(records, kind)}")
    as_good = [name for name in ESTIMATORS if at_least_as_accurate(records, name)]
    print(f"\nat least as accurate as {RELEASED} at every checkpoint: {', '.join(as_good)}")
