"""posttune.config"""
