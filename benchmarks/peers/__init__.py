"""What the benchmarks against other runtimes share: models, exports, workers that take turns, limits, tables."""
