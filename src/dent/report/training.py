"""How training goes, in a line."""

from __future__ import annotations

from dent.training import Epoch, Step


def step_text(step: Step) -> str:
    """For the progress bar: this epoch's loss so far, and the accuracies after the last epoch.

    >>> step_text(Step(5, 9, 2, 1.25, 0.5, Epoch(1, 0.1, 1.5, 0.4, 0.62, 0.33, 0.38, 61.2)))
    'epoch 2 loss 1.250 natural 62.0 % PGD 33.0 %'
    """
    text = f"epoch {step.epoch} loss {step.loss:.3f}"
    if step.last is not None:
        text += f" natural {100 * step.last.natural:.1f} %"
        if step.last.robust is not None:
            text += f" PGD {100 * step.last.robust:.1f} %"
    return text


def epoch_line(epoch: Epoch) -> str:
    """One epoch, aligned with the others.

    >>> print(epoch_line(Epoch(3, 0.1, 1.25, 0.5, 0.62, None, None, 61.2)))
    epoch   3  lr 0.1000  loss 1.250  trained-on 50.0 %  natural 62.0 %    61 s
    """
    robust = ""
    if epoch.robust is not None and epoch.fgsm is not None:
        robust = f"  PGD-10 {100 * epoch.robust:4.1f} %  FGSM {100 * epoch.fgsm:4.1f} %"
    average = ""
    if epoch.average_natural is not None:
        average = f"  average {100 * epoch.average_natural:4.1f} %"
    if epoch.average_robust is not None:
        average += f" / {100 * epoch.average_robust:4.1f} %"
    return (
        f"epoch {epoch.epoch:3d}  lr {epoch.lr:.4f}  loss {epoch.loss:.3f}  "
        f"trained-on {100 * epoch.accuracy:4.1f} %  natural {100 * epoch.natural:4.1f} %"
        f"{robust}{average}  {epoch.seconds:4.0f} s"
    )
