"""The CUDA backend: what stands between checked operations and the kernels of kernels/.

`backend` has the operations, and `trellis`, `exl3` and `moe` those of whole matrices and of mixtures;
`fragments` keeps weights as kernels read them, `activations` and `buffers` bring the rest to kernels,
`problem` and `moe_launches` pack their arguments, `jit` compiles and launches. How a kernel is launched
says cuquant.plan.
"""
