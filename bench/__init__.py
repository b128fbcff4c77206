"""Measures pyparallel against what people use today. Start: `python -m bench --help`, README.md."""
