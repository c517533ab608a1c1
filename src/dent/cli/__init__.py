"""The command line: verbs only. The rooms that they call do the work."""

from __future__ import annotations

import sys
from dataclasses import dataclass

__all__ = ["VERBS", "main"]

INTERRUPTED = 130  # exit code after an interrupt, as in shells
DEBUG = "--debug"


@dataclass(frozen=True)
class Verb:
    """A verb of the command line. The module of its function is imported when the verb is run.

    function: where it is, as module:function.
    summary: the first paragraph of the function's docstring, for `dent --help`.
    resumes: True if the same command goes on where it was stopped.
    """

    function: str
    summary: str
    resumes: bool = False


VERBS = {
    "evaluate": Verb(
        "dent.cli.evaluate:evaluate",
        "Attack models with and without defenses, and report what is left of their accuracy.",
        resumes=True,
    ),
    "attack": Verb(
        "dent.cli.evaluate:attack",
        "Run one attack on one model, and save the adversarial images as an .npz file.",
    ),
    "compare": Verb(
        "dent.cli.evaluate:compare",
        "Compare two runs on the images that both have: paired differences with intervals.",
    ),
    "list": Verb(
        "dent.cli.lists:list_",
        "List defenses, settings of dent, models, data, recipes, suites or attacks by name.",
    ),
    "data": Verb(
        "dent.cli.lists:data", "Find or download a data set, verify it, and print where it is."
    ),
    "reproduce": Verb(
        "dent.cli.reproduce:reproduce",
        "Measure the numbers of the paper's tables and figures, and print them beside the published "
        "ones.",
        resumes=True,
    ),
    "report": Verb(
        "dent.cli.reproduce:report",
        "Write the report of a run again, as one HTML file, and its plots for papers.",
    ),
    "serve": Verb(
        "dent.cli.serve:serve",
        "Serve a defended model over HTTP, on Ray Serve, until Ctrl-C or SIGTERM.",
    ),
    "train": Verb("dent.cli.train:train", "Train a model by a recipe.", resumes=True),
}


def main() -> None:
    """Run the command line. A mistake of the user becomes one line on stderr and exit code 2.

    `--debug` may stand anywhere. All modules are imported within, so that an interrupt is one line
    from the first moment on.
    """
    arguments = [one for one in sys.argv[1:] if one != DEBUG]
    try:
        from dent.cli.app import run_app

        sys.exit(run_app(arguments, debug=DEBUG in sys.argv[1:]))
    except KeyboardInterrupt:
        resumes = any(VERBS[one].resumes for one in arguments[:1] if one in VERBS)
        print(f"dent: stopped{'; the same command goes on' if resumes else ''}", file=sys.stderr)
        sys.exit(INTERRUPTED)
