"""The experiments: thin scripts over fcomm, and what a notebook needs to look at their records."""

from __future__ import annotations

from fcomm.records import Run, load, runs

__all__ = ["Run", "load", "runs"]
