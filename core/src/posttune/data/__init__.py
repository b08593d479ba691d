"""posttune.data"""
