"""posttune.loss"""
