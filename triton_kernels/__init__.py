"""Triton kernels, installed as `pyparallel.triton_kernels`; inside, imports are relative."""
