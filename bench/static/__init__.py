"""What compiled kernels say before any GPU runs them."""
