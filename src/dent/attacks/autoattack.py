"""AutoAttack (Croce and Hein, 2020): suites of attacks without settings to tune, and what they leave."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from dent.attacks import findings
from dent.attacks.apgd import apgd, apgd_targeted
from dent.attacks.calls import Model, succeeds
from dent.attacks.checks import check_answer, check_attack, check_labels, check_model, check_numbers
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
    batch_size: how many inputs are attacked at a time, if not all; of no meaning with `joint`.
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
    check_numbers(batch_size=batch_size)
    if joint and batch_size is not None:
        raise ValueError("batch_size splits the batch that a joint attack keeps together; leave it out")
    lookup("engine", engine, dict.fromkeys(("dent", "reference")))
    check_model(model)
    check_attack(inputs, labels, eps=eps, norm=norm, mask=mask, steps=steps, queries=queries)
    size = batch_size or max(len(inputs), 1)
    if engine == "reference":
        if mask is not None or watch is not None:
            raise ValueError("the reference knows no mask and no watch; use engine='dent'")
        seen = known_findings(model, inputs[:size], labels[:size], random=version == "rand")
        return run_reference(
            model, inputs, labels, eps=eps, norm=norm, version=version, attacks=attacks, steps=steps,
            queries=queries, batch_size=size, seed=seed, findings=seen,
        )  # fmt: skip
    budget = {
        name: settings | ({"queries": queries} if name == "square" else {"steps": steps})
        for name, settings in chosen.items()
    }
    mask = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask
    batches = list(zip(*(part.split(size) for part in (inputs, labels, mask)), strict=True))
    done = itertools.count()

    def move(text: str) -> None:
        if watch:
            watch(next(done), len(batches) * len(budget), text)

    run = partial(
        _run, model, attacks=budget, eps=eps, norm=norm, joint=joint, seed=seed,
        random=version == "rand", watch=move,
    )  # fmt: skip
    return joined([run(*batch) for batch in batches])


def _run(
    model: Model,
    inputs: Tensor,
    labels: Tensor,
    mask: Tensor,
    *,
    attacks: dict[str, dict[str, int]],
    eps: float,
    norm: str,
    joint: bool,
    seed: int,
    random: bool,
    watch: Callable[[str], None],
) -> SuiteResult:
    """The attacks on one batch."""
    seen = known_findings(model, inputs, labels, random=random)
    names = {finding.name for finding in seen}
    if "probabilities" in names:
        model = partial(_logarithm, model)
    draws = max(settings.get("draws", 1) for settings in attacks.values())
    calls, found, logits = begin(
        model, inputs, labels, eps=eps, norm=norm, draws=draws, joint=joint, mask=mask
    )
    quick = model if joint or "optimization inside" in names else folded(model, inputs)
    broken: dict[str, Tensor] = {}
    for name, settings in attacks.items():
        watch(f"{name}, {int((~found.broken).sum())} of {len(inputs)} stand")
        broken[name] = torch.zeros_like(found.broken)
        given = found.mask if joint else found.mask & ~found.broken
        if not given.any():
            continue
        if "targets" in settings:
            settings = settings | {"targets": min(settings["targets"], logits.shape[1] - 1)}
        result = ATTACKS[name](
            quick,
            inputs,
            found.labels,
            eps=eps,
            norm=norm,
            joint=joint,
            mask=given,
            seed=seed,
            **settings,
        )
        calls.queries += result.queries
        calls.gradients += result.gradients
        answer = calls.value(result.inputs, partial(margin, labels=found.labels))
        broken[name] = given & succeeds(answer.logits, found.labels)
        rows = found.open() if joint else given.nonzero().squeeze(1)  # a joint batch is kept whole
        found.keep(rows, result.inputs[rows], answer.values[rows], broken[name][rows])
    worst = found.broken.clone()
    return SuiteResult(**vars(found.result(calls)), broken=worst, attacks=broken, findings=seen)


def joined(runs: Sequence[SuiteResult]) -> SuiteResult:
    """The runs on several batches as one; of each finding, the first figures."""
    attacks = {name: torch.cat([run.attacks[name] for run in runs]) for name in runs[0].attacks}
    seen = {finding.name: finding for run in reversed(runs) for finding in run.findings}
    after = findings.square_is_stronger(attacks)
    return SuiteResult(
        torch.cat([run.inputs for run in runs]),
        torch.cat([run.success for run in runs]),
        torch.cat([run.logits for run in runs]),
        sum(run.queries for run in runs),
        sum(run.gradients for run in runs),
        broken=torch.cat([run.broken for run in runs]),
        attacks=attacks,
        findings=(*seen.values(), *([after] if after else [])),
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
        None if random else findings.randomized(model, inputs),
        softmax,
        findings.zero_gradient(partial(_logarithm, model) if softmax else model, inputs, labels.long()),
        findings.optimization_inside(model, inputs),
    ]
    return tuple(finding for finding in seen if finding)


def _logarithm(model: Model, points: Tensor) -> Tensor:
    """Logits, but for a constant, of a model that returns probabilities."""
    probabilities = model(points)
    return probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()
