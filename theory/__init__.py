"""Approximation experiments on mixtures of experts: constructions, rates and plots."""
