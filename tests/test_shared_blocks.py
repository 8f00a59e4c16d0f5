"""Each script can be copied out and run alone; what scripts share is copied on purpose and held identical here."""

import ast
import dataclasses
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py"))
TRAINERS = ("micro", "rambo_baseline")
# Arguments that both trainers have, with another default (or, where it is named, another meaning) in the two papers.
OTHER_DEFAULT = {"dynamics_lr", "dynamics_patience", "model_ratio", "total_updates"}
OTHER_DOCSTRING = {"total_updates", "actor_lr"}  # only MICRO anneals the actor's rate


def shared_blocks(script: str) -> dict[str, str]:
    text = (ROOT / f"{script}.py").read_text()
    blocks = re.findall(r"^# === shared: ([\w ]+) ===\n(.*?)^# === end shared ===$", text, re.M | re.S)
    assert len(blocks) == text.count("# === shared:") == text.count("# === end shared ===")
    return dict(blocks)


def field_docstrings(script: str) -> dict[str, str]:
    tree = ast.parse((ROOT / f"{script}.py").read_text())
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args")
    return {
        field.target.id: text.value.value
        for field, text in zip(body, body[1:])
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def test_copies_of_a_shared_block_are_identical():
    places = {}
    for script in SCRIPTS:
        for name, text in shared_blocks(script).items():
            places.setdefault(name, {})[script] = text
    assert places
    for name, copies in places.items():
        assert len(copies) > 1, f"'{name}' is marked shared but stands in one script only"
        assert len(set(copies.values())) == 1, f"the copies of '{name}' in {sorted(copies)} differ"


def test_the_trainers_share_all_that_is_not_the_paper():
    assert set(shared_blocks("micro")) == set(shared_blocks("rambo_baseline"))


def test_common_arguments_mean_the_same():
    first, second = (importlib.import_module(name).Args for name in TRAINERS)
    first_docs, second_docs = map(field_docstrings, TRAINERS)
    defaults = {field.name: field.default for field in dataclasses.fields(first)}
    common = [field for field in dataclasses.fields(second) if field.name in defaults]
    assert len(common) > 30
    assert {field.name for field in common if field.default != defaults[field.name]} == OTHER_DEFAULT
    assert {field.name for field in common if first_docs[field.name] != second_docs[field.name]} == OTHER_DOCSTRING


@pytest.mark.parametrize("script", TRAINERS)
def test_every_argument_has_a_docstring(script):
    names = {field.name for field in dataclasses.fields(importlib.import_module(script).Args)}
    assert set(field_docstrings(script)) == names


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_script_imports_a_sibling(script):
    for node in ast.walk(ast.parse((ROOT / f"{script}.py").read_text())):
        modules = [node.module] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        assert not {str(module).split(".")[0] for module in modules} & set(SCRIPTS)


def test_the_shipped_task_is_shortened_alike():
    first, second = (importlib.import_module(name).LITE_PRESET for name in TRAINERS)
    common = first.keys() & second.keys()
    assert first.keys() - common == {"beta", "model_ratio"} and second.keys() == common  # RAMBO's ratio is 0.5 anyway
    assert {name: first[name] for name in common} == second
    assert importlib.import_module("rambo_baseline").Args.model_ratio == first["model_ratio"]
