"""The verbs of the command line, without the modules that they load."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verb:
    """A verb of the command line. The module of its function is imported when the verb is run.

    function: where it is, as module:function.
    summary: the first paragraph of the function's docstring, for `dent --help`.
    """

    function: str
    summary: str


VERBS = {
    "evaluate": Verb(
        "dent.cli.evaluate:evaluate",
        "Attack models with and without defenses, and report what is left of their accuracy.",
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
    ),
    "report": Verb(
        "dent.cli.reproduce:report",
        "Write the report of a run again, as one HTML file, and its plots for papers.",
    ),
    "serve": Verb(
        "dent.cli.serve:serve",
        "Serve a defended model over HTTP, on Ray Serve, until Ctrl-C or SIGTERM.",
    ),
    "train": Verb("dent.cli.train:train", "Train a model by a recipe."),
}
