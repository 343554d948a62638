"""Measurements against peers; each module prints a table and writes JSON."""
