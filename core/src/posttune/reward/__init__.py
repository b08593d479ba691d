"""posttune.reward"""
