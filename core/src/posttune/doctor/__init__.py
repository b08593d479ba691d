"""posttune.doctor"""
