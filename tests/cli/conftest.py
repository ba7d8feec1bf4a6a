"""Fixtures of the command line's tests."""

from __future__ import annotations

from fake_node import node, pristine_pair

__all__ = ["node", "pristine_pair"]
