"""A model, in a line."""

from __future__ import annotations

from typing import Any


def model_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `list_models` as a person reads it.

    >>> accuracies = [{"what": "natural", "n": 10000, "percent": 89.69, "low": 89.08, "high": 90.27}]
    >>> row = {"name": "a", "summary": "b", "parameters": 1234, "needs": "c", "accuracies": accuracies}
    >>> model_row(row)["accuracy in %"]
    'natural 89.69 (n = 10,000)'
    """
    return {
        "model": row["name"],
        "what it is": row["summary"],
        "parameters": "" if row["parameters"] is None else f"{row['parameters']:,}",
        "needs": row["needs"],
        "accuracy in %": "; ".join(accuracy_text(one) for one in row["accuracies"]),
    }


def accuracy_text(one: dict[str, Any]) -> str:
    """An accuracy of a card with the number of images that it was measured on."""
    return f"{one['what']} {one['percent']:.2f} (n = {one['n']:,})"
