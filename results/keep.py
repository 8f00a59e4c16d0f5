"""What is kept in this repository of runs: progress.csv and result.json of the finished ones, in one folder each.

python results/keep.py runs/sweep results/hopper-medium-replay-lite
"""

import json
import shutil
import sys
from pathlib import Path

runs_root, destination = map(Path, sys.argv[1:])
for path in sorted(runs_root.rglob("result.json")):
    folder, result = destination / path.parent.name.rsplit("__", 1)[0], json.loads(path.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("dataset_path", "dynamics_path"):  # paths of one machine mean nothing elsewhere
        if result["args"][name]:
            result["args"][name] = Path(result["args"][name]).name
    result["args"]["runs_root"] = "runs"
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    shutil.copy(path.with_name("progress.csv"), folder)
    print(folder)
