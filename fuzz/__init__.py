"""Fuzz targets, one for each decoder, and their runner: ``python -m fuzz``; docs/testing.md."""
