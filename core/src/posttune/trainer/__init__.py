"""posttune.trainer"""
