"""Denying updates (the paper's section 4.4): attack the static model, submit to the defense."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from dent.attacks.adaptive.protocol import GradientAttack
from dent.attacks.adaptive.submission import strongest, transferred
from dent.attacks.apgd import apgd, apgd_targeted
from dent.attacks.calls import Model
from dent.attacks.result import AttackResult
from dent.names import lookup

OFFLINE: dict[str, GradientAttack] = {
    "apgd-ce": partial(apgd, loss="ce"),
    "apgd-dlr": partial(apgd, loss="dlr"),
    "apgd-t": apgd_targeted,
}


def denying_updates(
    defense: Model,
    static: Model,
    inputs: Tensor,
    labels: Tensor,
    *,
    eps: float,
    norm: str = "linf",
    attacks: Sequence[str] = ("apgd-ce", "apgd-t"),
    steps: int = 100,
    mask: Tensor | None = None,
    seed: int = 0,
) -> AttackResult:
    """The strongest of the `offline` attacks; its batch is kept whole.

    By the time the defense may update, the adversary's optimization is complete.

    attacks: names of `OFFLINE`.
    """
    results = offline(
        defense, static, inputs, labels,
        eps=eps, norm=norm, attacks=attacks, steps=steps, mask=mask, seed=seed,
    )  # fmt: skip
    return strongest(results.values(), mask)


def offline(
    defense: Model,
    static: Model,
    inputs: Tensor,
    labels: Tensor,
    *,
    eps: float,
    norm: str = "linf",
    attacks: Sequence[str] = ("apgd-ce", "apgd-t"),
    steps: int = 100,
    mask: Tensor | None = None,
    seed: int = 0,
) -> dict[str, AttackResult]:
    """By attack, its points of highest loss on the static model, submitted to the defense.

    Of inputs that the static model withstands too: max-loss points are what transfers (Croce et al.,
    2022). That is why nobody leaves the search (`joint`), though the static model may allow it.
    """
    if not attacks:
        raise ValueError(f"expected one attack or more, of: {', '.join(OFFLINE)}; got none")
    chosen = {name: lookup("offline attack", name, OFFLINE) for name in attacks}
    results = {}
    for name, attack in chosen.items():
        found = attack(
            static, inputs, labels, eps=eps, norm=norm, steps=steps, joint=True, mask=mask, seed=seed
        )
        results[name] = transferred(defense, found, labels)
    return results
