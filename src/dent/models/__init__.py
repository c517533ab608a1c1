"""Architectures, as published."""

from __future__ import annotations

from dent.models.resnet import CifarResNet, resnet20, resnet26_4

__all__ = ["CifarResNet", "resnet20", "resnet26_4"]
