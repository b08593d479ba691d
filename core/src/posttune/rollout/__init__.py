"""posttune.rollout"""
