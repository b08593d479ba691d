"""posttune.run: a run's folder, its stages and their order."""
