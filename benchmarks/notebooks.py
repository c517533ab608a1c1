"""Run the notebooks of `examples`, and store what their cells print and draw.

    python benchmarks/notebooks.py            # write the outputs into the notebooks
    python benchmarks/notebooks.py --clear    # take them out

Cells run in this process, in their order, without Jupyter. Needs the extra `demo`.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))


def run_notebook(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return the notebook with the outputs of its cells: text, and pictures where they call plt.show."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names: dict[str, Any] = {"__name__": "__main__"}
    cells = []
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "code":
            cells.append(cell)
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
        outputs: list[dict[str, Any]] = []
        if text := printed.getvalue():
            lines = text.splitlines(keepends=True)
            outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
        for figure in map(plt.figure, plt.get_fignums()):
            png = io.BytesIO()
            figure.savefig(png, format="png", dpi=80)
            picture = base64.b64encode(png.getvalue()).decode()
            data = {"image/png": picture, "text/plain": ["<Figure>"]}
            outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
        plt.close("all")
        cells.append(cell | {"outputs": outputs})
    return notebook | {"cells": cells}


def clear_notebook(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return the notebook without outputs."""
    return notebook | {
        "cells": [cell | {"outputs": []} if "outputs" in cell else cell for cell in notebook["cells"]]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clear", action="store_true", help="take the outputs out")
    change = clear_notebook if parser.parse_args().clear else run_notebook
    for path in NOTEBOOKS:
        notebook = change(json.loads(path.read_text("utf-8")))
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")
        print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
