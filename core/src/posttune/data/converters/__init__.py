"""The data converters that come with posttune. Reading files is not their matter."""
