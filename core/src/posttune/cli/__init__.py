"""posttune.cli"""
