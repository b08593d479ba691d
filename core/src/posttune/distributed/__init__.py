"""Several processes of one run: who they are, and what they say to one another."""

from __future__ import annotations

from posttune.distributed.ranks import Ranks

__all__ = ["Ranks"]
