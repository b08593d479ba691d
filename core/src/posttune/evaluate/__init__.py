"""posttune.evaluate"""
