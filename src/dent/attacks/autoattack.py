"""AutoAttack (Croce and Hein, 2020): suites of attacks without settings to tune, and what they leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from dent.attacks import findings
from dent.attacks.apgd import apgd, apgd_targeted
from dent.attacks.calls import Model, succeeds
from dent.attacks.checks import check_answer, check_attack, check_labels
from dent.attacks.fab import fab, fab_targeted
from dent.attacks.folded import folded
from dent.attacks.found import begin, depends_on_batch
from dent.attacks.losses import margin
from dent.attacks.reference import run_reference
from dent.attacks.result import AttackResult, Finding, SuiteResult
from dent.attacks.square import square
from dent.names import lookup

Watch = Callable[[int, int, str], None]
ATTACKS: dict[str, Callable[..., AttackResult]] = {
    "apgd-ce": partial(apgd, loss="ce"),
    "apgd-dlr": partial(apgd, loss="dlr"),
    "apgd-t": apgd_targeted,
    "fab": fab,
    "fab-t": fab_targeted,
    "square": square,
}
# The attacks of each version, in order, and what differs from their defaults.
VERSIONS: dict[str, dict[str, dict[str, int]]] = {
    "standard": {"apgd-ce": {}, "apgd-t": {}, "fab-t": {}, "square": {}},
    "plus": {
        "apgd-ce": {"restarts": 5},
        "apgd-dlr": {"restarts": 5},
        "fab": {"restarts": 5},
        "square": {},
        "apgd-t": {},
        "fab-t": {},
    },
    "rand": {"apgd-ce": {"draws": 20}, "apgd-dlr": {"draws": 20}},
}
# The standard version for L1 (Croce and Hein, 2021).
FOR_L1 = {"apgd-ce": {"restarts": 5}, "apgd-t": {"targets": 5}}


def autoattack(
    model: Model,
    inputs: Tensor,
    labels: Tensor,
    *,
    eps: float,
    norm: str = "linf",
    version: str = "standard",
    attacks: Sequence[str] | None = None,
    steps: int = 100,
    queries: int = 5000,
    batch_size: int | None = None,
    joint: bool | None = None,
    mask: Tensor | None = None,
    engine: str = "dent",
    seed: int = 0,
    watch: Watch | None = None,
) -> SuiteResult:
    """Attack with all of a version (`standard`, `plus`, `rand`), or with the `attacks` named.

    Each attack sees what the ones before it left, and the search runs on `folded(model)`; verdicts are
    the model's. A model that depends on its batch (`joint`; if not given, what the model says of itself)
    is attacked as it is, by every attack, with all of the batch.

    steps: of each run of a gradient attack. queries: of Square.
    batch_size: how many inputs are attacked at a time, if not all; has no meaning with `joint`.
    engine: "reference" runs `pyautoattack` instead, re-batching and all.
    watch: called with (attacks done, attacks, text) before each attack, for progress.

    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 4))
    >>> inputs = torch.rand(3, 3, 2, 2)
    >>> run = autoattack(model, inputs, model(inputs).argmax(1), eps=0.5, steps=10, queries=20)
    >>> run.broken.tolist(), list(run.attacks), run.findings
    ([True, True, True], ['apgd-ce', 'apgd-t', 'fab-t', 'square'], ())
    """
    chosen = suite(version, norm, attacks)
    joint = depends_on_batch(model) if joint is None else joint
    if joint and batch_size is not None:
        raise ValueError("batch_size splits the batch that a joint attack keeps together; leave it out")
    lookup("engine", engine, dict.fromkeys(("dent", "reference")))
    check_attack(inputs, labels, eps=eps, norm=norm, mask=mask, steps=steps, queries=queries)
    seen = known_findings(model, inputs, labels, random=version == "rand")
    if engine == "reference":
        if mask is not None or watch is not None:
            raise ValueError("the reference knows no mask and no watch; use engine='dent'")
        return run_reference(
            model, inputs, labels, eps=eps, norm=norm, version=version, attacks=attacks, steps=steps,
            queries=queries, batch_size=batch_size or len(inputs), seed=seed, findings=seen,
        )  # fmt: skip
    names = {finding.name for finding in seen}
    if "probabilities" in names:
        model = partial(_logarithm, model)
    draws = max(settings.get("draws", 1) for settings in chosen.values())
    calls, found, logits = begin(
        model, inputs, labels, eps=eps, norm=norm, draws=draws, joint=joint, mask=mask
    )
    quick = model if joint or "optimisation inside" in names else folded(model, inputs)
    broken: dict[str, Tensor] = {}
    for done, (name, settings) in enumerate(chosen.items()):
        if watch:
            watch(done, len(chosen), f"{name}, {int((~found.broken).sum())} of {len(inputs)} stand")
        settings = _fitting(name, settings, steps=steps, queries=queries, classes=logits.shape[1])
        attack = partial(ATTACKS[name], eps=eps, norm=norm, joint=joint, seed=seed, **settings)
        broken[name] = torch.zeros_like(found.broken)
        everyone = torch.arange(len(inputs), device=inputs.device)
        for at in everyone.split(batch_size or max(len(inputs), 1)):
            given = found.mask[at] & (joint | ~found.broken[at])
            if not given.any():
                continue
            result = attack(quick, inputs[at], found.labels[at], mask=given)
            calls.queries += result.queries
            calls.gradients += result.gradients
            answer = calls.value(result.inputs, partial(margin, labels=found.labels[at]))
            broken[name][at] = given & succeeds(answer.logits, found.labels[at])
            rows = torch.ones_like(given) if joint else given  # a joint batch is kept whole
            found.keep(at[rows], result.inputs[rows], answer.values[rows], broken[name][at][rows])
    worst = found.broken.clone()
    after = findings.square_is_stronger(broken)
    result = found.result(calls)
    return SuiteResult(
        **vars(result), broken=worst, attacks=broken, findings=(*seen, *([after] if after else []))
    )


def suite(version: str, norm: str, attacks: Sequence[str] | None = None) -> dict[str, dict[str, int]]:
    """The attacks of a version in their order, with their settings; or those named, as in it."""
    chosen = lookup("version", version, VERSIONS)
    if version == "standard" and norm == "l1":
        chosen = {name: FOR_L1.get(name, {}) for name in chosen}
    if attacks is None:
        return chosen
    if not attacks:
        raise ValueError(f"expected one attack or more of: {', '.join(ATTACKS)}")
    for name in attacks:
        lookup("attack", name, ATTACKS)
    return {name: chosen.get(name, {}) for name in attacks}


def known_findings(
    model: Model, inputs: Tensor, labels: Tensor, *, random: bool = False
) -> tuple[Finding, ...]:
    """What can be seen before any attack; of a model that is known to be random, the rest."""
    with torch.no_grad():
        logits = model(inputs)
    check_answer(logits, inputs, first=False)
    check_labels(labels, logits.shape[1])
    if not len(inputs):
        return ()
    softmax = findings.probabilities(logits)
    seen = [
        None if random else findings.randomised(model, inputs),
        softmax,
        findings.zero_gradient(partial(_logarithm, model) if softmax else model, inputs, labels.long()),
        findings.optimisation_inside(model, inputs),
    ]
    return tuple(finding for finding in seen if finding)


def _fitting(
    name: str, settings: dict[str, int], *, steps: int, queries: int, classes: int
) -> dict[str, int]:
    """The settings of one attack, with the budget, and no more targets than there are classes."""
    settings = settings | ({"queries": queries} if name == "square" else {"steps": steps})
    if "targets" in settings:
        settings["targets"] = min(settings["targets"], classes - 1)
    return settings


def _logarithm(model: Model, points: Tensor) -> Tensor:
    """Logits, but for a constant, of a model that returns probabilities."""
    probabilities = model(points)
    return probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()
