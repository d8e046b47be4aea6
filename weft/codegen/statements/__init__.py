"""Steps of a Program as statements of Python, function by function."""
