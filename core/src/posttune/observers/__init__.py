"""posttune.observers"""
