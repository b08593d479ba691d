"""posttune.advantage"""
