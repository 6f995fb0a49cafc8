"""Kernels without a GPU: compiled by g++ for the CPU, and run a block at a time.

`python -m pytest -m gpu -p emulator.plugin` runs GPU tests so, with tests/ on PYTHONPATH: `cupy.py` takes
the place of CuPy, its RawModule translates and compiles a kernel's source (`translate.py`, `device.h`,
`ptx.h`), and `driver.py` takes the place of the CUDA driver. What is emulated is a GPU of compute capability
8.0 or, by `-p emulator.hopper`, of 9.0a (`hopper.h`): wgmma, the copy engine, barriers in shared memory and
clusters, but no launches that overlap. Blocks, or clusters of them, run one after the other, and threads take
turns only where they wait for each other. Shared memory begins as NaN, and asynchronous copies arrive as late
as they may.
"""
