"""Imported in the nursery: what is installed is listed once there, and not in every worker."""

from __future__ import annotations

from posttune.metadata import keep_listing

keep_listing()
