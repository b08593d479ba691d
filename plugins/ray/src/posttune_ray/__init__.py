"""posttune on a Ray cluster. The command is ``posttune-ray``; nothing here imports ray before it runs."""
