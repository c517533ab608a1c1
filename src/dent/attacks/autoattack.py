"""AutoAttack (Croce and Hein, 2020): suites of attacks without settings to tune, and their findings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dent.attacks.apgd import apgd, apgd_targeted
from dent.attacks.checks import Eps, Labels, check_attack, check_model, check_numbers, read_arguments
from dent.attacks.fab import fab, fab_targeted
from dent.attacks.findings import Finding, detect_stronger_square, inspect_model, take_logarithm
from dent.attacks.fused import fuse_batch_norm
from dent.attacks.losses import margin
from dent.attacks.reference import run_reference
from dent.attacks.search import AttackResult, Model, begin, depends_on_batch, is_broken, join_results
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
# The attacks of each version, in order, with the settings that differ from their defaults.
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
# The settings of the standard version for L1 (Croce and Hein, 2021).
FOR_L1 = {"apgd-ce": {"restarts": 5}, "apgd-t": {"targets": 5}}


@dataclass(frozen=True)
class SuiteResult(AttackResult):
    """The result of all attacks of a suite together.

    If the model depends on the batch, `inputs` is one submission of the batch with its `success`, and
    `broken` is the worst case over all attacks for each input. Otherwise the two are the same.
    """

    broken: Tensor  # (N,) bool: misclassified under any attack, or without one
    attacks: dict[str, Tensor]  # (N,) bool: the inputs that each attack broke
    findings: tuple[Finding, ...]

    def __repr__(self) -> str:
        counts = {name: int(broken.sum()) for name, broken in self.attacks.items()}
        asked = f"queries={self.queries}, gradients={self.gradients}"
        return f"SuiteResult(n={len(self.broken)}, broken={int(self.broken.sum())}, {asked}, {counts})"


def autoattack(
    model: Model,
    inputs: Tensor,
    labels: Labels,
    *,
    eps: Eps,
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
    """Run all attacks of a version (`standard`, `plus` or `rand`), or the `attacks` that are named.

    Each attack gets the inputs that the attacks before it did not break. Attacks search on a faster copy
    (`fuse_batch_norm`); the model itself decides what is broken. A model that depends on its batch is
    attacked itself, and every attack gets the whole batch.

    steps: of each run of a gradient attack. queries: of Square.
    batch_size: the number of inputs to attack at a time (default: all). Not allowed with `joint`.
    joint: True for a model that depends on its batch. If it is None, the model's attribute `independent`
    decides.
    mask: (N,) bool, the inputs that may be perturbed.
    engine: "reference" runs `pyautoattack` instead, with its own batches.
    watch: a function that is called with (attacks done, attacks, text) before each attack.

    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 4))
    >>> inputs = torch.rand(3, 3, 2, 2)
    >>> run = autoattack(model, inputs, model(inputs).argmax(1), eps=0.5, steps=10, queries=20)
    >>> run.broken.tolist(), list(run.attacks), run.findings
    ([True, True, True], ['apgd-ce', 'apgd-t', 'fab-t', 'square'], ())
    """
    chosen = select_attacks(version, norm, attacks)
    joint = depends_on_batch(model) if joint is None else joint
    check_numbers(batch_size=batch_size)
    if joint and batch_size is not None:
        raise ValueError("batch_size splits the batch that a joint attack keeps together; leave it out")
    lookup("engine", engine, dict.fromkeys(("dent", "reference")))
    check_model(model)
    labels, eps = read_arguments(inputs, labels, eps)
    check_attack(inputs, labels, eps=eps, norm=norm, mask=mask, steps=steps, queries=queries)
    size = batch_size or max(len(inputs), 1)
    if engine == "reference":
        if mask is not None or watch is not None:
            raise ValueError("the reference knows no mask and no watch; use engine='dent'")
        findings = inspect_model(model, inputs[:size], labels[:size], random=version == "rand")
        result, broken = run_reference(
            model, inputs, labels, eps=eps, norm=norm, version=version, attacks=attacks, steps=steps,
            queries=queries, batch_size=size, seed=seed,
        )  # fmt: skip
        return SuiteResult(**vars(result), broken=broken, attacks={}, findings=findings)
    for name, settings in chosen.items():
        chosen[name] = settings | ({"queries": queries} if name == "square" else {"steps": steps})
    mask = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask
    batches = list(zip(*(part.split(size) for part in (inputs, labels, mask)), strict=True))
    done = itertools.count()

    def report(text: str) -> None:
        if watch:
            watch(next(done), len(batches) * len(chosen), text)

    attack_batch = partial(
        _attack_batch, model, attacks=chosen, eps=eps, norm=norm, joint=joint, seed=seed,
        random=version == "rand", report=report,
    )  # fmt: skip
    return _join_batches([attack_batch(*batch) for batch in batches])


def select_attacks(
    version: str, norm: str, attacks: Sequence[str] | None = None
) -> dict[str, dict[str, int]]:
    """Return the attacks of a version in order, with their settings; or only those that are named."""
    chosen = lookup("version", version, VERSIONS)
    if version == "standard" and norm == "l1":
        chosen = {name: FOR_L1.get(name, {}) for name in chosen}
    if attacks is None:
        return dict(chosen)
    if not attacks:
        raise ValueError(f"expected one attack or more of: {', '.join(ATTACKS)}")
    for name in attacks:
        lookup("attack", name, ATTACKS)
    return {name: chosen.get(name, {}) for name in attacks}


def _attack_batch(
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
    report: Callable[[str], None],
) -> SuiteResult:
    """Run the attacks on one batch."""
    findings = inspect_model(model, inputs, labels, random=random)
    names = {finding.name for finding in findings}
    if "probabilities" in names:
        model = take_logarithm(model)
    draws = max(settings.get("draws", 1) for settings in attacks.values())
    attacked, best, logits = begin(
        model, inputs, labels, eps=eps, norm=norm, draws=draws, joint=joint, mask=mask
    )
    fast = model if joint or "optimization inside" in names else fuse_batch_norm(model, inputs)
    broken: dict[str, Tensor] = {}
    for name, settings in attacks.items():
        report(f"{name}, {int((~best.broken).sum())} of {len(inputs)} stand")
        broken[name] = torch.zeros_like(best.broken)
        given = best.mask if joint else best.mask & ~best.broken
        if not given.any():
            continue
        if "targets" in settings:
            settings = settings | {"targets": min(settings["targets"], logits.shape[1] - 1)}
        result = ATTACKS[name](
            fast, inputs, best.labels, eps=eps, norm=norm, joint=joint, mask=given, seed=seed, **settings
        )
        attacked.queries += result.queries
        attacked.gradients += result.gradients
        answer = attacked.evaluate(result.inputs, partial(margin, labels=best.labels))
        broken[name] = given & is_broken(answer.logits, best.labels)
        rows = best.list_open() if joint else given.nonzero().squeeze(1)  # a joint batch stays whole
        best.record(rows, result.inputs[rows], answer.values[rows], broken[name][rows])
    worst = best.broken.clone()
    return SuiteResult(**vars(best.submit(attacked)), broken=worst, attacks=broken, findings=findings)


def _join_batches(runs: Sequence[SuiteResult]) -> SuiteResult:
    """Return the results of several batches as one; each finding has the figures of its first batch."""
    attacks = {name: torch.cat([run.attacks[name] for run in runs]) for name in runs[0].attacks}
    findings = {finding.name: finding for run in reversed(runs) for finding in run.findings}
    stronger = detect_stronger_square(attacks)
    return SuiteResult(
        **vars(join_results(runs)),
        broken=torch.cat([run.broken for run in runs]),
        attacks=attacks,
        findings=(*findings.values(), *([stronger] if stronger else [])),
    )
