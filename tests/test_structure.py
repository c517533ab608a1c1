"""The rooms of the house know only those that they may know."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "dent"

# What each room may import of the others; a room that is not here may not exist.
MAY_IMPORT: dict[str, set[str]] = {
    "names": set(),
    "fields": set(),
    "texts": set(),
    "seeds": set(),
    "storage": set(),
    "intervals": set(),
    "clusters": set(),
    "theme": set(),
    "flags": {"fields"},
    "loggers": {"names"},
    "defense": {"fields", "names", "texts"},
    "attacks": {"names", "seeds"},
    "models": {"intervals", "names", "storage"},
    "data": {"names", "storage"},
    "training": {"attacks", "data", "fields", "intervals", "loggers", "models", "names"}
    | {"seeds", "storage"},
    "evaluation": {"attacks", "clusters", "data", "defense", "fields", "intervals", "models", "names"}
    | {"seeds", "storage", "texts"},
    "paper": {"data", "defense", "evaluation", "fields", "models", "names", "seeds", "storage"}
    | {"texts"},
    "report": {"evaluation", "paper", "storage", "theme", "training"},
    "serving": {"clusters", "data", "defense", "fields", "models", "names", "theme"},
    "cli": {
        "data",
        "defense",
        "evaluation",
        "fields",
        "flags",
        "loggers",
        "models",
        "paper",
        "report",
        "serving",
        "training",
    },
    "__init__": {"attacks", "data", "defense", "evaluation", "models"},
    "__main__": {"cli"},
}
# What a room may import from outside the standard library; extras only where they are asked for.
OUTSIDE: dict[str, set[str]] = {
    "names": set(),
    "fields": set(),
    "texts": set(),
    "storage": set(),
    "intervals": set(),
    "clusters": {"ray"},
    "theme": set(),
    "loggers": {"torch", "wandb"},
    "seeds": {"numpy", "torch"},
    "defense": {"torch"},
    "attacks": {"pyautoattack", "torch"},
    "models": {"robustbench", "timm", "torch", "torchvision"},
    "data": {"PIL", "numpy", "torch"},
    "training": {"torch"},
    "evaluation": {"numpy", "pandas", "ray", "torch", "yaml"},
    "paper": {"torch", "yaml"},
    "report": {"rich", "vl_convert"},
    "serving": {"PIL", "fastapi", "numpy", "prometheus_client", "pydantic", "python_multipart"}
    | {"ray", "starlette", "torch"},
}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {path}"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FILES = {str(path.relative_to(SOURCE)): path for path in sorted(SOURCE.rglob("*.py"))}


@pytest.mark.parametrize("name", FILES)
def test_import_directions(name: str) -> None:
    path, room = FILES[name], Path(name).with_suffix("").parts[0]
    inside = {name.split(".")[1] for name in imports(path) if name.startswith("dent.")}
    rooms = {other for other in MAY_IMPORT if other != "__init__"}
    assert inside & rooms <= MAY_IMPORT[room] | {room}
    if room in OUTSIDE:
        outside = {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names)
        assert outside <= OUTSIDE[room] | {"dent"}
    assert len(path.read_text().splitlines()) <= 300


def test_importing_dent_loads_no_extra() -> None:
    script = "import sys, dent; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert "torch" in loaded
    extras = {"typer", "rich", "scipy", "sklearn", "foolbox", "torchattacks", "art", "pyautoattack"}
    extras |= {"PIL", "timm", "torchvision", "robustbench", "tensorboard", "wandb", "ray", "pandas"}
    extras |= {"vl_convert", "fastapi", "pydantic", "prometheus_client"}
    assert not loaded & extras
