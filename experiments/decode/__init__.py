"""A decode step of a model's shape with each way to all-reduce: ``mpirun -n N python -m experiments.decode``.

`shapes` says what a model is made of and what it needs; `gpu` runs a step as one CUDA graph, `emulated` the same step in NumPy,
for tiny shapes on the cpu backend; `report` makes the table and the figure from a run's records.
"""
