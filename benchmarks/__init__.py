"""Speed, traffic and memory of the closed forms: `python -m benchmarks` runs everything."""
