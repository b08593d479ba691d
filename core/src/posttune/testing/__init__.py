"""posttune.testing"""
