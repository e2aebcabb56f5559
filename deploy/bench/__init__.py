"""Benchmarks behind ``warmroot bench NAME``: engine, curves, overhead, routing and parallel.

Every figure is a ratio within one run: contenders take turns, and medians over the rounds are compared.
"""
