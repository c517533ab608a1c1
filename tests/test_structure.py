"""The rooms of the house know only those that they may know."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "dent"

# Modules that belong to no room: any room may import them, and they import none.
GROUND = {
    "clusters",
    "declared",
    "devices",
    "flags",
    "intervals",
    "loggers",
    "names",
    "seeds",
    "storage",
}
GROUND |= {"precision", "texts", "theme"}
# The other rooms that each room may import; a room that is not here may not exist.
MAY_IMPORT: dict[str, set[str]] = {
    "defense": set(),
    "testing": {"attacks", "defense"},
    "attacks": set(),
    "models": set(),
    "data": set(),
    "training": {"attacks", "data", "models"},
    "evaluation": {"attacks", "data", "defense", "models", "testing"},
    "paper": {"data", "defense", "evaluation", "models"},
    "report": {"evaluation", "paper", "training"},
    "serving": {"data", "defense", "models", "testing"},
    "cli": {"data", "defense", "evaluation", "models", "paper", "report", "serving", "training"},
    "__init__": {"api"},
    "api": {"attacks", "data", "defense", "evaluation", "models", "report", "testing"},
    "__main__": {"cli"},
}
# The packages that a room may import besides the standard library; extras are imported where needed.
OUTSIDE: dict[str, set[str]] = {
    "clusters": {"psutil", "ray", "torch"},
    "declared": {"pydantic"},
    "devices": {"torch"},
    "flags": {"pydantic", "typer"},
    "loggers": {"torch", "wandb"},
    "precision": {"torch"},
    "seeds": {"numpy", "torch"},
    "storage": {"filelock", "platformdirs"},
    "defense": {"pydantic", "torch"},
    "testing": {"torch"},
    "attacks": {"pyautoattack", "torch"},
    "models": {"huggingface_hub", "robustbench", "safetensors", "timm", "torch", "torchvision"},
    "data": {"PIL", "numpy", "torch"},
    "training": {"pydantic", "torch"},
    "evaluation": {"numpy", "pandas", "pydantic", "ray", "torch", "yaml"},
    "paper": {"pydantic", "torch", "yaml"},
    "report": {"jinja2", "markupsafe", "rich", "vl_convert"},
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
    assert inside & rooms <= (set() if room in GROUND else MAY_IMPORT[room] | {room})
    if room not in ("__init__", "__main__", "cli"):
        outside = {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names)
        assert outside <= OUTSIDE.get(room, set()) | {"dent"}
    assert len(path.read_text().splitlines()) <= 400


def test_importing_dent_loads_no_extra() -> None:
    loaded = list_loaded("import dent; dent.defend")
    assert "torch" in loaded
    extras = {"typer", "rich", "scipy", "sklearn", "foolbox", "torchattacks", "art", "pyautoattack"}
    extras |= {"PIL", "timm", "torchvision", "robustbench", "tensorboard", "wandb", "ray", "pandas"}
    extras |= {"vl_convert", "fastapi", "jinja2", "prometheus_client", "huggingface_hub", "safetensors"}
    assert not loaded & extras


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["evalute"]])
def test_the_command_line_starts_without_torch(arguments: list[str]) -> None:
    script = (
        f"import dent.cli; sys.argv[1:] = {arguments!r}\ntry:\n dent.cli.main()\nexcept SystemExit: pass"
    )
    loaded = list_loaded(script)
    assert "typer" in loaded
    assert not loaded & {"torch", "numpy", "jinja2", "yaml", "vl_convert"}


def list_loaded(script: str) -> set[str]:
    """Return the packages that a script loads."""
    script = f"import sys\n{script}\nprint('loaded', *{{name.split('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(run.stdout.splitlines()[-1].split()[1:])
