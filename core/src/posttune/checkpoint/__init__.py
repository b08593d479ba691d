"""posttune.checkpoint"""
