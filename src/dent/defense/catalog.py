"""All defenses by name: the presets of dent's method, and the methods beside it."""

from __future__ import annotations

from typing import Any, NamedTuple

from dent.defense.anti_adversary import AntiAdversary
from dent.defense.bn_mix import BnMix
from dent.defense.defended import Method
from dent.defense.dent.settings import PRESETS, Settings
from dent.defense.eata import Eata
from dent.defense.energy import Energy
from dent.defense.hedge import Hedge
from dent.defense.lame import Lame
from dent.defense.medbn import MedBn
from dent.defense.memo import Memo
from dent.defense.sar import Sar
from dent.defense.views import Crops, Views
from dent.names import lookup


class Entry(NamedTuple):
    """A defense of the list: its settings, what it does, and who published it."""

    settings: Settings | Method
    note: str
    source: str


DEFENSES: dict[str, Entry] = {
    "static": Entry(PRESETS["static"], "the model as it is", ""),
    "norm": Entry(
        PRESETS["norm"], "statistics of the test batch, no gradient", "Schneider et al., 2020"
    ),
    "blur": Entry(PRESETS["blur"], "static Gaussian smoothing of the input", "dent, section 3.2"),
    "tent": Entry(PRESETS["tent"], "online: one update per batch, carried over", "Wang et al., 2021"),
    "dent": Entry(PRESETS["dent"], "batch-wise, for adversarially trained models", "dent, Table 1"),
    "dent+": Entry(
        PRESETS["dent+"],
        "sample-wise, for adversarially trained models; needs batches of several classes",
        "dent, Table 1",
    ),
    "dent+solo": Entry(
        PRESETS["dent+solo"],
        "dent+ with plain entropy: adapts to each input alone, even to a single one",
        "this project",
    ),
    "dent-nominal": Entry(
        PRESETS["dent-nominal"],
        "batch-wise, test statistics and learned smoothing, for nominal models",
        "dent, Table 4",
    ),
    "views": Entry(
        Views(), "mean of the logits over the image, its mirror and shifts", "Pérez et al., 2021"
    ),
    "crops": Entry(
        Crops(), "mean over the framed image, its mirror and four shifts: six forwards", "this project"
    ),
    "memo": Entry(
        Memo(), "per input, lower the entropy of the mean prediction over views", "Zhang et al., 2022"
    ),
    "anti-adversary": Entry(
        AntiAdversary(), "move each input toward its predicted class", "Alfarra et al., 2022"
    ),
    "hedge": Entry(
        Hedge(), "move each input up the sum of all classes' cross-entropies", "Wu et al., 2021"
    ),
    "energy": Entry(Energy(), "move each input down the energy -logsumexp(logits)", "ET3, 2026"),
    "lame": Entry(
        Lame(), "similar inputs of a batch get similar predictions, no gradient", "Boudiaf et al., 2022"
    ),
    "medbn": Entry(MedBn(), "statistics of the test batch by the median", "Park et al., 2024"),
    "sar": Entry(Sar(), "lower the entropy of sure predictions, sharpness-aware", "Niu et al., 2023"),
    "eata": Entry(Eata(), "lower the entropy of sure and diverse predictions", "Niu et al., 2022"),
    "bn-mix": Entry(
        BnMix(), "statistics of training and of the batch, mixed by size", "Schneider et al., 2020"
    ),
}


def make_defense_settings(name: str, **overrides: Any) -> Settings | Method:
    """Return the settings of a defense, some of them replaced.

    >>> make_defense_settings("hedge", steps=3).steps
    3
    """
    return lookup("defense", name, DEFENSES).settings.replace(**overrides)
