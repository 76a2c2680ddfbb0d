"""A second implementation of docs/NUMERICS.md, written from the page alone: NumPy and no code of isobit."""
