"""The benchmark on an accelerator: run.sh, its parts, and ranks that share one GPU."""
