"""A captured CUDA graph of products: no allocation, no synchronisation. Needs a GPU."""

from pathlib import Path

import cuquant as cq


def main():
    import cupy as cp

    with cp.cuda.Stream(non_blocking=True) as stream:
        model = cq.open(Path(__file__).parent / "data/nano-llama-f16.gguf")
        up, down = (cq.quantize(model[f"blk.0.ffn_{part}.weight"], "q4_0") for part in ("up", "down"))
        x = cp.ones((1, 256), cp.float16)
        hidden, y = cp.empty((1, 768), cp.float16), cp.empty((1, 256), cp.float16)

        def step():
            cq.linear(x, up, activation="silu", out=hidden)
            cq.linear(hidden, down, residual=x, out=y)

        step()  # compiles the kernels, repacks the weights, makes the stream's own memory
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        x[...] = 2  # new numbers in the same array
        graph.launch()
        from_graph = y.copy()
        step()
        print("the graph's result is the calls', bit for bit:", bool((from_graph == y).all()))


if problem := cq.gpu_problem():
    print(f"nothing to show without a GPU: {problem}")
else:
    main()
