"""The README's figures, from files in this repository.

python results/plot.py curves results/hopper-medium-regen --behaviour 41.4
python results/plot.py histogram data/hopper-medium-replay-lite.hdf5 results/hopper-medium-replay-lite/returns.png
"""

import argparse
import csv
from pathlib import Path

import h5py
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

PANELS = {  # column of progress.csv -> title
    "score": "normalised score, 10 episodes",
    "data_q": "Q(s, π(s)) at data states (dashed: return in the model)",
    "f": "penalty f on model rows",
    "value_gap": "value gap",
}


def curves(folder: Path, behaviour: float | None, runs: str) -> Path:
    """One line for the progress.csv of each run in the folder, named after the run's."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for path in sorted(folder.glob(f"{runs}/progress.csv")):
        with open(path) as file:
            rows = list(csv.DictReader(file))
        columns = {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}
        for axis, (name, title) in zip(axes.flat, PANELS.items()):
            if name in columns:
                line = axis.plot(columns["update"], columns[name], label=path.parent.name)[0]
            if name == "data_q":
                model_return = columns["data_q"] - columns["value_gap"]
                axis.plot(columns["update"], model_return, "--", color=line.get_color(), linewidth=1)
            axis.set(title=title, xlabel="updates")
            axis.grid(alpha=0.3)
    if behaviour is not None:
        axes[0, 0].axhline(behaviour, color="black", linestyle=":", label="behaviour policy")
    axes[0, 0].legend(fontsize=8)
    figure.savefig(folder / "curves.png", dpi=110)
    return folder / "curves.png"


def histogram(dataset: Path, output: Path) -> Path:
    """Returns of the whole episodes of a D4RL-format file."""
    with h5py.File(dataset, "r") as file:
        ends = np.flatnonzero(file["terminals"][()].ravel().astype(bool) | file["timeouts"][()].ravel().astype(bool))
        totals = np.concatenate([[0.0], np.cumsum(file["rewards"][()].ravel(), dtype=np.float64)])
    returns = np.diff(totals[np.concatenate([[0], ends + 1])])
    figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
    axis.hist(returns, bins=40)
    axis.set(xlabel="return", ylabel="episodes", title=f"{dataset.stem}: {len(returns)} episodes, mean {returns.mean():.0f}")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    return output


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("curves")
    command.add_argument("folder", type=Path)
    command.add_argument("--behaviour", type=float, help="score of the policy that made the data")
    command.add_argument("--runs", default="*", help="pattern of the runs' names")
    command = commands.add_parser("histogram")
    command.add_argument("dataset", type=Path)
    command.add_argument("output", type=Path)
    args = parser.parse_args()
    if args.command == "curves":
        print(curves(args.folder, args.behaviour, args.runs))
    else:
        print(histogram(args.dataset, args.output))
