"""Where kernels run: `cpu` (MPI ranks on host cores) and `cuda`. Nothing above this package knows which one it uses."""
