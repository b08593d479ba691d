"""Checks that anyone can run on an installed posttune."""
