"""posttune.models"""
